"""The base of the schedules: the learning rate as a formula of the step, with one warm-up in front.

[Note: closed form] The rate at a step follows from the base rate and the number of the step alone, not
from the rate of the step before as in `torch.optim.lr_scheduler`. So nothing drifts, a loaded state
gives exactly the rates of the run that saved it, with or without the optimizer's own state, and a warm-up can
precede any curve.
"""

from abc import ABC, abstractmethod

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from colossalai.nn.lr_scheduler._check import check_total_steps, check_warmup_steps


class CurveLR(LRScheduler, ABC):
    """A schedule of `total_steps` steps: a linear warm-up to the base rate, then a curve.

    At step t = 0, 1, ... with base rate b (the optimizer's at the start) and W warm-up steps the rate is

        b * (t + 1) / (W + 1)    for t <= W, so no step is made with rate 0 and step W has the base rate
        curve(b, t - W)          for W < t <= total_steps
        curve(b, total_steps - W)  for every later step: the rate stays where it is

    Args:
        optimizer: The optimizer, of any kind.
        total_steps: Number of steps of the whole schedule, the warm-up included.
        warmup_steps: Number of steps of the warm-up.
        last_epoch: The step that was made last when a run goes on without a saved state, -1 for a new run.

    Raises:
        ValueError: `total_steps` is not a positive integer, or `warmup_steps` is negative.
    """

    def __init__(
        self, optimizer: Optimizer, total_steps: int, *, warmup_steps: int = 0, last_epoch: int = -1
    ) -> None:
        self.total_steps = check_total_steps(total_steps)
        self.warmup_steps = check_warmup_steps(warmup_steps, total_steps)
        super().__init__(optimizer, last_epoch)

    @abstractmethod
    def curve(self, base_lr: float | Tensor, step: int) -> float | Tensor:
        """Return the rate `step` steps after the warm-up, for 0 < step <= total_steps - warmup_steps."""

    def get_lr(self) -> list[float | Tensor]:
        """Return the rate of every parameter group at the current step."""
        # See [Note: closed form].
        step = min(self.last_epoch, self.total_steps) - self.warmup_steps
        if step <= 0:
            ramp = (self.warmup_steps + step + 1) / (self.warmup_steps + 1)
            return [base_lr * ramp for base_lr in self.base_lrs]
        return [self.curve(base_lr, step) for base_lr in self.base_lrs]
