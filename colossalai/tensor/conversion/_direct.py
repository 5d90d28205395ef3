"""Direct exchange: each rank receives its missing boxes, from ranks that hold them, in one collective.

No path sends a rank fewer bytes: it receives only its missing boxes, under any sharding. Paths of collectives
pass through intermediate layouts.

[Note: sender of a box]
Several ranks, the replicas of the source, can hold a box that another rank lacks. Their positions along the
axes that shard the source are the positions of the box; along all other axes they have every position. So
exactly one of them differs from the receiver along the fewest axes: the replica with the receiver's position
along the other axes. It is the sender. Receivers with other positions along these axes have other senders,
which shares the work; and if ranks hold terms of a sum before and after, the sender has the receiver's term.
All ranks compute the same senders, without communication.
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
    """A box that one rank sends to another rank, or to itself.

    Attributes:
        sender: Global rank of the sender.
        receiver: Global rank of the receiver.
        box: Box of the global tensor.
    """

    sender: int
    receiver: int
    box: Box


@dataclass(frozen=True)
class DirectExchange:
    """Boxes that this rank sends and receives; `sends` and `receives` are by position along the axes.

    Attributes:
        axes: Axes of the all-to-all, flattened; empty if this rank only copies.
        sends: Boxes of this rank's slice to send to each rank.
        receives: Boxes of the new slice to receive from each rank.
        copies: Local boxes: pairs of a box in the slice and its box in the new slice.
        shape: Shape of the new slice.
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
        # A single contiguous box is sent, or received, in place; other boxes are copied through a buffer.
        sends = [_packed(tensor, boxes) for boxes in self.sends]
        receives = [_place(result, boxes) for boxes in self.receives]
        exchange(sends, receives, mesh.axis(self.axes))
        for received, boxes in zip(receives, self.receives, strict=True):
            _unpack(received, result, boxes)
        return result


def transfers(source: ShardingSpec, target: ShardingSpec) -> list[Transfer]:
    """Return the transfers of all ranks of the mesh; see [Note: sender of a box].

    Args:
        source: Current spec of the tensor.
        target: New spec of the tensor.
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
    """Return this rank's part of the exchange between two specs.

    Args:
        source: Current spec of the tensor.
        target: New spec of the tensor.
        moved: Transfers of all ranks.
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
    """Return the position of a box of the global tensor in the slice of a rank that holds it."""
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
    """Return the maximum over the ranks of the elements sent to, or received from, other ranks."""
    sent, received = [0] * world_size, [0] * world_size
    for transfer in moved:
        if transfer.sender != transfer.receiver:
            sent[transfer.sender] += transfer.box.numel
            received[transfer.receiver] += transfer.box.numel
    return max(*sent, *received)


def _packed(tensor: torch.Tensor, boxes: Boxes) -> torch.Tensor:
    """Return the concatenated elements of boxes, without a copy if they are contiguous."""
    if len(boxes) == 1:
        return boxes[0].of(tensor).reshape(-1)
    flat = tensor.new_empty(sum(box.numel for box in boxes))
    offset = 0
    for box in boxes:
        flat[offset : offset + box.numel].view(box.sizes).copy_(box.of(tensor))
        offset += box.numel
    return flat


def _place(result: torch.Tensor, boxes: Boxes) -> torch.Tensor:
    """Return the receive buffer of boxes: their memory in the result if it is contiguous, or a new buffer."""
    if len(boxes) == 1 and (part := boxes[0].of(result)).is_contiguous():
        return part.view(-1)
    return result.new_empty(sum(box.numel for box in boxes))


def _unpack(received: torch.Tensor, result: torch.Tensor, boxes: Boxes) -> None:
    """Copy boxes from a separate receive buffer into the result."""
    if received.untyped_storage().data_ptr() == result.untyped_storage().data_ptr():
        return
    offset = 0
    for box in boxes:
        box.of(result).copy_(received[offset : offset + box.numel].view(box.sizes))
        offset += box.numel
