"""The hook that steps the learning-rate schedule."""

from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from colossalai.context import names_arguments
from colossalai.registry import HOOKS
from colossalai.trainer._base_hook import BaseHook

if TYPE_CHECKING:
    from colossalai.trainer._trainer import Trainer


@HOOKS.register_module
class LRSchedulerHook(BaseHook):
    """Steps a learning-rate schedule.

    Args:
        lr_scheduler: The schedule.
        by_epoch: Step after every training epoch; otherwise after every training iteration that updated the
            parameters, so not within a window of gradient accumulation and not after an overflow.
        store_lr_in_state: Whether to keep the rate of the present iteration (of the first parameter group) in
            `trainer.states["lr"]`, where other hooks find it.
        priority: Hooks with a lower value run earlier.
    """

    @names_arguments
    def __init__(
        self, lr_scheduler: LRScheduler, by_epoch: bool, store_lr_in_state: bool = True, priority: int = 1
    ) -> None:
        super().__init__(priority)
        self.lr_scheduler = lr_scheduler
        self.by_epoch = by_epoch
        self.store_lr_in_state = store_lr_in_state

    def before_train_iter(self, trainer: "Trainer") -> None:
        """Keep the rate that this iteration's update is made with."""
        if self.store_lr_in_state:
            trainer.states["lr"] = float(self.lr_scheduler.get_last_lr()[0])

    def after_train_iter(self, trainer: "Trainer", output: Any, label: Any, loss: Tensor | None) -> None:
        """Step after an update."""
        if not self.by_epoch and trainer.optimizer_stepped:
            self.lr_scheduler.step()

    def after_train_epoch(self, trainer: "Trainer") -> None:
        """Step after an epoch."""
        if self.by_epoch:
            self.lr_scheduler.step()
