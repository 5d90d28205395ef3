"""What the optimizers of one model decide together: whether the gradients of a backward may be stepped with.

[Note: one scale for the optimizers of a model]
A backward multiplies one loss by one scale, and leaves gradients that hold it in every optimizer of the
model. So those share a scaler. Each notes the scale of the latest backward, whichever of them ran it, and
divides out that one: by the time of its step, the scaler may have moved on because of another's. Gradients
that wait, to be added to, follow the scale before a backward with another one adds to them.

The first one that asks looks at the gradients of all that wait for their step: if one of them has an
overflow, all skip, and the scaler counts one step. One whose gradients are nobody's any more (it has made or
skipped its step, and has not forgotten them yet) is not asked: what a later backward adds to them is thrown
away, and an inf in them is an old one. All this follows from the order of the program's calls, so all ranks
decide alike.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from colossalai.amp._loss_scaling import Overflow, find_overflow
from colossalai.tensor import local_grads


@dataclass(eq=False)
class Decision:
    """Whether some optimizers may step.

    Attributes:
        overflow: What forbids it, if something does.
        is_counted: Whether the scaler has heard of it.
    """

    overflow: Overflow | None = None
    is_counted: bool = False

    @property
    def may_step(self) -> bool:
        """Whether they may."""
        return self.overflow is None


def decide(
    windows: Iterable[Iterable[tuple[torch.Tensor, int]]], group: dist.ProcessGroup | None
) -> Decision:
    """Look for an inf or nan; one all-reduce of one int64 over `group`.

    Args:
        windows: Parameters, each with its place in the model, in runs that are in memory together.
        group: The ranks that decide together; None for this process alone.
    """

    def placed_grads() -> Iterator[tuple[list[torch.Tensor], list[int]]]:
        for window in windows:
            held = [(param, place) for param, place in window if param.grad is not None]
            yield local_grads(param for param, _ in held), [place for _, place in held]

    return Decision(find_overflow(placed_grads(), group))
