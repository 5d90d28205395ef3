"""The one pattern behind all schedules: forwards, then a forward and a backward by turns, then backwards.

They differ in the order of the forwards, in the order of the backwards, and in how many forwards come first.
"""

from collections.abc import Iterable, Sequence

from colossalai.pipeline._schedule import Action, Op


def alternate(forwards: Sequence[Action], backwards: Sequence[Action], num_first: int) -> tuple[Action, ...]:
    """Return the actions of a rank: `num_first` forwards, then by turns, then the backwards that are left."""
    num_first = min(num_first, len(forwards))
    actions = list(forwards[:num_first])
    for forward, backward in zip(forwards[num_first:], backwards, strict=False):
        actions += (forward, backward)
    return (*actions, *backwards[len(forwards) - num_first :])


def on_stage(op: Op, stage: int, microbatches: Iterable[int]) -> list[Action]:
    """Return an action for each microbatch."""
    return [Action(op, stage, microbatch) for microbatch in microbatches]


def check_sizes(**sizes: int) -> None:
    """Check that sizes are at least one.

    Raises:
        ValueError: One is not.
    """
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} is {size}; it must be at least 1")
