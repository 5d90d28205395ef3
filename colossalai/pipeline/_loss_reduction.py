"""Reduction of a criterion: whether the losses of microbatches are means over samples, or sums that add up.

[Note: means and sums]
The loss of a batch is the mean of the losses of its microbatches, weighted by their samples; for sums it is
the sum. The option `loss_reduction` states the reduction, else the attribute `reduction` of the criterion, as
of losses of torch. Functions and modules around a loss have no such attribute, and could divide a sum.
For these the mean is assumed, and checked once: the loss of a microbatch is compared with the losses of its
halves. A mean is between these, also for halves with different numbers of labels, so a mean is never
reported. The check calls the criterion twice more, on copies, without gradients; stating the reduction avoids
these calls.
"""

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, cast

import torch

from colossalai.logging import get_dist_logger
from colossalai.pipeline.execution import BatchDim, cut_batch, output_dim_of
from colossalai.tensor import map_tensors

REDUCTIONS = ("mean", "sum")
_TOLERANCE = 1e-2  # relative; wide enough for losses in 16 bits


def reduction_of(criterion: Callable[..., Any] | None) -> str | None:
    """Return the reduction that a criterion states, or None."""
    stated: object
    if isinstance(criterion, functools.partial):
        stated = criterion.keywords.get("reduction")
        return stated if isinstance(stated, str) else reduction_of(criterion.func)
    if inspect.ismethod(criterion) and criterion.__name__ in ("forward", "__call__"):
        return reduction_of(cast(Callable[..., Any], criterion.__self__))
    stated = getattr(criterion, "reduction", None)
    if isinstance(stated, str):
        return stated
    if inspect.isfunction(criterion):  # such as cross_entropy of torch.nn.functional
        argument = inspect.signature(criterion).parameters.get("reduction")
        return "mean" if argument is not None and argument.default == "mean" else None
    return None


def _name_of(criterion: Callable[..., Any]) -> str:
    """Return the name of a criterion, the same for all functions from one definition."""
    if isinstance(criterion, functools.partial):
        return _name_of(criterion.func)
    named: Any = criterion if inspect.isroutine(criterion) else type(criterion)
    return f"{named.__module__}.{named.__qualname__}"


def is_sum_of_parts(whole: float, parts: tuple[float, float]) -> bool:
    """Return whether a loss is the sum of the losses of two parts, not their mean."""
    slack = _TOLERANCE * max(abs(whole), *map(abs, parts))
    is_between = min(parts) - slack <= whole <= max(parts) + slack
    return math.isclose(whole, sum(parts), rel_tol=0, abs_tol=slack) and not is_between


class ReductionCheck:
    """Comparison of criteria of unknown reduction, each once, with a warning for sums.

    A criterion is identified by its name, so a function that a loop defines anew is compared in one step
    only. Neither the name nor the number of calls depends on values, so all replicas and tensor-parallel
    ranks make the same calls of a criterion that communicates.

    Args:
        logs: Whether this rank logs.
    """

    def __init__(self, *, logs: bool) -> None:
        self._logs = logs
        self._compared: set[str] = set()

    def compare_once(
        self,
        criterion: Any,
        loss_of: Callable[[Any, Any], Any],
        output: Any,
        batch: Any,
        whole: torch.Tensor,
        *,
        batch_dim: BatchDim | None,
    ) -> None:
        """Compare the loss of a microbatch with the losses of its halves; random states are restored.

        Args:
            criterion: The criterion.
            loss_of: Function from an output and its batch to the loss.
            output: Output of the model for `batch`.
            batch: The microbatch.
            whole: Loss of `batch`.
            batch_dim: See `PipelineOptions`.
        """
        if (name := _name_of(criterion)) in self._compared:
            return
        self._compared.add(name)
        level, message = "WARNING", ""
        try:
            if is_sum(loss_of, output, batch, whole.detach(), batch_dim=batch_dim):
                message = (
                    f"the criterion {name} returns sums over samples, as the losses of a microbatch and of "
                    "its halves show, and the losses of microbatches are averaged: loss and gradients are "
                    "those of one process, divided by the number of microbatches. With loss_reduction='sum' "
                    "among the options of the pipeline they are those of one process, and "
                    "loss_reduction='mean' ends this warning"
                )
        except Exception as error:  # a user's criterion can depend on the size of a microbatch
            level = "INFO"
            message = (
                f"the criterion {name} cannot be called on a part of a microbatch ({type(error).__name__}: "
                f"{error}): whether it returns means or sums is not known, and means are assumed. "
                "loss_reduction among the options of the pipeline states it"
            )
        if message and self._logs:
            get_dist_logger().log_once(message, level=level)


@torch.no_grad()
def is_sum(
    loss_of: Callable[[Any, Any], Any],
    output: Any,
    batch: Any,
    whole: torch.Tensor,
    *,
    batch_dim: BatchDim | None,
) -> bool:
    """Return whether a microbatch's loss is the sum of its halves' losses; see `ReductionCheck.compare_once`.

    A single sample has no halves: the loss of two copies of it is compared with its own.
    """
    output_dim, device = output_dim_of(batch_dim, is_needed=False), whole.device
    halves = cut_batch(batch, 2, batch_dim)
    # MPS has no per-device random states.
    others = (
        {"devices": []}
        if device.type in ("cpu", "mps")
        else {"devices": [device], "device_type": device.type}
    )
    with torch.random.fork_rng(**others):
        if halves.sizes == [1]:
            dims = iter([each.dim for each in halves.tensors])
            twice = map_tensors(lambda tensor: _twice(tensor, next(dims)), batch)
            double = loss_of(map_tensors(lambda tensor: _twice(tensor, output_dim), output), twice)
            return is_sum_of_parts(float(double), (float(whole), float(whole)))
        size, starts = sum(halves.sizes), (0, halves.sizes[0])
        first, second = (
            float(loss_of(_rows(output, size, start, count, output_dim), map_tensors(torch.clone, part)))
            for part, start, count in zip(halves.parts, starts, halves.sizes, strict=True)
        )
    return is_sum_of_parts(float(whole), (first, second))


def _twice(tensor: torch.Tensor, dim: int | None) -> torch.Tensor:
    return tensor.clone() if dim is None or tensor.ndim <= dim else torch.cat([tensor, tensor], dim)


def _rows(output: Any, size: int, start: int, count: int, dim: int) -> Any:
    """Return the rows of `count` of the `size` samples in an output, from sample `start` on."""

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.ndim <= dim or tensor.shape[dim] % size:
            return tensor.clone()
        rows = tensor.shape[dim] // size  # per sample
        # A copy, since a criterion can write to it, and the backward reads the original.
        return tensor.narrow(dim, start * rows, count * rows).clone()

    return map_tensors(cut, output)
