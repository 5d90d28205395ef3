"""Hooks that write to the log, on global rank 0."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from colossalai.context import names_arguments
from colossalai.logging import DistributedLogger
from colossalai.registry import HOOKS
from colossalai.trainer._base_hook import BaseHook, check_interval
from colossalai.trainer._timer import MultiTimer

if TYPE_CHECKING:
    from colossalai.trainer._trainer import Trainer

MIB = 2**20


@HOOKS.register_module
class LogMetricByStepHook(BaseHook):
    """Shows the metrics of every step next to the progress bar, through `trainer.states["step_metrics"]`.

    One small all-reduce per step, and the step waits for its loss.

    Args:
        priority: Hooks with a lower value run earlier; hooks that measure must.
    """

    @names_arguments
    def __init__(self, priority: int = 10) -> None:
        super().__init__(priority)

    def after_train_iter(self, trainer: "Trainer", output: Any, label: Any, loss: Tensor | None) -> None:
        """Write the metrics of the training step."""
        trainer.states["step_metrics"] = _as_text(trainer.metrics["train"].step_values())

    def after_test_iter(self, trainer: "Trainer", output: Any, label: Any, loss: Tensor | None) -> None:
        """Write the metrics of the test step."""
        trainer.states["step_metrics"] = _as_text(trainer.metrics["test"].step_values())


@HOOKS.register_module
class LogMetricByEpochHook(BaseHook):
    """Logs the metrics of training epochs and tests, and the learning rate that an `LRSchedulerHook` keeps.

    Args:
        logger: Logger of the lines.
        interval: Number of training epochs from one line to the next; every test has its line.
        priority: Hooks with a lower value run earlier; hooks that measure must.
    """

    @names_arguments
    def __init__(self, logger: DistributedLogger, interval: int = 1, priority: int = 10) -> None:
        super().__init__(priority)
        self.logger = logger
        self.interval = check_interval(interval)

    def after_train_epoch(self, trainer: "Trainer") -> None:
        """Log the metrics of the training epoch."""
        if trainer.cur_epoch % self.interval == 0:
            values = dict(trainer.metrics["train"].epoch_values)
            if "lr" in trainer.states:
                values["lr"] = trainer.states["lr"]
            self.logger.info(f"Epoch {trainer.cur_epoch} train: {_as_text(values)}", ranks=[0])

    def after_test_epoch(self, trainer: "Trainer") -> None:
        """Log the metrics of the test."""
        text = _as_text(trainer.metrics["test"].epoch_values)
        self.logger.info(f"Epoch {trainer.cur_epoch} test: {text}", ranks=[0])


@HOOKS.register_module
class LogMemoryByEpochHook(BaseHook):
    """Logs the memory of rank 0 before training, after training epochs and after tests.

    Args:
        logger: Logger of the lines.
        interval: Number of training epochs from one line to the next.
        report_cpu: Whether to log the memory of the process too; without an accelerator it is always logged.
        priority: Hooks with a lower value run earlier.
    """

    @names_arguments
    def __init__(
        self, logger: DistributedLogger, interval: int = 1, report_cpu: bool = False, priority: int = 10
    ) -> None:
        super().__init__(priority)
        self.logger = logger
        self.interval = check_interval(interval)
        self.report_cpu = report_cpu

    def before_train(self, trainer: "Trainer") -> None:
        """Log the memory of model and optimizer."""
        self._log("before training")

    def after_train_epoch(self, trainer: "Trainer") -> None:
        """Log the memory of the training epoch."""
        if trainer.cur_epoch % self.interval == 0:
            self._log(f"after epoch {trainer.cur_epoch} train")

    def after_test(self, trainer: "Trainer") -> None:
        """Log the memory of the test."""
        if trainer.cur_epoch % self.interval == 0:
            self._log(f"after epoch {trainer.cur_epoch} test")

    def _log(self, moment: str) -> None:
        has_accelerator = torch.accelerator.is_available()
        parts = [_accelerator_memory()] if has_accelerator else []
        if self.report_cpu or not has_accelerator:
            parts.append(_process_memory())
        self.logger.info(f"Memory {moment}: {'; '.join(parts)}", ranks=[0])


@HOOKS.register_module
class LogTimingByEpochHook(BaseHook):
    """Logs the durations of epochs and steps.

    Args:
        timer: The timer of the Trainer.
        logger: Logger of the lines.
        interval: Number of training epochs from one line to the next.
        log_eval: Whether to log tests too.
        priority: Hooks with a lower value run earlier.
    """

    @names_arguments
    def __init__(
        self,
        timer: MultiTimer,
        logger: DistributedLogger,
        interval: int = 1,
        log_eval: bool = True,
        priority: int = 10,
    ) -> None:
        super().__init__(priority)
        self.timer = timer
        self.logger = logger
        self.interval = check_interval(interval)
        self.log_eval = log_eval

    def after_hook_is_attached(self, trainer: "Trainer") -> None:
        """Check that the trainer uses the timer.

        Raises:
            ValueError: The trainer does not use the timer, or the timer is off.
        """
        if trainer.timer is not self.timer or not self.timer.is_on:
            raise ValueError(
                "the timer of LogTimingByEpochHook measures nothing; give the same timer, switched on, to "
                "both: Trainer(engine, timer=timer) and LogTimingByEpochHook(timer, logger)"
            )

    def after_train_epoch(self, trainer: "Trainer") -> None:
        """Log the times of the training epoch."""
        if trainer.cur_epoch % self.interval == 0:
            self._log(trainer, "Train")

    def after_test_epoch(self, trainer: "Trainer") -> None:
        """Log the times of the test."""
        if self.log_eval and trainer.cur_epoch % self.interval == 0:
            self._log(trainer, "Test")

    def _log(self, trainer: "Trainer", phase: str) -> None:
        epoch, step = self.timer.get_timer(f"{phase}-epoch"), self.timer.get_timer(f"{phase}-step")
        self.logger.info(
            f"Epoch {trainer.cur_epoch} {phase.lower()}: {epoch.get_elapsed_time():.3f} s, "
            f"of that {step.get_history_sum():.3f} s in steps of {step.get_history_mean():.4f} s",
            ranks=[0],
        )


def _as_text(values: dict[str, float]) -> str:
    return " | ".join(f"{name} {value:.5g}" for name, value in values.items())


def _accelerator_memory() -> str:
    """Describe the accelerator's memory, and begin a new measurement of its peaks."""
    text = (
        f"accelerator {torch.accelerator.memory_allocated() / MIB:.1f} MiB allocated, "
        f"peak {torch.accelerator.max_memory_allocated() / MIB:.1f} MiB, "
        f"{torch.accelerator.memory_reserved() / MIB:.1f} MiB reserved"
    )
    torch.accelerator.reset_peak_memory_stats()
    return text


def _process_memory() -> str:
    import psutil

    return f"process {psutil.Process().memory_info().rss / MIB:.1f} MiB resident"
