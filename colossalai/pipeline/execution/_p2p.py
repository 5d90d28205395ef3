"""Point-to-point messages between the ranks of a pipeline, each with a name for the error when a peer dies.

[Note: groups of a pipeline]
Two groups hold all ranks of the pipeline axis: one for messages to a higher rank, one for messages to a lower
one. Where a backend keeps the messages of a communicator in order (NCCL has one for each pair in each group),
a receive that was posted early then never holds up a send. There are no groups of two ranks: torch names a
group that is made by its members alone after the number of groups that a process has, and a rank in the
middle of a pipeline would have more of them than its neighbour at the end, so that they would never meet.

A backend may make the connection of a pair when it is first used, and both have to come for that; so each
pair uses its two directions once, in the same order on all ranks, before there is any schedule.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from colossalai.communication import all_gather
from colossalai.context import Axis
from colossalai.logging import get_dist_logger

Expected = tuple[tuple[int, ...], torch.dtype]


@dataclass(frozen=True, slots=True)
class Sent:
    """Tensors on their way to another rank; they must stay as they are until `wait` has returned."""

    tensors: tuple[torch.Tensor, ...]
    works: tuple[dist.Work, ...]
    blame: Callable[[], str]

    def wait(self) -> None:
        """Return when the tensors may be changed or freed."""
        _wait(self.works, self.blame)


@dataclass(frozen=True, slots=True)
class Arriving:
    """Tensors on their way from another rank, and how to make whole ones of the parts that are sent."""

    tensors: tuple[torch.Tensor, ...]
    works: tuple[dist.Work, ...]
    blame: Callable[[], str]
    shapes: tuple[tuple[int, ...], ...]
    axis: Axis | None

    def wait(self) -> list[torch.Tensor]:
        """Return the tensors when they have arrived."""
        _wait(self.works, self.blame)
        return [
            _gathered(tensor, shape, self.axis)
            for tensor, shape in zip(self.tensors, self.shapes, strict=True)
        ]


class Channel:
    """The messages of this rank along the pipeline axis.

    A message is one operation of the backend for each tensor, without packing or copying; a tensor without
    elements is not sent.

    Args:
        axis: The pipeline axis.
        device: Where tensors are received.
        scatter_axis: The tensor axis along which everything that is sent is the same, so that each rank
            sends its part of a tensor only, and the receivers gather it.
    """

    def __init__(self, axis: Axis, *, device: torch.device, scatter_axis: Axis | None = None) -> None:
        self.axis = axis
        self.device = device
        self.scatter_axis = scatter_axis if scatter_axis is not None and scatter_axis.size > 1 else None
        self._connected: set[tuple[int, int]] = set()
        self._to_higher: dist.ProcessGroup | None = None
        self._to_lower: dist.ProcessGroup | None = None
        if axis.size > 1:
            self._to_higher = axis.group
            self._to_lower = axis.mesh.group_of(axis.ranks[::-1])

    def connect(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Use connections for the first time, in the same order on all ranks.

        Args:
            pairs: Of pipeline ranks (source, destination); all of them, the same on every rank.
        """
        unordered = {(min(pair), max(pair)) for pair in pairs}
        for low, high in sorted(unordered - self._connected):
            self._greet(low, high)
            self._greet(high, low)
        self._connected |= unordered

    def send(
        self, tensors: Iterable[torch.Tensor], peer: int, blame: Callable[[], str], *, whole: bool = False
    ) -> Sent:
        """Begin to send tensors to a pipeline rank; `whole` ones are not cut along the scatter axis."""
        axis = None if whole else self.scatter_axis
        parts = tuple(_part(tensor.detach(), axis) for tensor in tensors)
        works = self._start(_isend, parts, peer, self._group(self.axis.rank, peer), blame)
        return Sent(parts, works, blame)

    def receive(
        self, specs: Iterable[Expected], peer: int, blame: Callable[[], str], *, whole: bool = False
    ) -> Arriving:
        """Begin to receive tensors of known shapes and types from a pipeline rank; see `send`."""
        axis = None if whole else self.scatter_axis
        shapes, places = [], []
        for shape, dtype in specs:
            shapes.append(shape)
            places.append(torch.empty(_part_shape(shape, axis), dtype=dtype, device=self.device))
        works = self._start(_irecv, places, peer, self._group(peer, self.axis.rank), blame)
        return Arriving(tuple(places), works, blame, tuple(shapes), axis)

    def _start(
        self,
        operation: Callable[[torch.Tensor, dist.ProcessGroup, int], dist.Work],
        tensors: Iterable[torch.Tensor],
        peer: int,
        group: dist.ProcessGroup,
        blame: Callable[[], str],
    ) -> tuple[dist.Work, ...]:
        works = []
        try:
            for tensor in tensors:
                if tensor.numel():
                    works.append(operation(tensor, group, peer))
        except RuntimeError as error:
            raise _peer_error(error, blame) from error
        return tuple(works)

    def _greet(self, source: int, destination: int) -> None:
        if self.axis.rank not in (source, destination):
            return
        token = torch.zeros(1, device=self.device)
        if self.axis.rank == source:
            self.send([token], destination, lambda: self._who(destination), whole=True).wait()
        else:
            self.receive([((1,), token.dtype)], source, lambda: self._who(source), whole=True).wait()

    def _who(self, peer: int) -> str:
        return (
            f"pipeline rank {peer} (rank {self.axis.ranks[peer]}) {{}} while pipeline rank {self.axis.rank} "
            f"(rank {self.axis.mesh.rank}) connected to it"
        )

    def _group(self, source: int, destination: int) -> dist.ProcessGroup:
        group = self._to_higher if source < destination else self._to_lower
        assert group is not None, "a pipeline of one rank sends nothing"
        return group


def _isend(tensor: torch.Tensor, group: dist.ProcessGroup, peer: int) -> dist.Work:
    return group.send([tensor], peer, 0)


def _irecv(tensor: torch.Tensor, group: dist.ProcessGroup, peer: int) -> dist.Work:
    return group.recv([tensor], peer, 0)


def _wait(works: Iterable[dist.Work], blame: Callable[[], str]) -> None:
    try:
        for work in works:
            work.wait()
    except RuntimeError as error:
        raise _peer_error(error, blame) from error


def _peer_error(error: RuntimeError, blame: Callable[[], str]) -> RuntimeError:
    """Return an error that names the peer; `blame` has a place for what has become of it."""
    is_late = "timed out" in str(error).lower()
    return RuntimeError(blame().format("did not answer in time" if is_late else "is gone"))


def _is_cut(shape: tuple[int, ...], axis: Axis | None) -> bool:
    """Whether each rank of a tensor axis sends its part of a tensor only."""
    if axis is None or not shape:
        return False
    if math.prod(shape) % axis.size == 0:
        return True
    get_dist_logger().log_once(
        f"scatter_gather_tensors: a tensor of shape {shape} cannot be cut into {axis.size} equal parts; "
        "it is sent whole by every tensor-parallel rank"
    )
    return False


def _part(tensor: torch.Tensor, axis: Axis | None) -> torch.Tensor:
    """Return what this rank sends of a tensor, contiguous."""
    whole = tensor.contiguous()
    if axis is None or not _is_cut(tuple(tensor.shape), axis):
        return whole
    return whole.view(-1).chunk(axis.size)[axis.rank]


def _part_shape(shape: tuple[int, ...], axis: Axis | None) -> tuple[int, ...]:
    if axis is None or not _is_cut(shape, axis):
        return shape
    return (math.prod(shape) // axis.size,)


def _gathered(tensor: torch.Tensor, shape: tuple[int, ...], axis: Axis | None) -> torch.Tensor:
    if axis is None or not _is_cut(shape, axis):
        return tensor
    return all_gather(tensor, 0, axis).view(shape)
