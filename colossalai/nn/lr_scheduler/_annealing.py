"""Schedules that end in half a cosine: Loshchilov and Hutter 2016, arXiv 1608.03983, without restarts.

With a flat part of F steps after the warm-up and N = total_steps - warmup_steps,

    curve(b, t) = b                                                              for t <= F
    curve(b, t) = eta_min + (b - eta_min) * (1 + cos(pi * (t - F) / (N - F))) / 2   for F < t <= N
"""

import math

from torch import Tensor
from torch.optim import Optimizer

from colossalai.nn.lr_scheduler._curve import CurveLR, check_fraction, check_total_steps, check_warmup_steps
from colossalai.registry import LR_SCHEDULERS


class _FlatThenCosineLR(CurveLR):
    """The curve at the head of this file; the four public classes differ in the fields that are zero."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        *,
        warmup_steps: int = 0,
        pct_start: float = 0.0,
        eta_min: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        check_warmup_steps(warmup_steps, check_total_steps(total_steps))
        self.flat_steps = int(check_fraction("pct_start", pct_start) * (total_steps - warmup_steps))
        self.eta_min = eta_min
        super().__init__(optimizer, total_steps, warmup_steps=warmup_steps, last_epoch=last_epoch)

    def curve(self, base_lr: float | Tensor, step: int) -> float | Tensor:
        """Return the base rate in the flat part, then the cosine."""
        if step <= self.flat_steps:
            return base_lr
        done = (step - self.flat_steps) / (self.total_steps - self.warmup_steps - self.flat_steps)
        return self.eta_min + (base_lr - self.eta_min) * (1 + math.cos(math.pi * done)) / 2


@LR_SCHEDULERS.register_module
class CosineAnnealingLR(_FlatThenCosineLR):
    """Go from the base rate to `eta_min` along half a cosine.

    Args:
        optimizer: The optimizer.
        total_steps: Number of steps of the schedule.
        eta_min: The rate at the end.
        last_epoch: The step that was made last, -1 for a new run.
    """

    def __init__(
        self, optimizer: Optimizer, total_steps: int, *, eta_min: float = 0.0, last_epoch: int = -1
    ) -> None:
        super().__init__(optimizer, total_steps, eta_min=eta_min, last_epoch=last_epoch)


@LR_SCHEDULERS.register_module
class CosineAnnealingWarmupLR(_FlatThenCosineLR):
    """Warm up linearly, then go to `eta_min` along half a cosine.

    Args:
        optimizer: The optimizer.
        total_steps: Number of steps of the schedule, the warm-up included.
        warmup_steps: Number of steps of the warm-up.
        eta_min: The rate at the end.
        last_epoch: The step that was made last, -1 for a new run.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        *,
        warmup_steps: int = 0,
        eta_min: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        super().__init__(
            optimizer, total_steps, warmup_steps=warmup_steps, eta_min=eta_min, last_epoch=last_epoch
        )


@LR_SCHEDULERS.register_module
class FlatAnnealingLR(_FlatThenCosineLR):
    """Keep the base rate for a part of the schedule, then go to `eta_min` along half a cosine.

    Args:
        optimizer: The optimizer.
        total_steps: Number of steps of the schedule.
        pct_start: The part of the steps, from 0 to 1, that is flat.
        eta_min: The rate at the end.
        last_epoch: The step that was made last, -1 for a new run.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        *,
        pct_start: float = 0.72,
        eta_min: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        super().__init__(optimizer, total_steps, pct_start=pct_start, eta_min=eta_min, last_epoch=last_epoch)


@LR_SCHEDULERS.register_module
class FlatAnnealingWarmupLR(_FlatThenCosineLR):
    """Warm up linearly, keep the base rate for a while, then go to `eta_min` along half a cosine.

    Args:
        optimizer: The optimizer.
        total_steps: Number of steps of the schedule, the warm-up included.
        warmup_steps: Number of steps of the warm-up.
        pct_start: The part of the steps after the warm-up, from 0 to 1, that is flat.
        eta_min: The rate at the end.
        last_epoch: The step that was made last, -1 for a new run.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        *,
        warmup_steps: int = 0,
        pct_start: float = 0.72,
        eta_min: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        super().__init__(
            optimizer,
            total_steps,
            warmup_steps=warmup_steps,
            pct_start=pct_start,
            eta_min=eta_min,
            last_epoch=last_epoch,
        )
