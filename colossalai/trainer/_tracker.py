"""Tracker: the metric loggers of the hooks, in a training loop of one's own.

    with colossalai.tracker(JsonLinesLogger("metrics.jsonl"), TensorboardLogger("events")) as tracker:
        for step, batch in enumerate(loader, start=1):
            ...
            tracker.log({"loss": loss, "lr": lr}, step=step)

Every rank makes the same calls and checks the same arguments; global rank 0 writes.
"""

import os
import re
from collections.abc import Mapping
from numbers import Integral, Real
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from colossalai.trainer._loggers import MetricLogger

_GROUP = re.compile(r"[A-Za-z0-9_.-]*[A-Za-z0-9_-]")  # a part of a file's name
_RESERVED = ("group", "step", "epoch", "time")  # columns of every row


class Tracker:
    """Metric loggers that are open, on global rank 0; on other ranks `log` checks its arguments only.

    A context manager: an exception that leaves the block closes the loggers with `failed=True`. No call is a
    collective, and a value is that of rank 0: average it over the ranks before, where they differ.

    Attributes:
        loggers: The open loggers; empty on other ranks than 0.
    """

    def __init__(self, loggers: tuple[MetricLogger, ...], settings: Mapping[str, Any]) -> None:
        self._is_closed = False
        self._rank = _global_rank()
        self.loggers: tuple[MetricLogger, ...] = ()
        try:
            for logger in loggers if self._rank == 0 else ():
                logger.start(settings)
                self.loggers += (logger,)
        except BaseException:
            self.close(failed=True)
            raise

    def log(
        self,
        values: Mapping[str, float | Tensor],
        *,
        step: int,
        epoch: int | None = None,
        group: str = "train",
    ) -> None:
        """Write figures on rank 0; a tensor on an accelerator is waited for there.

        Args:
            values: The figures by name: numbers, or tensors with one element.
            step: Number of complete optimizer steps.
            epoch: Number of complete epochs. Default: 0, in groups over the steps.
            group: The table or prefix. Groups that end with "_epoch" are drawn over epochs and need `epoch`;
                all others are drawn over steps.

        Raises:
            ValueError: A value is not one number, a name is reserved, `step`, `epoch` or `group` is invalid,
                or the tracker is closed.
        """
        if self._is_closed:
            raise ValueError("this tracker is closed; make another one with colossalai.tracker(...)")
        _check_place(step, epoch, group)
        for name, value in values.items():
            _check_value(name, value)
        if self.loggers:
            figures = {
                name: float(value.item() if isinstance(value, Tensor) else value)
                for name, value in values.items()
            }
            for logger in self.loggers:
                logger.log(group, figures, step=int(step), epoch=int(epoch or 0))

    def flush(self) -> None:
        """Write the buffers of the loggers."""
        for logger in self.loggers:
            logger.flush()

    def close(self, *, failed: bool = False) -> None:
        """Close the loggers; a second call does nothing.

        Args:
            failed: Whether the training has failed, which services show.
        """
        self._is_closed = True
        first: Exception | None = None
        while self.loggers:
            logger, *rest = self.loggers
            self.loggers = tuple(rest)
            try:
                logger.close(failed=failed)
            except Exception as error:  # the other loggers are closed all the same
                first = first or error
        if first is not None:
            raise first

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close(failed=error is not None)


def tracker(*loggers: MetricLogger, settings: Mapping[str, Any] | None = None) -> Tracker:
    """Open metric loggers for a training loop of one's own; they write on global rank 0 only.

    Call it on every rank, after the job is launched. Files are appended to, so a resumed run continues them.

    Args:
        loggers: The loggers, such as `colossalai.trainer.JsonLinesLogger("metrics.jsonl")`.
        settings: Setup of the run, as plain values; Weights & Biases and MLflow store them.

    Raises:
        ValueError: `loggers` is empty, repeats a logger or contains another type than `MetricLogger`; or
            `settings` is not a mapping.
    """
    for logger in loggers:
        if not isinstance(logger, MetricLogger):
            raise ValueError(
                f"{logger!r} is not a MetricLogger; give objects such as JsonLinesLogger('metrics.jsonl') of "
                "colossalai.trainer"
            )
    if not loggers:
        raise ValueError("tracker has no logger; give one, such as JsonLinesLogger('metrics.jsonl')")
    if len({id(logger) for logger in loggers}) < len(loggers):
        raise ValueError("tracker has the same logger twice, which would write each row twice; give it once")
    if settings is not None and not isinstance(settings, Mapping):
        raise ValueError(f"settings={settings!r} is not a mapping; give a dict, such as vars(args)")
    return Tracker(loggers, settings or {})


def _global_rank() -> int:
    """Return the rank in the job, or the rank set by a launcher before the job is launched."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK", "0"))


def _check_place(step: int, epoch: int | None, group: str) -> None:
    for name, number in (("step", step), ("epoch", 0 if epoch is None else epoch)):
        if isinstance(number, bool) or not isinstance(number, Integral) or number < 0:
            raise ValueError(f"{name}={number!r} is not a number of complete {name}s; give an int from 0 on")
    if not isinstance(group, str) or not _GROUP.fullmatch(group):
        raise ValueError(
            f'group={group!r} is not valid; use letters, digits, "_", "-" and ".", as in "validation"'
        )
    if group.endswith("_epoch") and epoch is None:
        raise ValueError(f"group={group!r} is drawn over the epochs; give epoch=, or a group without _epoch")


def _check_value(name: str, value: float | Tensor) -> None:
    if not isinstance(name, str) or name in _RESERVED:
        raise ValueError(
            f"{name!r} is not a name for a figure: use a str, not one of the columns {', '.join(_RESERVED)}"
        )
    # Reading a distributed tensor is a collective, which rank 0 would wait in alone.
    if isinstance(value, Tensor):
        is_number = type(value) in (Tensor, Parameter) and value.numel() == 1 and not value.is_complex()
    else:
        is_number = isinstance(value, Real)
    if not is_number:
        what = f"a {type(value).__name__}"
        if isinstance(value, Tensor):
            what += f" of shape {tuple(value.shape)} and {value.dtype}"
        raise ValueError(
            f"the figure {name!r} is {what}; give a number or a plain tensor with one real element, such as "
            "loss.mean()"
        )
