"""Ring rotation of blocks, overlapped with computation, and of the partial sums for their owners.

Rank r of p holds block r. In p - 1 shifts to the next rank every block passes every rank; each shift overlaps
with the computation on the block that the rank holds. The partial sum for the owner of a block follows the
block: it starts at the rank after the owner, each rank that the block passes adds its part, and after p - 1
shifts it arrives at the owner, which adds its own part last.
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
    """A shift in flight: tensors to the next rank, and from the previous one.

    Attributes:
        sent: Tensors that this rank sends; they must not be modified before `wait`.
        received: Buffers for the tensors of the previous rank.
        requests: Works of the sends and receives.
        axis: The ring.
    """

    sent: Tensors
    received: Tensors
    requests: tuple[dist.Work, ...]
    axis: Axis

    def wait(self) -> Tensors:
        """Wait for the shift and return the tensors of the previous rank; the sent ones can be modified then.

        The ledger gets one entry per tensor; the first one has the duration of the wait for all of them.
        """
        for index, tensor in enumerate(self.sent):
            with record("shift", self.axis.name, tensor, self.axis.size):
                for request in self.requests if index == 0 else ():
                    request.wait()
        return self.received


def ring_shift_async(tensors: Sequence[torch.Tensor], parallel_mode: AxisLike) -> RingShift:
    """Start to send tensors to the next rank of a ring, and to receive those of the previous one.

    Args:
        tensors: Tensors of this rank, of the same shapes and dtypes on all ranks.
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
    # Joined by all ranks of the ring; the tensors of a pair of ranks match in the order of `tensors`.
    return RingShift(sent, received, tuple(dist.batch_isend_irecv(operations)), axis)


def ring_blocks(tensors: Sequence[torch.Tensor], axis: Axis) -> Iterator[tuple[int, Tensors]]:
    """Yield (owner, its tensors) for every rank of a ring: this rank, then the one before it, and so on.

    The tensors of the next owner arrive while the caller computes with the present ones, which must not be
    modified. Each tensor is shifted p - 1 times.

    Args:
        tensors: Tensors of this rank, of the same shapes and dtypes on all ranks.
        axis: The ring.
    """
    held: Tensors = tuple(tensors)
    for step in range(axis.size):
        # In flight during the computation of the caller, which reads `held` and does not write it.
        shift = ring_shift_async(held, axis) if step < axis.size - 1 else None
        yield (axis.rank - step) % axis.size, held
        if shift is not None:
            # The sends are complete as well: the earlier blocks are freed here.
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
        """Add this rank's parts of the sums of the present block, once per block; they are modified."""
        if self._step == 0:
            self._own = parts
        else:
            # Ends the previous shift, whose sent parts are no longer in use.
            arrived = () if self._shift is None else self._shift.wait()
            for part, others in zip(parts, arrived, strict=False):  # empty at the start of the sum
                part.add_(others)
            self._shift = ring_shift_async(parts, self._axis)
        self._step += 1

    def finish(self) -> Tensors:
        """Return the sums of this rank's own block."""
        assert self._step == self._axis.size, f"{self._step} parts of {self._axis.size} were added"
        # The sum of the other ranks for this rank's own block; its own part is added last.
        arrived = () if self._shift is None else self._shift.wait()
        for own, others in zip(self._own, arrived, strict=False):
            own.add_(others)
        return self._own
