"""Schedules that multiply the rate by `gamma` at certain steps.

curve(b, t) = b * gamma ** (number of such steps among 1..t)
"""

from bisect import bisect_right
from collections.abc import Sequence

from torch import Tensor
from torch.optim import Optimizer

from colossalai.nn.lr_scheduler._curve import (
    CurveLR,
    check_count,
    check_milestones,
    check_total_steps,
    check_warmup_steps,
)
from colossalai.registry import LR_SCHEDULERS


class _MilestoneLR(CurveLR):
    """Decay at milestones, which count from the first step of the training, warm-up included."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        *,
        milestones: Sequence[int],
        gamma: float,
        warmup_steps: int = 0,
        last_epoch: int = -1,
    ) -> None:
        check_warmup_steps(warmup_steps, check_total_steps(total_steps))
        self.milestones = check_milestones(milestones, warmup_steps)
        self.gamma = gamma
        super().__init__(optimizer, total_steps, warmup_steps=warmup_steps, last_epoch=last_epoch)

    def curve(self, base_lr: float | Tensor, step: int) -> float | Tensor:
        """Return the base rate, times `gamma` for every milestone that is reached."""
        return base_lr * self.gamma ** bisect_right(self.milestones, self.warmup_steps + step)


@LR_SCHEDULERS.register_module
class MultiStepLR(_MilestoneLR):
    """Multiply the rate by `gamma` at every milestone.

    Args:
        optimizer: The optimizer.
        total_steps: Number of steps of the schedule; a later milestone is never reached.
        milestones: The steps, in rising order, from which on the rate is lower.
        gamma: The factor.
        last_epoch: The step that was made last, -1 for a new run.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        *,
        milestones: Sequence[int],
        gamma: float = 0.1,
        last_epoch: int = -1,
    ) -> None:
        super().__init__(optimizer, total_steps, milestones=milestones, gamma=gamma, last_epoch=last_epoch)


@LR_SCHEDULERS.register_module
class MultiStepWarmupLR(_MilestoneLR):
    """Warm up linearly, then multiply the rate by `gamma` at every milestone.

    Args:
        optimizer: The optimizer.
        total_steps: Number of steps of the schedule, the warm-up included.
        milestones: The steps, in rising order, from which on the rate is lower; they count from the first
            step of the training, so all of them lie after the warm-up.
        warmup_steps: Number of steps of the warm-up.
        gamma: The factor.
        last_epoch: The step that was made last, -1 for a new run.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        *,
        milestones: Sequence[int],
        warmup_steps: int = 0,
        gamma: float = 0.1,
        last_epoch: int = -1,
    ) -> None:
        super().__init__(
            optimizer,
            total_steps,
            milestones=milestones,
            gamma=gamma,
            warmup_steps=warmup_steps,
            last_epoch=last_epoch,
        )


@LR_SCHEDULERS.register_module
class StepLR(CurveLR):
    """Multiply the rate by `gamma` after every `step_size` steps.

    Args:
        optimizer: The optimizer.
        total_steps: Number of steps of the schedule; afterwards the rate stays.
        step_size: Number of steps between two changes.
        gamma: The factor.
        last_epoch: The step that was made last, -1 for a new run.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        *,
        step_size: int = 1,
        gamma: float = 0.1,
        last_epoch: int = -1,
    ) -> None:
        self.step_size = check_count("step_size", step_size)
        self.gamma = gamma
        super().__init__(optimizer, total_steps, last_epoch=last_epoch)

    def curve(self, base_lr: float | Tensor, step: int) -> float | Tensor:
        """Return the base rate, times `gamma` for every `step_size` steps."""
        return base_lr * self.gamma ** (step // self.step_size)


@LR_SCHEDULERS.register_module
class ExponentialLR(CurveLR):
    """Multiply the rate by `gamma` after every step.

    Args:
        optimizer: The optimizer.
        total_steps: Number of steps of the schedule; afterwards the rate stays.
        gamma: The factor.
        last_epoch: The step that was made last, -1 for a new run.
    """

    def __init__(self, optimizer: Optimizer, total_steps: int, *, gamma: float, last_epoch: int = -1) -> None:
        self.gamma = gamma
        super().__init__(optimizer, total_steps, last_epoch=last_epoch)

    def curve(self, base_lr: float | Tensor, step: int) -> float | Tensor:
        """Return the base rate, times `gamma` for every step."""
        return base_lr * self.gamma**step
