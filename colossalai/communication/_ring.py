"""Blocks that go round a ring while the ranks compute, and sums that follow them home.

Rank r of p holds block r. In p - 1 shifts to the next rank every block passes every rank; each shift is under
way while the rank computes with the block that it holds. What the ranks find as parts of a sum that belongs
to the owner of a block follows it: the sum starts at the rank after the owner, is added to by each rank that
the block passes, and arrives after p - 1 shifts of its own at the owner, who adds its own part last.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from colossalai.communication._collectives import AxisLike, as_axis
from colossalai.communication._ledger import record
from colossalai.context import Axis

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class RingShift:
    """Tensors on their way to the next rank, and those of the previous one on theirs to this.

    Attributes:
        sent: What this rank sends; it must not change before `wait`.
        received: Where the tensors of the previous rank arrive.
        requests: The operations under way.
        axis: The ring.
    """

    sent: Tensors
    received: Tensors
    requests: tuple[dist.Work, ...]
    axis: Axis

    def wait(self) -> Tensors:
        """Return the tensors of the previous rank; those sent may change from here on.

        One entry of the ledger for each tensor; the time of the first one is what this rank waits for all.
        """
        for index, tensor in enumerate(self.sent):
            with record("shift", self.axis.name, tensor, self.axis.size):
                for request in self.requests if index == 0 else ():
                    request.wait()
        return self.received


def ring_shift_async(tensors: Sequence[torch.Tensor], parallel_mode: AxisLike) -> RingShift:
    """Begin to send tensors to the next rank of a ring, and to receive those of the previous one.

    Args:
        tensors: What this rank sends; of the same shapes and types on all ranks.
        parallel_mode: The axis, of two ranks or more.
    """
    axis = as_axis(parallel_mode)
    following, previous = axis.ranks[(axis.rank + 1) % axis.size], axis.ranks[axis.rank - 1]
    sent = tuple(tensor.contiguous() for tensor in tensors)
    received = tuple(torch.empty_like(tensor) for tensor in sent)
    operations = []
    for tensor, place in zip(sent, received, strict=True):
        operations.append(dist.P2POp(dist.isend, tensor, following, axis.group))
        operations.append(dist.P2POp(dist.irecv, place, previous, axis.group))
    return RingShift(sent, received, tuple(dist.batch_isend_irecv(operations)), axis)


def ring_blocks(tensors: Sequence[torch.Tensor], axis: Axis) -> Iterator[tuple[int, Tensors]]:
    """Yield (owner, its tensors) for every rank of a ring, this one first, then the one before, and so on.

    The tensors of the next owner arrive while the caller computes with those it has. The tensors must not be
    changed. p - 1 shifts of each.

    Args:
        tensors: The tensors of this rank; of the same shapes and types on all ranks.
        axis: The ring.
    """
    held: Tensors = tuple(tensors)
    for step in range(axis.size):
        shift = ring_shift_async(held, axis) if step < axis.size - 1 else None
        yield (axis.rank - step) % axis.size, held
        if shift is not None:
            held = shift.wait()


class RingSum:
    """Sums over all ranks that follow the blocks of `ring_blocks` to their owners; p - 1 shifts of each.

    Args:
        axis: The ring.
    """

    def __init__(self, axis: Axis) -> None:
        self._axis = axis
        self._own: Tensors = ()
        self._shift: RingShift | None = None
        self._step = 0

    def add(self, *parts: torch.Tensor) -> None:
        """Give this rank's parts of the sums of the present block, once for each block; they are changed."""
        if self._step == 0:
            self._own = parts
        else:
            arrived = () if self._shift is None else self._shift.wait()
            for part, others in zip(parts, arrived, strict=False):  # nothing arrives where the sum starts
                part.add_(others)
            self._shift = ring_shift_async(parts, self._axis)
        self._step += 1

    def finish(self) -> Tensors:
        """Return the sums of this rank's own block."""
        assert self._step == self._axis.size, f"{self._step} parts of {self._axis.size} were added"
        arrived = () if self._shift is None else self._shift.wait()
        for own, others in zip(self._own, arrived, strict=False):
            own.add_(others)
        return self._own
