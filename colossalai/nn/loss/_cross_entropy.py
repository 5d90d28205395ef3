"""Cross entropy over logits that may be cut along the batch and along the classes.

Labels come whole: the ranks of a tensor-parallel group read the same batch. The loss is the same on all of
them: the mean (or the sum) over the whole batch.
"""

from typing import Any, ClassVar

import torch
from torch import nn

from colossalai.communication import all_reduce, reduce_forward_copy_backward
from colossalai.context import Mesh
from colossalai.nn.layer import Cut, head_cut, launched_job, own_part, require_cut, require_mode
from colossalai.registry import LOSSES
from colossalai.tensor import set_built_for

GivenLoss = torch.Tensor | tuple[torch.Tensor, torch.Tensor | float]


class ParallelCrossEntropyLoss(nn.Module):
    """Cross entropy of sharded logits.

    With p ranks along the class axes, for logits of (batch, ..., classes): three all-reduces of one number
    for each position (1909.08053, section 3); the logits themselves are never gathered. Label smoothing takes
    another number for each position and a single one. Logits of minus infinity are not classes: a classifier
    is padded with them where the ranks do not divide its classes.

    Args:
        ignore_index: Labels that do not count.
        reduction: "mean" over the labels that count, or "sum".
        label_smoothing: Share of the target that is spread evenly over all classes.
        with_count: Return the pair (sum, number of labels that count): then a training step uses the mean
            over all labels of all ranks and microbatches, also if they are distributed unevenly.
        cut: Cut of the logits; default: the output cut of the last classifier.
        mesh: The ranks; default: those of the launched job.

    Shape:
        Logits (batch, ..., classes), a slice; labels (batch, ...), whole.

    Raises:
        ValueError: `reduction` is neither "mean" nor "sum", or not "mean" with `with_count`, or
            `label_smoothing` is not in [0, 1].
    """

    def __init__(
        self,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        *,
        with_count: bool = False,
        cut: Cut | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        super().__init__()
        if reduction not in ("mean", "sum"):
            raise ValueError(f"reduction is {reduction!r}; it must be 'mean' or 'sum'")
        if not 0.0 <= label_smoothing <= 1.0:
            raise ValueError(f"label_smoothing is {label_smoothing}; it must be from 0 to 1")
        self.ignore_index = ignore_index
        _refuse_reduction(reduction, with_count)
        self.reduction = reduction
        self.with_count = with_count
        self.label_smoothing = label_smoothing
        job = launched_job()
        self.mesh = mesh or job.mesh
        self.cut = cut or head_cut(job.mode)
        self._batch_axes = tuple(map(self.mesh.axis, self.cut.batch))
        self._class_axes = tuple(map(self.mesh.axis, self.cut.features))
        self._num_slices = self.mesh.axis_size(self.cut.features)  # of the classes
        self._slice_rank = self.mesh.axis_rank_in_order(self.cut.features)

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> GivenLoss:
        """Return the loss over the whole batch, the same on all tensor-parallel ranks.

        Raises:
            ValueError: `logits`, but for the classes, and this rank's `labels` differ in shape, a label is
                not a class, or the logits come from a layer that cuts them otherwise.
        """
        logits = require_cut(logits, self.cut, by=type(self).__name__)
        self._check(labels, logits.shape[-1] * self._num_slices)
        if self.cut.batch:
            labels = own_part(labels, self.cut.batch, self.mesh, by=type(self).__name__)
        if logits.shape[:-1] != labels.shape:
            raise ValueError(
                f"{type(self).__name__} got logits of shape {tuple(logits.shape)}, which do not fit labels "
                f"of which this rank's part has shape {tuple(labels.shape)}: they must have one dimension "
                f"more, the classes"
            )
        counted = labels != self.ignore_index
        losses = self._losses(logits, labels.masked_fill(~counted, 0)).masked_fill(~counted, 0.0)
        total, count = losses.sum(), counted.sum()
        for axis in self._batch_axes:  # two numbers, over the ranks that hold other parts of the batch
            total, count = reduce_forward_copy_backward(total, axis), all_reduce(count, axis)
        if self.with_count:
            return total, count
        return total / count if self.reduction == "mean" else total

    def _losses(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the loss at each position, in float32 or better."""
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        largest = wide.detach().amax(-1)
        for axis in self._class_axes:  # one number for each position
            largest = all_reduce(largest, axis, torch.distributed.ReduceOp.MAX)
        shifted = wide - largest.unsqueeze(-1)
        log_sum = self._sum_over_classes(shifted.exp().sum(-1)).log()
        first = self._slice_rank * logits.shape[-1]
        elsewhere = (labels < first) | (labels >= first + logits.shape[-1])
        own = shifted.gather(-1, (labels - first).masked_fill(elsewhere, 0).unsqueeze(-1)).squeeze(-1)
        of_label = self._sum_over_classes(own.masked_fill(elsewhere, 0.0))
        if self.label_smoothing == 0.0:
            return log_sum - of_label
        padding = shifted == float("-inf")  # classes that a padded classifier has beyond its own
        mean = self._sum_over_classes(shifted.masked_fill(padding, 0.0).sum(-1)) / self._count(~padding)
        return log_sum - (1.0 - self.label_smoothing) * of_label - self.label_smoothing * mean

    def _sum_over_classes(self, part: torch.Tensor) -> torch.Tensor:
        for axis in self._class_axes:
            part = reduce_forward_copy_backward(part, axis)
        return part

    def _count(self, is_class: torch.Tensor) -> torch.Tensor:
        """Return the number of classes on all ranks, which is the same at every position."""
        count = is_class.flatten(0, -2)[:1].sum()
        for axis in self._class_axes:
            count = all_reduce(count, axis)
        return count

    def _check(self, labels: torch.Tensor, num_classes: int) -> None:
        """Look at all labels, not at this rank's part of them: all ranks raise, or none does."""
        counted = labels[labels != self.ignore_index]
        if counted.numel() > 0:
            bounds = counted.aminmax()
            low, high = bounds.min.item(), bounds.max.item()
            if low < 0 or high >= num_classes:
                raise ValueError(
                    f"{type(self).__name__} got labels from {low} to {high}, but there are {num_classes} "
                    f"classes, from 0"
                )


class ModeCrossEntropyLoss(ParallelCrossEntropyLoss):
    """The cross entropy of a mode, over logits of a classifier that does, or does not, cut the classes.

    Args:
        ignore_index: Labels that do not count.
        reduction: "mean" over the labels that count, or "sum".
        label_smoothing: Share of the target that is spread evenly over all classes.
        with_count: Return the pair (sum, number of labels that count).
    """

    mode: ClassVar[str]
    cut_of_mode: ClassVar[Cut]

    def __init__(
        self,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        *,
        with_count: bool = False,
    ) -> None:
        require_mode(self.mode, by=type(self).__name__)
        super().__init__(
            ignore_index, reduction, label_smoothing, with_count=with_count, cut=self.cut_of_mode
        )


@LOSSES.register_module
class CrossEntropyLoss(nn.Module):
    """The cross entropy of the current tensor mode; `torch.nn.CrossEntropyLoss` where there is none.

    The logits are taken to be cut as the classifier that was built last leaves them.

    Args:
        args: Positional arguments of `torch.nn.CrossEntropyLoss`, where there is no tensor mode.
        with_count: Return the pair (sum, denominator of the mean): then a training step uses the mean over
            all labels of all ranks and microbatches, also if they are distributed unevenly.
        options: Keyword arguments of it; in a tensor mode those of `ParallelCrossEntropyLoss`.

    Raises:
        ValueError: An option is out of range, or `with_count` is set and `reduction` is not "mean".
    """

    def __init__(self, *args: Any, with_count: bool = False, **options: Any) -> None:
        super().__init__()
        self.loss: nn.Module
        mode = launched_job().mode
        set_built_for(self, mode=mode)
        if mode is None:
            kind = _CountedCrossEntropyLoss if with_count else nn.CrossEntropyLoss
            self.loss = kind(*args, **options)
        else:
            self.loss = ParallelCrossEntropyLoss(*args, with_count=with_count, **options)
        self.reduction: str = self.loss.reduction

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> GivenLoss:
        """Return the loss."""
        loss: GivenLoss = self.loss(logits, labels)
        return loss


class _CountedCrossEntropyLoss(nn.CrossEntropyLoss):
    """The cross entropy of torch as a pair (sum, count), whose ratio is its mean."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        _refuse_reduction(self.reduction, with_count=True)

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> GivenLoss:  # type: ignore[override]
        """Return the pair; classes with weights count by those, as in torch."""
        total = nn.functional.cross_entropy(
            input,
            target,
            weight=self.weight,
            ignore_index=self.ignore_index,
            reduction="sum",
            label_smoothing=self.label_smoothing,
        )
        if target.is_floating_point():  # probabilities of the classes
            return total, target.numel() // target.shape[1 if target.ndim > 1 else 0]
        counted = target != self.ignore_index
        if self.weight is None:
            return total, counted.sum()
        return total, (self.weight[target.masked_fill(~counted, 0)] * counted).sum()


def _refuse_reduction(reduction: str, with_count: bool) -> None:
    if with_count and reduction != "mean":
        raise ValueError(
            f"reduction is {reduction!r}, but with_count=True returns the pair (sum, count), whose ratio is "
            "the mean: leave reduction out"
        )
