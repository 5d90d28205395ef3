"""The hooks that pass metrics to loggers."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from colossalai.context import ParallelMode, global_context, names_arguments
from colossalai.registry import HOOKS
from colossalai.trainer._base_hook import BaseHook, check_interval
from colossalai.trainer._loggers import MetricLogger, TensorboardLogger

if TYPE_CHECKING:
    from colossalai.trainer._trainer import Trainer


@HOOKS.register_module
class LoggerHook(BaseHook):
    """Passes metrics and learning rate to loggers, on global rank 0.

    After training steps as the group "train", after every epoch and test as "train_epoch" and "test_epoch".
    The values are those of all data-parallel ranks together. One small all-reduce for each step that is
    logged, and the step waits for its loss.

    Args:
        loggers: The loggers, e.g. `JsonLinesLogger("metrics.jsonl")`.
        interval: Number of training steps from one log entry to the next.
        priority: Hooks with a lower value run earlier; hooks that measure must.

    Raises:
        ValueError: A logger is not a `MetricLogger`, or `loggers` is empty.
    """

    @names_arguments
    def __init__(self, *loggers: MetricLogger, interval: int = 1, priority: int = 10) -> None:
        super().__init__(priority)
        for logger in loggers:
            if not isinstance(logger, MetricLogger):
                raise ValueError(
                    f"{logger!r} is not a MetricLogger; give objects such as JsonLinesLogger('metrics.jsonl')"
                )
        if not loggers:
            raise ValueError("LoggerHook has no logger; give one, such as JsonLinesLogger('metrics.jsonl')")
        self.loggers = loggers
        self.interval = check_interval(interval)
        self._open: tuple[MetricLogger, ...] = ()
        self._is_in_training = False

    def loggers_here(self, trainer: "Trainer") -> tuple[MetricLogger, ...]:
        """Return the loggers that this rank writes to."""
        return self.loggers if trainer.engine.mesh.rank == 0 else ()

    def before_train(self, trainer: "Trainer") -> None:
        """Start the loggers."""
        self._is_in_training = True
        self._start(trainer)

    def after_train(self, trainer: "Trainer") -> None:
        """Close the loggers."""
        self._is_in_training = False
        self._close()

    def before_test(self, trainer: "Trainer") -> None:
        """Start the loggers if this is a test outside of a training."""
        self._start(trainer)

    def after_test(self, trainer: "Trainer") -> None:
        """Close the loggers if this was a test outside of a training."""
        if not self._is_in_training:
            self._close()

    def on_exception(self, trainer: "Trainer", error: BaseException) -> None:
        """Close the loggers as failed; services show that."""
        self._is_in_training = False
        self._close(failed=True)

    def after_train_iter(self, trainer: "Trainer", output: Any, label: Any, loss: Tensor | None) -> None:
        """Pass on the metrics of the step."""
        if trainer.cur_step % self.interval == 0:
            # Collective: reduce on all ranks, before only some of them write.
            self._log(trainer, "train", trainer.metrics["train"].step_values())

    def after_train_epoch(self, trainer: "Trainer") -> None:
        """Pass on the metrics of the epoch."""
        self._log(trainer, "train_epoch", trainer.metrics["train"].epoch_values)

    def after_test_epoch(self, trainer: "Trainer") -> None:
        """Pass on the metrics of the test."""
        self._log(trainer, "test_epoch", trainer.metrics["test"].epoch_values)

    def _start(self, trainer: "Trainer") -> None:
        if not self._open:
            self._open = self.loggers_here(trainer)
            for logger in self._open:
                logger.start(trainer.engine.settings)

    def _log(self, trainer: "Trainer", group: str, values: dict[str, float]) -> None:
        if group == "train" and "lr" in trainer.states:
            values["lr"] = trainer.states["lr"]
        for logger in self._open:
            logger.log(group, values, step=trainer.cur_step, epoch=trainer.cur_epoch)

    def _close(self, *, failed: bool = False) -> None:
        while self._open:
            logger, *rest = self._open
            self._open = tuple(rest)
            logger.close(failed=failed)


@HOOKS.register_module
class TensorboardHook(LoggerHook):
    """Writes metrics and learning rate as TensorBoard scalars.

    After every training step "train/<metric>" and "train/lr" over the number of steps; after every epoch
    and test "train_epoch/<metric>" and "test_epoch/<metric>" over the number of epochs. The values are the
    same on all data-parallel ranks. One small all-reduce per step, and the step waits for its loss.

    Args:
        log_dir: The folder for the events; made if it does not exist.
        ranks: The ranks that write, rank 0 if not given. If more than one rank may, each has its own folder
            `rank_<global rank>` in `log_dir`.
        parallel_mode: Mode in which `ranks` are counted: GLOBAL, or for instance DATA for one writer per
            model-parallel part.
        priority: Hooks with a lower value run earlier; hooks that measure must.

    Raises:
        ValueError: TensorBoard is not installed.
    """

    @names_arguments
    def __init__(
        self,
        log_dir: str | Path,
        ranks: Sequence[int] | None = None,
        parallel_mode: ParallelMode = ParallelMode.GLOBAL,
        priority: int = 10,
    ) -> None:
        super().__init__(TensorboardLogger(log_dir), priority=priority)
        self.log_dir = Path(log_dir)
        self.ranks = (0,) if ranks is None else tuple(ranks)
        self.parallel_mode = parallel_mode

    def loggers_here(self, trainer: "Trainer") -> tuple[MetricLogger, ...]:
        """See the base class."""
        is_global = self.parallel_mode is ParallelMode.GLOBAL
        global_rank = trainer.engine.mesh.rank
        rank = global_rank if is_global else global_context.get_local_rank(self.parallel_mode)
        if rank not in self.ranks:
            return ()
        is_alone = is_global and len(self.ranks) == 1
        return self.loggers if is_alone else (TensorboardLogger(self.log_dir / f"rank_{global_rank}"),)
