"""Training states of a Trainer: the state of its engine and its hooks, for `fit(resume=...)`.

In addition to the state of an engine, a training state has the numbers of complete steps and epochs, and the
results of the hooks' `state_dict`, such as the best figure so far.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from torch.optim.lr_scheduler import LRScheduler

from colossalai.logging import DistributedLogger
from colossalai.runtime import with_position
from colossalai.trainer._base_hook import hook_states, load_hook_states
from colossalai.trainer.hooks._lr_scheduler_hook import LRSchedulerHook

if TYPE_CHECKING:
    from colossalai.trainer._trainer import Trainer


def schedule_of(trainer: "Trainer") -> LRScheduler | None:
    """Return the schedule of the first `LRSchedulerHook`, None without one."""
    hooks = (hook for hook in trainer.hooks if isinstance(hook, LRSchedulerHook))
    return next((hook.lr_scheduler for hook in hooks), None)


def save_state(trainer: "Trainer", folder: Path, *, keep_last: int, save_async: bool) -> None:
    """Save a training state; every rank calls it."""
    trainer.engine.save(
        folder,
        step=trainer.cur_step,
        epoch=trainer.cur_epoch,
        extra={"hooks": hook_states(trainer.hooks)},
        lr_scheduler=schedule_of(trainer),
        dataloader=with_position(trainer.train_dataloader),
        save_async=save_async,
        keep_last=keep_last,
    )


def resume_state(trainer: "Trainer", folder: str | Path, logger: DistributedLogger) -> None:
    """Resume from the newest complete training state of a folder, if there is one; every rank calls it.

    Raises:
        ValueError: The training states are damaged, have other names or shapes, or lack the epoch to resume
            in.
    """
    resumed = trainer.engine.load(
        folder, lr_scheduler=schedule_of(trainer), dataloader=with_position(trainer.train_dataloader)
    )
    if resumed is None:
        logger.info(f"no training state in {folder}: the training begins", ranks=[0])
        return
    if resumed.epoch is None:
        raise ValueError(
            f"the training state of step {resumed.step} in {folder} has no epoch: save it with epoch=..."
        )
    trainer.cur_step, trainer.cur_epoch = resumed.step, resumed.epoch
    load_hook_states(trainer.hooks, resumed.extra.get("hooks", {}))
    logger.info(
        f"going on from {folder}: {resumed.step} steps and {resumed.epoch} epochs are complete", ranks=[0]
    )
