"""Course of a training run: its length, optimization and records."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypedDict

from torch.optim.lr_scheduler import ReduceLROnPlateau

from colossalai.chat._records import Record
from colossalai.context import names_arguments
from colossalai.trainer import MetricLogger


class LearningRateScheduler(Protocol):
    """A learning rate scheduler of torch."""

    def step(self) -> None:
        """Advance by a step of the optimizer."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state."""


class CourseOptions(TypedDict, total=False):
    """Keyword arguments of every `fit`: the attributes of `Course`."""

    steps: int | None
    epochs: int | None
    batch_size: int
    accumulation: int
    max_norm: float | None
    lr_scheduler: LearningRateScheduler | None
    seed: int
    log: str | Path | None
    loggers: Sequence[MetricLogger]
    save: str | Path | None
    save_every: int | None
    resume: str | Path | None
    shows_progress: bool
    on_step: Callable[[Record], None] | None


@dataclass(frozen=True, kw_only=True)
class Course:
    """Length, optimization and records of a training run.

    Attributes:
        steps: Number of optimizer steps. Default: those of `epochs`.
        epochs: Number of passes over the data. Default: those of `steps`.
        batch_size: Number of rows of a batch on one data-parallel rank.
        accumulation: Number of batches of a step; fewer at the end of an epoch.
        max_norm: Maximum norm of the gradients over all parameters; None for no clipping.
        lr_scheduler: Learning rate scheduler, advanced after each step.
        seed: Seed of the order of the rows.
        log: A folder for `steps.jsonl`, with a line for each step, and `steps.png`; None for no files.
        loggers: Further loggers of the records, such as `colossalai.trainer.TensorboardLogger(folder)`,
            called on rank 0.
        save: A folder for training states; None to save none.
        save_every: Number of steps between training states; None to save only the last one.
        resume: A folder of training states to resume from, if it has one.
        shows_progress: Whether rank 0 shows a progress bar.
        on_step: Called on every rank after each step, with its record.

    Raises:
        ValueError: Neither or both of `steps` and `epochs` are given, a number is below 1, or `lr_scheduler`
            needs more than the number of steps.
    """

    steps: int | None = None
    epochs: int | None = None
    batch_size: int = 4
    accumulation: int = 1
    max_norm: float | None = None
    lr_scheduler: LearningRateScheduler | None = None
    seed: int = 1024
    log: str | Path | None = None
    loggers: Sequence[MetricLogger] = ()
    save: str | Path | None = None
    save_every: int | None = None
    resume: str | Path | None = None
    shows_progress: bool = False
    on_step: Callable[[Record], None] | None = None

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.epochs is None):
            raise ValueError(f"steps={self.steps} and epochs={self.epochs}: give one of them")
        for name in ("steps", "epochs", "batch_size", "accumulation", "save_every"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"{name}={value!r}: give an integer of at least 1")
        if self.max_norm is not None and not self.max_norm > 0:
            raise ValueError(f"max_norm={self.max_norm}: give a number above 0, or leave it out")
        if isinstance(self.lr_scheduler, ReduceLROnPlateau):
            raise ValueError(
                "lr_scheduler is a ReduceLROnPlateau, which waits for a metric: give a scheduler of steps, "
                "or lower the rate in on_step"
            )
        if self.save_every is not None and self.save is None:
            raise ValueError(f"save_every={self.save_every} without a folder: give save=... too")

    def num_steps(self, batches: int, steps_a_window: int) -> int:
        """Return the number of steps for an epoch of `batches` batches."""
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None
        return self.epochs * -(-batches // self.accumulation) * steps_a_window


def course_of(options: CourseOptions, *, batch_size: int = 4) -> Course:
    """Return the course of the keyword arguments of a `fit`.

    Raises:
        TypeError: `options` has a name that is not an attribute of `Course`.
        ValueError: A value is out of range.
    """
    given: dict[str, Any] = {"batch_size": batch_size, **options}
    return names_arguments(Course)(**given)
