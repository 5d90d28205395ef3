"""Checks of the arguments of schedules."""

from collections.abc import Sequence

from colossalai.logging import get_dist_logger


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
