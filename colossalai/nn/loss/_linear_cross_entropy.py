"""Linear layer and cross entropy as one loss, which never holds all logits; formulas: see `_chunks.py`."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from colossalai.communication import outside_graphs
from colossalai.nn.layer import as_autocast
from colossalai.nn.loss._chunks import ChunkedCrossEntropy, LossTerms, VocabularySlice
from colossalai.registry import LOSSES
from colossalai.tensor import spec_of


@LOSSES.register_module
class LinearCrossEntropyLoss(nn.Module):
    """Cross entropy of `x @ weight.T + bias`, without ever holding all these logits.

    Equal to `cross_entropy(linear(x, weight, bias).float(), labels)`, with its gradients, in the memory of a
    chunk of rows. Only required gradients are computed. The loss is in float32 or better for inputs of any
    dtype. A weight that is cut along the vocabulary over ranks, as that of a vocabulary-parallel classifier
    of mode "1d", may be padded: the ranks have the same `x` and labels, and get the same loss. The formulas
    are at the head of `colossalai/nn/loss/_chunks.py`.

    Args:
        ignore_index: Labels that do not count.
        reduction: "mean" over the labels that count, "sum", or "none".
        label_smoothing: Share of the target that is spread evenly over all classes.
        z_loss: Coefficient of the mean of logsumexp^2 over the labels that count (2204.02311, section 5).
        logits_scale: Factor of the logits.
        softcap: The logits become `softcap * tanh(logits / softcap)`, after the scale; None for no cap.
        chunk: Rows at a time; None for as many as 32 MiB of logits in float32, at least 256.

    Shape:
        x (..., hidden), weight (classes, hidden), labels (...), bias (classes,), token weights (...); the
        loss is a scalar, with "none" of the shape of the labels.

    Raises:
        ValueError: `reduction` is unknown, or a number is out of its range.
    """

    def __init__(
        self,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        logits_scale: float = 1.0,
        softcap: float | None = None,
        chunk: int | None = None,
    ) -> None:
        super().__init__()
        if reduction not in ("mean", "sum", "none"):
            raise ValueError(f"reduction is {reduction!r}; it must be 'mean', 'sum' or 'none'")
        if not 0.0 <= label_smoothing <= 1.0:
            raise ValueError(f"label_smoothing is {label_smoothing}; it must be from 0 to 1")
        if not (z_loss >= 0.0 and math.isfinite(z_loss)):
            raise ValueError(f"z_loss is {z_loss}; it must be a number of at least 0")
        if not (math.isfinite(logits_scale) and logits_scale != 0.0):
            raise ValueError(f"logits_scale is {logits_scale}; it must be a number other than 0")
        if softcap is not None and not (softcap > 0.0 and math.isfinite(softcap)):
            raise ValueError(f"softcap is {softcap}; it must be a number above 0, or None for no cap")
        if chunk is not None and (type(chunk) is not int or chunk < 1):
            raise ValueError(f"chunk is {chunk!r}; it must be a whole number of rows of at least 1, or None")
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.label_smoothing = label_smoothing
        self.z_loss = z_loss
        self.logits_scale = logits_scale
        self.softcap = softcap
        self.chunk = chunk

    def extra_repr(self) -> str:
        """Return the options for `print(model)`."""
        return f"reduction={self.reduction!r}, chunk={self.chunk}"

    def forward(
        self,
        x: Tensor,
        weight: Tensor,
        labels: Tensor,
        bias: Tensor | None = None,
        token_weights: Tensor | None = None,
        *,
        vocabulary: VocabularySlice | None = None,
    ) -> Tensor:
        """Return the loss.

        Args:
            x: (..., hidden).
            weight: (classes, hidden), or this rank's slice of it.
            labels: (...), whole numbers.
            bias: (classes,), cut as the weight is.
            token_weights: (...), weight of the loss of each label; the mean is over their sum.
            vocabulary: The classes of this rank; default: as the weight carries it.

        Raises:
            ValueError: The shapes or types do not fit, a label is not a class, or the weight is not cut along
                the vocabulary.
        """
        vocabulary = vocabulary or vocabulary_of(weight)
        self._check(x, weight, labels, bias, token_weights, vocabulary)
        flat, flat_labels = x.reshape(-1, x.shape[-1]), labels.reshape(-1).long()
        counted = flat_labels != self.ignore_index
        weights = None
        if token_weights is not None:
            wide = torch.promote_types(x.dtype, torch.float32)
            weights = token_weights.detach().reshape(-1).to(wide).masked_fill(~counted, 0.0)
        rows = None if bool(counted.all()) else counted.nonzero().squeeze(1)
        terms = LossTerms(
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            logits_scale=self.logits_scale,
            softcap=self.softcap,
            chunk=self.chunk,
            vocabulary=vocabulary,
        )
        function: Callable[..., Tensor] = ChunkedCrossEntropy.apply
        if torch.compiler.is_compiling():
            function = outside_graphs(function)
        loss = function(
            as_autocast(flat),
            as_autocast(weight),
            None if bias is None else as_autocast(bias),
            flat_labels,
            weights,
            rows,
            terms,
            self.reduction,
            torch.is_grad_enabled(),
        )
        return loss.view(labels.shape) if self.reduction == "none" else loss

    def _check(
        self,
        x: Tensor,
        weight: Tensor,
        labels: Tensor,
        bias: Tensor | None,
        token_weights: Tensor | None,
        vocabulary: VocabularySlice,
    ) -> None:
        by = type(self).__name__
        if weight.dim() != 2 or x.shape[-1:] != weight.shape[1:]:
            raise ValueError(
                f"{by} got x of shape {tuple(x.shape)} and a weight of shape {tuple(weight.shape)}; they "
                "must be (..., hidden) and (classes, hidden)"
            )
        if x.shape[:-1] != labels.shape:
            raise ValueError(
                f"{by} got x of shape {tuple(x.shape)} and labels of shape {tuple(labels.shape)}; the labels "
                "must have all dimensions of x but the last"
            )
        if labels.is_floating_point() or labels.dtype == torch.bool:
            raise ValueError(
                f"{by} got labels of type {labels.dtype}; they must be whole numbers, of classes"
            )
        if bias is not None and bias.shape != weight.shape[:1]:
            raise ValueError(
                f"{by} got a bias of shape {tuple(bias.shape)}; it must be ({len(weight)},), one number for "
                "each row of the weight"
            )
        given = {"weight": weight, "bias": bias}
        for name, operand in given.items():
            if operand is not None and as_autocast(operand).dtype != as_autocast(x).dtype:
                raise ValueError(
                    f"{by} got x of type {x.dtype} and a {name} of type {operand.dtype}: cast one"
                )
        if token_weights is not None and (token_weights.shape != labels.shape or token_weights.requires_grad):
            raise ValueError(
                f"{by} got token_weights of shape {tuple(token_weights.shape)}; they must have the shape of "
                f"the labels, {tuple(labels.shape)}, and need no gradient: detach them"
            )
        counted = labels[labels != self.ignore_index]
        if counted.numel() > 0:
            low, high = (bound.item() for bound in counted.aminmax())
            if low < 0 or high >= vocabulary.num_classes:
                raise ValueError(
                    f"{by} got labels from {low} to {high}, but there are {vocabulary.num_classes} classes, "
                    "from 0"
                )


def vocabulary_of(weight: Tensor) -> VocabularySlice:
    """Return the classes of a weight (classes, hidden), from its spec if it has one.

    Raises:
        ValueError: `weight` is cut otherwise than along the classes, or over several axes.
    """
    spec = spec_of(weight)
    if spec is None or not spec.axes:
        return VocabularySlice(num_classes=len(weight))
    if len(spec.dims[0]) != 1 or spec.dims[1] or spec.stored_as is not None or spec.parts is not None:
        raise ValueError(
            f"a weight cut as {spec.dims}: the loss in chunks takes a weight cut along the classes over "
            "one axis, as in mode '1d', or not at all; use CrossEntropyLoss over logits"
        )
    return VocabularySlice(num_classes=spec.whole_shape[0], axis=spec.mesh.axis(spec.dims[0][0]))
