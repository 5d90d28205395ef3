"""Criterion and labels of a model with a fused loss, which it computes from labels, without logits.

The model gets the criterion's labels, and the criterion takes the loss from the model's output; no criterion
is needed.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from colossalai.nn.loss import ModelLoss, wants_logits


def criterion_of(criterion: Callable[..., Any] | None, *, fused_loss: bool) -> Callable[..., Any] | None:
    """Return the criterion to use: with `fused_loss` the model's own loss, if none is given.

    Raises:
        ValueError: `criterion` needs logits, and `fused_loss` is set.
    """
    if not fused_loss:
        return criterion
    if (name := wants_logits(criterion)) is not None:
        raise ValueError(
            f"the criterion is {name}, which wants logits, and with fused_loss=True there are none in "
            "training: leave the criterion out (the loss is then the model's own), pass GPTLMLoss with a GPT "
            "of colossalai.model_zoo, or a function of (output, labels) that reads output.loss, or leave "
            "fused_loss out"
        )
    return ModelLoss() if criterion is None else criterion


def with_labels(data: Any, labels: Any, model: nn.Module) -> Any:
    """Return the data of a batch with its labels, as keyword arguments of a language model.

    Args:
        data: As a loader gives it: a dict, a tuple or list of positional arguments, or the first one.
        labels: The labels; if they are not a tensor, the data is returned as it is.
        model: The model, whose forward names the arguments.
    """
    if not isinstance(labels, Tensor):
        return data
    if isinstance(data, Mapping):
        return {**data, "labels": labels}
    given = data if isinstance(data, tuple | list) else (data,)
    return {**dict(zip(inspect.signature(model.forward).parameters, given, strict=False)), "labels": labels}
