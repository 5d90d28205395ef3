"""Schedules that follow a power of the remaining training.

With N = total_steps - warmup_steps,

    curve(b, t) = end_lr + (b - end_lr) * (1 - t / N) ** power
"""

from torch import Tensor
from torch.optim import Optimizer

from colossalai.nn.lr_scheduler._curve import CurveLR
from colossalai.registry import LR_SCHEDULERS


class _PowerLR(CurveLR):
    """The curve at the head of this file; the three public classes differ in the fixed fields."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        *,
        warmup_steps: int = 0,
        end_lr: float,
        power: float,
        last_epoch: int = -1,
    ) -> None:
        if power <= 0:
            raise ValueError(f"power={power!r} does not lead to end_lr; give a number greater than 0")
        self.end_lr = end_lr
        self.power = power
        super().__init__(optimizer, total_steps, warmup_steps=warmup_steps, last_epoch=last_epoch)

    def curve(self, base_lr: float | Tensor, step: int) -> float | Tensor:
        """Return the power of the remaining training, between the base rate and `end_lr`."""
        left = 1 - step / (self.total_steps - self.warmup_steps)
        part: float = left**self.power
        return self.end_lr + (base_lr - self.end_lr) * part


@LR_SCHEDULERS.register_module
class PolynomialLR(_PowerLR):
    """Go from the base rate to `end_lr` along a power of the remaining training.

    Args:
        optimizer: The optimizer.
        total_steps: Number of steps of the schedule.
        end_lr: The rate at the end.
        power: The power; 1 is a straight line.
        last_epoch: The step that was made last, -1 for a new run.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        *,
        end_lr: float = 0.0001,
        power: float = 1.0,
        last_epoch: int = -1,
    ) -> None:
        super().__init__(optimizer, total_steps, end_lr=end_lr, power=power, last_epoch=last_epoch)


@LR_SCHEDULERS.register_module
class PolynomialWarmupLR(_PowerLR):
    """Warm up linearly, then go to `end_lr` along a power of the remaining training.

    Args:
        optimizer: The optimizer.
        total_steps: Number of steps of the schedule, the warm-up included.
        warmup_steps: Number of steps of the warm-up.
        end_lr: The rate at the end.
        power: The power; 1 is a straight line.
        last_epoch: The step that was made last, -1 for a new run.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        *,
        warmup_steps: int = 0,
        end_lr: float = 0.0001,
        power: float = 1.0,
        last_epoch: int = -1,
    ) -> None:
        super().__init__(
            optimizer,
            total_steps,
            warmup_steps=warmup_steps,
            end_lr=end_lr,
            power=power,
            last_epoch=last_epoch,
        )


@LR_SCHEDULERS.register_module
class LinearWarmupLR(_PowerLR):
    """Warm up linearly, then go down to 0 in a straight line.

    Args:
        optimizer: The optimizer.
        total_steps: Number of steps of the schedule, the warm-up included.
        warmup_steps: Number of steps of the warm-up.
        last_epoch: The step that was made last, -1 for a new run.
    """

    def __init__(
        self, optimizer: Optimizer, total_steps: int, *, warmup_steps: int = 0, last_epoch: int = -1
    ) -> None:
        super().__init__(
            optimizer, total_steps, warmup_steps=warmup_steps, end_lr=0.0, power=1.0, last_epoch=last_epoch
        )
