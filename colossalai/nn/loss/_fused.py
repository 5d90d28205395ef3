"""A language model that returns its loss: operands of the head, placeholder of the logits, output.

With `fused_loss=True` the last layer and the cross entropy are computed together, in training and where the
model is given labels. The loss is computed within the forward of the model: there the weight of the head is
whole where FSDP shards it, and the precision in force. The placeholder of the logits raises an error
with the reason when it is read.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from colossalai.nn.layer import Cut, ParallelLinear, require_cut
from colossalai.nn.loss._chunks import VocabularySlice
from colossalai.nn.loss._linear_cross_entropy import LinearCrossEntropyLoss

_WHY = (
    "there are no logits: with fused_loss=True a language model that is given labels computes its loss in "
    "training without them; use its loss, call eval() or leave the labels out where you need logits, or "
    "leave fused_loss out"
)


class MissingLogitsError(ValueError, AttributeError):
    """Logits are read that were not computed; an AttributeError, too, as Python expects of `hasattr`."""


class MissingLogits:
    """Placeholder of logits, a singleton; reading it raises an error with the reason."""

    def __getattr__(self, name: str) -> NoReturn:
        raise MissingLogitsError(_WHY)

    def __getitem__(self, index: Any) -> NoReturn:
        raise MissingLogitsError(_WHY)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        """Refuse to be an argument of a function of torch."""
        raise MissingLogitsError(_WHY)

    def __mul__(self, other: Any) -> NoReturn:
        """Refuse to be scaled or capped, as some models do before the loss."""
        raise MissingLogitsError(_WHY)

    __rmul__ = __truediv__ = __mul__

    def contiguous(self) -> "MissingLogits":
        """Return itself: some models call this between head and loss."""
        return self

    float = contiguous

    def __repr__(self) -> str:
        return f"<{_WHY}>"

    def __reduce__(self) -> str:
        return "MISSING_LOGITS"  # copies are the one object


MISSING_LOGITS = MissingLogits()


class LanguageModelOutput(NamedTuple):
    """Output of a model of `colossalai.model_zoo` that is given labels.

    Attributes:
        total: The sum of the losses of the labels that count.
        num_labels: Number of these labels.
        logits: (batch, seq, vocab), a slice; `MISSING_LOGITS` where they were not computed.
    """

    total: Tensor
    num_labels: Tensor
    logits: Any

    @property
    def loss(self) -> Tensor:
        """The mean over the labels that count."""
        return self.total / self.num_labels

    def __getattr__(self, name: str) -> NoReturn:
        raise MissingLogitsError(
            f"this is the output of a language model with labels, with loss and logits, and has no "
            f"{name!r}: a criterion that wants the logits themselves is for a model without labels, and "
            "without fused_loss=True"
        )


@dataclass(frozen=True)
class HeadOperands:
    """The input of a head, and its parameters.

    Attributes:
        x: (..., hidden).
        weight: (classes, hidden), this rank's slice.
        bias: (classes,), or None.
        vocabulary: The classes of this rank.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    vocabulary: VocabularySlice

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that the logits would have on this rank."""
        return (*self.x.shape[:-1], len(self.weight))

    def loss(self, labels: Tensor, *, ignore_index: int, reduction: str) -> Tensor:
        """Return the cross entropy with labels (...), in chunks."""
        criterion = LinearCrossEntropyLoss(ignore_index, reduction)
        loss: Tensor = criterion(self.x, self.weight, labels, self.bias, vocabulary=self.vocabulary)
        return loss


def head_operands(head: nn.Module, x: Tensor) -> HeadOperands:
    """Return the operands of a head and its input for a loss in chunks.

    Args:
        head: A linear layer, or a classifier of no tensor mode or of "1d".
        x: Its input.

    Raises:
        ValueError: The head is another module, or the input is not cut as it was built for.
    """
    refuse_other_head(head)
    weight, bias = head.get_parameter("weight"), getattr(head, "bias", None)
    if not isinstance(head, ParallelLinear):
        return HeadOperands(x, weight, bias, VocabularySlice(num_classes=len(weight)))
    axes = head.scheme.w_out
    axis = head.mesh.axis(axes) if head.mesh.axis_size(axes) > 1 else None
    x = require_cut(x, head.scheme.x, by=type(head).__name__)
    return HeadOperands(x, weight, bias, VocabularySlice(num_classes=head.out_features, axis=axis))


def refuse_other_head(head: nn.Module) -> None:
    """Raise if a module cannot be the head of a loss in chunks.

    Raises:
        ValueError: `head` is not a linear layer, or is cut by more than the vocabulary.
    """
    if isinstance(head, ParallelLinear):
        scheme = head.scheme
        if scheme.x == Cut() and not scheme.y.batch and not scheme.w_in and head.weight_is_transposed:
            return
        raise ValueError(
            f"fused_loss cannot take {type(head).__name__}, whose weight is cut over {scheme.w_in} and "
            f"{scheme.w_out}: it goes with tensor mode '1d', or none"
        )
    if type(head) is not nn.Linear:
        raise ValueError(
            f"fused_loss cannot take a head that is a {type(head).__module__}.{type(head).__qualname__}: it "
            "must be a torch.nn.Linear (adapters such as LoRA: merge them, or leave fused_loss out)"
        )


class FusesLoss(nn.Module):
    """Base of models that can compute head and loss together, if `fused_loss` is set.

    Attributes:
        fused_loss: Whether the forward does, in training and where it is given labels.
    """

    fused_loss: bool = False


class LossOfOutput(nn.Module):
    """Base of criteria that take a `LanguageModelOutput` as well as logits."""


def wants_logits(criterion: Any) -> str | None:
    """Return the name of a criterion that is known to take logits only; None for all others."""
    inner = criterion
    while isinstance(inner, partial):
        inner = inner.func
    if isinstance(inner, LossOfOutput | ModelLoss):
        return None
    kind = type(inner) if isinstance(inner, nn.Module) else inner
    modules = ("torch.nn.", "torch._C._nn", "colossalai.nn.")
    if str(getattr(kind, "__module__", "")).startswith(modules):
        return str(getattr(kind, "__name__", kind))
    return None


def logits_of(output: Any) -> Any:
    """Return the output of a model without labels, from its output with labels."""
    return output.logits if isinstance(output, LanguageModelOutput) else output


class ModelLoss:
    """The criterion of a model that returns its loss: takes it from the output."""

    reduction = "mean"

    def __call__(self, output: Any, labels: Any = None) -> Tensor:
        """Return the loss.

        Raises:
            ValueError: `output` has no loss.
        """
        loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
        if not isinstance(loss, torch.Tensor):
            raise ValueError(
                f"fused_loss=True without a criterion takes the loss that the model returns, and this "
                f"{type(output).__name__} has none: give the model labels, as a batch (ids, labels) or by "
                "the key 'labels'"
            )
        return loss
