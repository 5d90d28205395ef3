"""The hook that writes TensorBoard events."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from colossalai.context import ParallelMode, global_context, names_arguments
from colossalai.registry import HOOKS
from colossalai.trainer.hooks._base import BaseHook

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from colossalai.trainer._trainer import Trainer


@HOOKS.register_module
class TensorboardHook(BaseHook):
    """Writes metrics and learning rate as TensorBoard scalars.

    After every training step "train/<metric>" and "train/lr" over the number of steps; after every epoch
    and test "train_epoch/<metric>" and "test_epoch/<metric>" over the number of epochs. The values are the
    same on all data-parallel ranks. One small all-reduce per step, and the step waits for its loss.

    Args:
        log_dir: The folder for the events; made if it does not exist.
        ranks: The ranks that write, rank 0 if not given. If more than one rank may, each has its own folder
            `rank_<global rank>` in `log_dir`.
        parallel_mode: What `ranks` are ranks in: GLOBAL, or for instance DATA for one writer per
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
        super().__init__(priority)
        _check_installed()
        self.log_dir = Path(log_dir)
        self.ranks = (0,) if ranks is None else tuple(ranks)
        self.parallel_mode = parallel_mode
        self._writer: SummaryWriter | None = None
        self._is_in_training = False

    def before_train(self, trainer: "Trainer") -> None:
        """Open the file."""
        self._is_in_training = True
        self._open(trainer)

    def after_train(self, trainer: "Trainer") -> None:
        """Close the file."""
        self._is_in_training = False
        self._close()

    def before_test(self, trainer: "Trainer") -> None:
        """Open the file if this is a test outside of a training."""
        self._open(trainer)

    def after_test(self, trainer: "Trainer") -> None:
        """Close the file if this was a test outside of a training."""
        if not self._is_in_training:
            self._close()

    def after_train_iter(self, trainer: "Trainer", output: Any, label: Any, loss: Tensor | None) -> None:
        """Write the metrics of the step."""
        values = trainer.metrics["train"].step_values()  # before any question of who writes: a collective
        if "lr" in trainer.states:
            values["lr"] = trainer.states["lr"]
        self._write("train", values, trainer.cur_step)

    def after_train_epoch(self, trainer: "Trainer") -> None:
        """Write the metrics of the epoch."""
        self._write("train_epoch", trainer.metrics["train"].epoch_values, trainer.cur_epoch)
        self._flush()

    def after_test_epoch(self, trainer: "Trainer") -> None:
        """Write the metrics of the test."""
        self._write("test_epoch", trainer.metrics["test"].epoch_values, trainer.cur_epoch)
        self._flush()

    def _open(self, trainer: "Trainer") -> None:
        from torch.utils.tensorboard import SummaryWriter

        is_global = self.parallel_mode is ParallelMode.GLOBAL
        global_rank = trainer.engine.mesh.rank
        rank = global_rank if is_global else global_context.get_local_rank(self.parallel_mode)
        if self._writer is None and rank in self.ranks:
            is_alone = is_global and len(self.ranks) == 1
            self._writer = SummaryWriter(
                str(self.log_dir if is_alone else self.log_dir / f"rank_{global_rank}")
            )

    def _write(self, group: str, values: dict[str, float], position: int) -> None:
        if self._writer is not None:
            for name, value in values.items():
                self._writer.add_scalar(f"{group}/{name}", value, position)

    def _flush(self) -> None:
        if self._writer is not None:
            self._writer.flush()

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _check_installed() -> None:
    try:
        import torch.utils.tensorboard  # noqa: F401
    except ImportError as error:
        raise ValueError(
            "TensorboardHook needs the tensorboard package, which is not installed; "
            "run: pip install colossalai[tensorboard]"
        ) from error
