"""Losses of models with experts: the task's, and the auxiliary losses of the layers."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from colossalai.context import MOE_CONTEXT
from colossalai.logging import get_dist_logger
from colossalai.nn.loss._cross_entropy import CrossEntropyLoss, GivenLoss
from colossalai.registry import LOSSES
from colossalai.tensor import nested_tensors


@LOSSES.register_module
class MoeLoss(nn.Module):
    """A loss plus `aux_weight` times the auxiliary losses of the forward that its arguments come from.

    That is the forward of the wrapped model (from `Booster.boost`, `colossalai.initialize` or
    `zero_model_wrapper`) that returned them, or the tensors that they were computed from; of several such
    forwards all count. If none is known, as for a model without a wrapper, it is the last one. For a pair
    (sum, count) the auxiliary loss times the count is added to the sum, since it is a mean. In evaluation the
    layers add zero.

    Args:
        aux_weight: Factor of the auxiliary loss.
        loss_fn: Returns the loss function, as a class of losses does.
        args: Arguments of `loss_fn`.
        kwargs: Keyword arguments of `loss_fn`.

    Raises:
        ValueError: `loss_fn` is a loss function, or returns none.
    """

    def __init__(self, aux_weight: float, loss_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        super().__init__()
        if isinstance(loss_fn, nn.Module) or not callable(loss_fn):
            raise ValueError(
                f"loss_fn is {loss_fn!r:.80}; it must be the class of a loss, such as nn.CrossEntropyLoss, "
                "followed by its arguments"
            )
        built = loss_fn(*args, **kwargs)
        if not callable(built):
            raise ValueError(f"loss_fn returned a {type(built).__name__}, which is not a loss function")
        self.aux_weight = aux_weight
        self.loss_fn = built
        # Read by a pipeline: sums of microbatches add up.
        self.reduction: str = getattr(built, "reduction", "mean")

    def forward(self, *args: Any, **kwargs: Any) -> GivenLoss:
        """Return the loss of these arguments, plus the auxiliary one."""
        loss: GivenLoss = self.loss_fn(*args, **kwargs)
        losses = MOE_CONTEXT.losses_of(nested_tensors((loss, args, kwargs)))
        if not losses.terms:
            get_dist_logger().log_once(
                f"{type(self).__name__}: no layer of colossalai.nn.moe has left an auxiliary loss: the model "
                "has none, or its forward did not run in this process; the loss is the task's alone",
                ranks=[0],
            )
            return loss
        extra = self.aux_weight * losses.total()
        if isinstance(loss, torch.Tensor):
            return loss + extra
        total, count = loss
        return total + extra * count, count


@LOSSES.register_module
class MoeCrossEntropyLoss(MoeLoss):
    """`MoeLoss` of `colossalai.nn.CrossEntropyLoss`, which follows the tensor mode.

    Args:
        aux_weight: Factor of the auxiliary loss.
        args: Arguments of `CrossEntropyLoss`.
        kwargs: Keyword arguments of `CrossEntropyLoss`.
    """

    def __init__(self, aux_weight: float = 0.01, *args: Any, **kwargs: Any) -> None:
        super().__init__(aux_weight, CrossEntropyLoss, *args, **kwargs)
