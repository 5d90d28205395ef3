"""The base of the schedules: the learning rate as a formula of the step, with one warm-up in front; checks.

[Note: closed form] The rate at a step follows from the base rate and the number of the step alone, not
from the rate of the step before as in `torch.optim.lr_scheduler`. So nothing drifts, a loaded state
gives exactly the rates of the run that saved it, with or without the optimizer's own state, and a warm-up can
precede any curve.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from colossalai.logging import get_dist_logger


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


def check_total_steps(total_steps: int) -> int:
    """Return `total_steps` if it is a positive integer.

    Raises:
        ValueError: `total_steps` is not a positive integer.
    """
    return check_count("total_steps", total_steps)


def check_count(name: str, value: int) -> int:
    """Return `value` if it is a positive integer.

    Raises:
        ValueError: `value` is not a positive integer.
    """
    if not isinstance(value, int) or value <= 0:
        raise ValueError(f"{name}={value!r} is not a number of steps; give a positive integer")
    return value


def check_warmup_steps(warmup_steps: int, total_steps: int) -> int:
    """Return `warmup_steps` if it is an integer that is not negative.

    One greater than `total_steps` is warned about, not refused: short trial runs of a long recipe (the
    documentation's warm up for 50 of 2 epochs) are to run.

    Raises:
        ValueError: `warmup_steps` is negative, or no integer.
    """
    if not isinstance(warmup_steps, int) or warmup_steps < 0:
        raise ValueError(
            f"warmup_steps={warmup_steps!r} is out of range; give an integer from 0 to total_steps"
        )
    if warmup_steps > total_steps:
        get_dist_logger().log_once(
            f"warmup_steps={warmup_steps} exceeds total_steps={total_steps}, which includes the warm-up: "
            f"the learning rate ends at {total_steps + 1}/{warmup_steps + 1} of its base value",
            ranks=[0],
        )
    return warmup_steps


def check_fraction(name: str, value: float) -> float:
    """Return `value` as a float if it is in [0, 1].

    Raises:
        ValueError: `value` is not in [0, 1].
    """
    if not 0.0 <= value <= 1.0:
        raise ValueError(
            f"{name}={value!r} is not a part of the schedule; give a number from 0 (none) to 1 (all)"
        )
    return float(value)


def check_milestones(milestones: Sequence[int], warmup_steps: int) -> list[int]:
    """Return the milestones as a list if they are integers in rising order, all after the warm-up.

    Raises:
        ValueError: The milestones are not integers in rising order, or begin within the warm-up.
    """
    checked = list(milestones)
    if any(not isinstance(milestone, int) for milestone in checked) or checked != sorted(checked):
        raise ValueError(f"milestones={checked!r} must be integers in rising order")
    if checked and checked[0] <= warmup_steps:
        raise ValueError(
            f"milestones={checked!r} start at step {checked[0]}, but they count from the first step of the "
            f"training and warmup_steps={warmup_steps}; give milestones greater than {warmup_steps}"
        )
    return checked
