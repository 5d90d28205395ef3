"""The hook that saves checkpoints."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from colossalai.checkpoint_io import save_checkpoint, wait_for_saves
from colossalai.context import names_arguments
from colossalai.registry import HOOKS
from colossalai.trainer._base_hook import BaseHook, check_interval
from colossalai.trainer.hooks._states import save_state, schedule_of

if TYPE_CHECKING:
    from colossalai.trainer._trainer import Trainer


@HOOKS.register_module
class SaveCheckpointHook(BaseHook):
    """Saves the model, the optimizer and the schedule of the `LRSchedulerHook` if there is one.

    The epoch in a checkpoint is the number of the last complete one, from 0; -1 if there is none. To go on:

        trainer.cur_epoch = load_checkpoint(file, model, optimizer, lr_scheduler) + 1

    With `keep_last` it saves training states instead (`Engine.save`), which hold all that a run needs to go
    on bit for bit, in the middle of an epoch too:

        trainer.fit(loader, epochs, hooks=hooks, resume="checkpoints")

    Args:
        interval: Number of epochs (or of steps, with `save_by_iter`) from one save to the next.
        checkpoint_dir: A name with a suffix ("last.pt") is a file that every save replaces; one without is
            a folder that gets a file for every save, `epoch_<number of complete epochs>.pt` or
            `step_<number>.pt`. "checkpoints" if not given.
        model: The model to save, the engine's if not given.
        save_by_iter: Count steps instead of epochs.
        priority: Hooks with a lower value run earlier, which the `LRSchedulerHook` has to.
        keep_last: Number of training states to keep in the folder `checkpoint_dir`.
        save_async: Write them in the background.

    Raises:
        ValueError: `save_async` is set without `keep_last`, or `keep_last` with `model` or with a file name.
    """

    @names_arguments
    def __init__(
        self,
        interval: int = 1,
        checkpoint_dir: str | Path | None = None,
        model: nn.Module | None = None,
        save_by_iter: bool = False,
        priority: int = 10,
        *,
        keep_last: int | None = None,
        save_async: bool = False,
    ) -> None:
        super().__init__(priority)
        self.interval = check_interval(interval)
        self.path = Path("checkpoints" if checkpoint_dir is None else checkpoint_dir)
        self.model = model
        self.save_by_iter = save_by_iter
        self.keep_last = keep_last
        self.save_async = save_async
        self._is_due = False  # since the last batch of an epoch, which ends first
        if keep_last is None and save_async:
            raise ValueError("save_async=True is for training states: give the number to keep in keep_last")
        if keep_last is not None and (model is not None or self.path.suffix):
            raise ValueError(
                "keep_last saves training states of the engine's model: leave model out, and give a folder"
            )

    def after_train_iter(self, trainer: "Trainer", output: Any, label: Any, loss: Tensor | None) -> None:
        """Save if steps are counted and it is time."""
        if not self.save_by_iter or trainer.cur_step % self.interval:
            return
        loader = trainer.train_dataloader
        self._is_due = self.keep_last is not None and getattr(loader, "at_last_batch", False)
        if not self._is_due:
            self._save(trainer, f"step_{trainer.cur_step}.pt")

    def after_train(self, trainer: "Trainer") -> None:
        """Wait for saves in the background."""
        wait_for_saves()

    def after_train_epoch(self, trainer: "Trainer") -> None:
        """Save if epochs are counted and it is time, or it was time at the last step."""
        if self._is_due or (not self.save_by_iter and trainer.cur_epoch % self.interval == 0):
            self._is_due = False
            self._save(trainer, f"epoch_{trainer.cur_epoch}.pt")

    def _save(self, trainer: "Trainer", name: str) -> None:
        if self.keep_last is not None:
            save_state(trainer, self.path, keep_last=self.keep_last, save_async=self.save_async)
            return
        save_checkpoint(
            self.path if self.path.suffix else self.path / name,
            trainer.cur_epoch - 1,
            trainer.engine.model if self.model is None else self.model,
            optimizer=trainer.engine.optimizer,
            lr_scheduler=schedule_of(trainer),
        )
