"""The hook that saves checkpoints."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from colossalai.checkpoint_io import save_checkpoint
from colossalai.registry import HOOKS
from colossalai.trainer.hooks._base import BaseHook, check_interval
from colossalai.trainer.hooks._lr_scheduler_hook import LRSchedulerHook

if TYPE_CHECKING:
    from colossalai.trainer._trainer import Trainer


@HOOKS.register_module
class SaveCheckpointHook(BaseHook):
    """Saves the model, the optimizer and the schedule of the `LRSchedulerHook` if there is one.

    The epoch in a checkpoint is the number of the last complete one, from 0; -1 if there is none. To go on:

        trainer.cur_epoch = load_checkpoint(file, model, optimizer, lr_scheduler) + 1

    Args:
        interval: Number of epochs (or of steps, with `save_by_iter`) from one save to the next.
        checkpoint_dir: A name with a suffix ("last.pt") is a file that every save replaces; one without is
            a folder that gets a file for every save, `epoch_<number of complete epochs>.pt` or
            `step_<number>.pt`. "checkpoints" if not given.
        model: The model to save, the engine's if not given.
        save_by_iter: Count steps instead of epochs.
        priority: Hooks with a lower value run earlier; the one that steps the schedule must.
    """

    def __init__(
        self,
        interval: int = 1,
        checkpoint_dir: str | Path | None = None,
        model: nn.Module | None = None,
        save_by_iter: bool = False,
        priority: int = 10,
    ) -> None:
        super().__init__(priority)
        self.interval = check_interval(interval)
        self.path = Path("checkpoints" if checkpoint_dir is None else checkpoint_dir)
        self.model = model
        self.save_by_iter = save_by_iter

    def after_train_iter(self, trainer: "Trainer", output: Any, label: Any, loss: Tensor | None) -> None:
        """Save if steps are counted and it is time."""
        if self.save_by_iter and trainer.cur_step % self.interval == 0:
            self._save(trainer, f"step_{trainer.cur_step}.pt")

    def after_train_epoch(self, trainer: "Trainer") -> None:
        """Save if epochs are counted and it is time."""
        if not self.save_by_iter and trainer.cur_epoch % self.interval == 0:
            self._save(trainer, f"epoch_{trainer.cur_epoch}.pt")

    def _save(self, trainer: "Trainer", name: str) -> None:
        schedulers = [hook.lr_scheduler for hook in trainer.hooks if isinstance(hook, LRSchedulerHook)]
        save_checkpoint(
            self.path if self.path.suffix else self.path / name,
            trainer.cur_epoch - 1,
            trainer.engine.model if self.model is None else self.model,
            optimizer=trainer.engine.optimizer,
            lr_scheduler=schedulers[0] if schedulers else None,
        )
