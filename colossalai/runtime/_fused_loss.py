"""Loss in chunks: a language model computes its loss from labels, in training without logits.

The model gets the labels that the criterion gets otherwise, and the criterion takes the loss from what the
model returns: none is needed.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from colossalai.nn.loss import FusesLoss, ModelLoss, wants_logits
from colossalai.pipeline import ModelStage
from colossalai.runtime._plan import Plan
from colossalai.shardformer import fuse_losses


def apply_fused_loss(model: nn.Module, plan: Plan) -> None:
    """Let the language models in a model compute head and loss together, if a plan says so; in place.

    Args:
        model: The model, or its stages of this rank, with layers cut already.
        plan: The plan.

    Raises:
        ValueError: `model` has no language model, or one with a head or loss of another kind.
    """
    if not plan.fused_loss:
        return
    parts = [part.model if isinstance(part, ModelStage) else part for part in model.modules()]
    own = [part for part in parts if isinstance(part, FusesLoss)]
    for part in own:
        part.fused_loss = True
    if fuse_losses(model) + len(own) == 0:
        raise ValueError(
            f"fused_loss: {type(model).__name__} is no language model that computes head and loss together: "
            "take GPT of colossalai.model_zoo, or a causal model of transformers; "
            "register_rule(..., Rule(loss_head='lm_head')) of colossalai.shardformer names the head of others"
        )


def criterion_of(criterion: Callable[..., Any] | None, *, fused_loss: bool) -> Callable[..., Any] | None:
    """Return the criterion of a door: with `fused_loss` the model's own loss, if none is given.

    Raises:
        ValueError: `fused_loss`, and it wants logits.
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
        labels: The labels; where they are no tensor, there are none beside the data.
        model: The model, whose forward names the arguments.
    """
    if not isinstance(labels, Tensor):
        return data
    if isinstance(data, Mapping):
        return {**data, "labels": labels}
    given = data if isinstance(data, tuple | list) else (data,)
    return {**dict(zip(inspect.signature(model.forward).parameters, given, strict=False)), "labels": labels}
