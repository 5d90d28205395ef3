"""Direct exchange: each rank gets the boxes that it lacks, from ranks that have them, in one collective.

No path brings a rank fewer bytes: it gets what it lacks and nothing else, whatever the cuts are. Paths by
collectives pass through layouts that nobody asked for.

[Note: who sends]
A box that a rank lacks may be held by several ranks, the replicas of the source. Their places along the axes
that cut the source are the box's; along all others they are every place there is. So just one of them differs
from the receiver along the fewest axes: the one with the receiver's own place along the others. It sends.
Receivers with other places along these axes are served by other replicas, which shares the work; and where
ranks hold terms of a sum before and after, that one has the same term. All ranks find the same, unasked.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from colossalai.communication import exchange
from colossalai.context import Mesh
from colossalai.tensor._box import Box
from colossalai.tensor._spec import ShardingSpec

Boxes = tuple[Box, ...]


@dataclass(frozen=True)
class Transfer:
    """A box that a rank gives to another one, or to itself.

    Attributes:
        sender: The global rank that has it.
        receiver: The global rank that gets it.
        box: Where it lies in the global tensor.
    """

    sender: int
    receiver: int
    box: Box


@dataclass(frozen=True)
class DirectExchange:
    """What this rank sends and receives; `sends` and `receives` are by position along the axes.

    Attributes:
        axes: The axes that boxes move along, taken together; none: this rank copies, and nothing is sent.
        sends: For each rank the boxes of this rank's slice that go to it.
        receives: For each rank the boxes of the new slice that come from it.
        copies: Boxes that stay: from where in the slice, to where in the new one.
        shape: The shape of the new slice.
    """

    axes: tuple[str, ...]
    sends: tuple[Boxes, ...]
    receives: tuple[Boxes, ...]
    copies: tuple[tuple[Box, Box], ...]
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"exchange over {'*'.join(self.axes)}" if self.axes else "copy"

    def run(self, tensor: torch.Tensor, mesh: Mesh) -> torch.Tensor:
        """Return this rank's new slice; collective along the axes."""
        result = tensor.new_empty(self.shape)
        for here, there in self.copies:
            there.of(result).copy_(here.of(tensor))
        if not self.axes:
            return result
        # A single box that is contiguous is sent, or received, where it lies; others go through a buffer.
        sends = [_packed(tensor, boxes) for boxes in self.sends]
        receives = [_place(result, boxes) for boxes in self.receives]
        exchange(sends, receives, mesh.axis(self.axes))
        for received, boxes in zip(receives, self.receives, strict=True):
            _unpack(received, result, boxes)
        return result


def transfers(source: ShardingSpec, target: ShardingSpec) -> list[Transfer]:
    """Return which rank gives which box to which, for the whole mesh; see [Note: who sends].

    Args:
        source: How the tensor is cut.
        target: How it is to be.
    """
    mesh = source.mesh
    ranks = range(mesh.world_size)
    places = [mesh.coordinate(rank) for rank in ranks]
    held, wanted = [_boxes(source, rank) for rank in ranks], [_boxes(target, rank) for rank in ranks]
    cutting = set(source.axes)
    free = [tuple(place[axis] for axis in mesh.axes if axis not in cutting) for place in places]
    nearest: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank in ranks:
        nearest[free[rank]].append(rank)  # one for each slice of the source
    overlaps: dict[tuple[Boxes, Boxes], list[Box]] = {}  # few pairs of different boxes, many pairs of ranks
    found: list[Transfer] = []
    for receiver in ranks:
        for sender in nearest[free[receiver]]:
            key = (held[sender], wanted[receiver])
            if key not in overlaps:
                pairs = (box.overlap(other) for box in held[sender] for other in wanted[receiver])
                overlaps[key] = [box for box in pairs if box is not None]
            found.extend(Transfer(sender, receiver, box) for box in overlaps[key])
    return found


def direct_exchange(source: ShardingSpec, target: ShardingSpec, moved: Sequence[Transfer]) -> DirectExchange:
    """Return this rank's part in the exchange from one cut to another one.

    Args:
        source: How the tensor is cut.
        target: How it is to be.
        moved: The transfers between them.
    """
    mesh = source.mesh
    axes = axes_between(moved, mesh)
    place = {rank: number for number, rank in enumerate(mesh.axis(axes).ranks)} if axes else {}
    sends: list[list[Box]] = [[] for _ in place]
    receives: list[list[Box]] = [[] for _ in place]
    copies: list[tuple[Box, Box]] = []
    for transfer in moved:
        if transfer.sender == transfer.receiver == mesh.rank:
            copies.append((_local(transfer.box, source, mesh.rank), _local(transfer.box, target, mesh.rank)))
        elif transfer.sender == mesh.rank:
            sends[place[transfer.receiver]].append(_local(transfer.box, source, mesh.rank))
        elif transfer.receiver == mesh.rank:
            receives[place[transfer.sender]].append(_local(transfer.box, target, mesh.rank))
    return DirectExchange(
        axes,
        tuple(map(tuple, sends)),
        tuple(map(tuple, receives)),
        tuple(copies),
        target.local_shape,
    )


def _boxes(spec: ShardingSpec, rank: int) -> Boxes:
    """Return the boxes of the global tensor that a rank holds."""
    return tuple(
        Box(tuple(part.offset for part in region), tuple(part.size for part in region))
        for region in spec.regions(rank)
    )


def _local(box: Box, spec: ShardingSpec, rank: int) -> Box:
    """Return where a box of the global tensor lies in the slice of a rank that holds it."""
    for region in spec.regions(rank):
        whole = Box(tuple(part.offset for part in region), tuple(part.size for part in region))
        if whole.overlap(box) == box:
            return box.moved([part.local_offset - part.offset for part in region])
    raise AssertionError(f"rank {rank} does not hold {box} of {spec}")


def axes_between(moved: Sequence[Transfer], mesh: Mesh) -> tuple[str, ...]:
    """Return the axes along which a sender differs from a receiver, outermost first."""
    found: set[str] = set()
    for sender, receiver in {(transfer.sender, transfer.receiver) for transfer in moved}:
        here, there = mesh.coordinate(sender), mesh.coordinate(receiver)
        found |= {axis for axis in mesh.axes if here[axis] != there[axis]}
    return tuple(axis for axis in mesh.axes if axis in found)


def busiest(moved: Sequence[Transfer], world_size: int) -> int:
    """Return the most elements that any rank sends to others, or gets from them."""
    sent, received = [0] * world_size, [0] * world_size
    for transfer in moved:
        if transfer.sender != transfer.receiver:
            sent[transfer.sender] += transfer.box.numel
            received[transfer.receiver] += transfer.box.numel
    return max(*sent, *received)


def _packed(tensor: torch.Tensor, boxes: Boxes) -> torch.Tensor:
    """Return the elements of boxes one after the other, without a copy where they lie so."""
    if len(boxes) == 1:
        return boxes[0].of(tensor).reshape(-1)
    flat = tensor.new_empty(sum(box.numel for box in boxes))
    offset = 0
    for box in boxes:
        flat[offset : offset + box.numel].view(box.sizes).copy_(box.of(tensor))
        offset += box.numel
    return flat


def _place(result: torch.Tensor, boxes: Boxes) -> torch.Tensor:
    """Return where boxes arrive: their own memory where they lie in one piece, else memory of its own."""
    if len(boxes) == 1 and (part := boxes[0].of(result)).is_contiguous():
        return part.view(-1)
    return result.new_empty(sum(box.numel for box in boxes))


def _unpack(received: torch.Tensor, result: torch.Tensor, boxes: Boxes) -> None:
    """Put boxes that arrived in memory of their own into the result."""
    if received.untyped_storage().data_ptr() == result.untyped_storage().data_ptr():
        return
    offset = 0
    for box in boxes:
        box.of(result).copy_(received[offset : offset + box.numel].view(box.sizes))
        offset += box.numel
