"""Mesh speed: the costs of operations along the axes of a mesh, from measured lines or from its links.

[Note: num_bytes]
The bytes of an operation are those of the larger of a rank's tensors before and after it: of the result of an
all-gather, of the operand of a reduce-scatter, of either one for the others.

[Note: cost of a ring]
Over p ranks that form a ring of links, each of which takes alpha + beta n for a message of n bytes, with n as
in [Note: num_bytes]:

    all-gather, reduce-scatter, all-to-all   (p - 1) alpha + (p - 1) / p  beta n
    all-reduce                               2 (p - 1) alpha + 2 (p - 1) / p  beta n
    point to point                           alpha + beta n

The model is Hockney's; the counts are those of the ring and pairwise algorithms in R. Thakur, R. Rabenseifner
and W. Gropp, "Optimization of Collective Communication Operations in MPICH" (IJHPCA 19, 2005), and of P.
Patarasuk and X. Yuan, "Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations" (JPDC 69, 2009).

Measurements need no such counts: there is a line for each operation and group. The counts are used if only
the links are known, and to scale a measured line to groups of another size, within the measured ones.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from colossalai.device._fit import AlphaBeta

OPERATIONS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "point_to_point")

Extents = tuple[tuple[int, int], ...]
"""Kind of groups, comparable between all grids over the same ranks: extent and stride of each axis of the
group, outermost first, adjacent axes merged."""


@dataclass(frozen=True)
class Machine:
    """The machine of measured times.

    Attributes:
        hosts: The host name of each rank.
        cores: The number of cores of each rank's host.
        device: The device: "cpu", or the name of an accelerator.
        backend: The communication library.
        torch: The version of torch.
    """

    hosts: tuple[str, ...]
    cores: tuple[int, ...]
    device: str
    backend: str
    torch: str

    def differences(self, other: "Machine") -> list[str]:
        """Return a sentence for each difference of another machine."""
        return [
            f"{name}: {getattr(self, name)!r}, not {getattr(other, name)!r}"
            for name in ("hosts", "cores", "device", "backend", "torch")
            if getattr(self, name) != getattr(other, name)
        ]


@dataclass(frozen=True)
class MeshSpeed:
    """Costs of communication along the axes of a mesh.

    Attributes:
        shape: The extents of the mesh, whose axes are named "0", "1", ...
        lines: Line of every operation for each kind of groups.
        machine: Machine of the measurement. None: the lines follow from assumed links.
    """

    shape: tuple[int, ...]
    lines: Mapping[Extents, Mapping[str, AlphaBeta]] = field(repr=False)
    machine: Machine | None = None

    @classmethod
    def of_links(cls, shape: Sequence[int], alpha: Sequence[float], beta: Sequence[float]) -> "MeshSpeed":
        """Return the speed of a mesh of rings, see [Note: cost of a ring]; several axes use the slowest.

        Args:
            shape: The extents of the mesh.
            alpha: For each axis, the latency of a message between neighbors along it in seconds.
            beta: For each axis, the seconds per byte.
        """
        lines = {}
        for axes in _combinations(len(shape)):
            extents = extents_of(shape, axes)
            link = AlphaBeta(max(alpha[axis] for axis in axes), max(beta[axis] for axis in axes))
            lines[extents] = {op: over_ring(op, link, _num_ranks(extents)) for op in OPERATIONS}
        return cls(tuple(shape), lines)

    def of_shape(self, shape: Sequence[int]) -> "MeshSpeed":
        """Return the same speed over the ranks in another grid, counted row by row in both.

        Raises:
            ValueError: `shape` has another number of ranks.
        """
        if math.prod(shape) != math.prod(self.shape):
            raise ValueError(f"the shape {tuple(shape)} is not one of {math.prod(self.shape)} ranks")
        return replace(self, shape=tuple(shape))

    def cost(self, op: str, num_bytes: float, axes: str | Sequence[str]) -> float:
        """Return the seconds of an operation along one axis, or along several taken together.

        Costs of unmeasured groups are scaled from the smallest measured groups around them, by the steps of a
        ring, see [Note: cost of a ring]. Along an axis of one rank the cost is 0.

        Args:
            op: One of `OPERATIONS`.
            num_bytes: See [Note: num_bytes].
            axes: Names of axes: "0", "1", ...

        Raises:
            ValueError: `op` is unknown, `axes` has an unknown axis, or `num_bytes` is negative.
        """
        line = self.line(op, axes)
        if not num_bytes >= 0:
            raise ValueError(f"num_bytes={num_bytes}: give 0 or more")
        return line.seconds(num_bytes)

    def line(self, op: str, axes: str | Sequence[str]) -> AlphaBeta:
        """Return the line that `cost` uses.

        Raises:
            ValueError: `op` is unknown, or `axes` has an unknown axis.
        """
        names = (axes,) if isinstance(axes, str) else tuple(axes)
        found = self._by_axes.get(frozenset(names))
        if found is None:
            known = ", ".join(map(str, range(len(self.shape))))
            raise ValueError(
                f"axes={names} of a mesh of shape {self.shape}: name some of {known}, each as a string"
            )
        if op not in found:
            raise ValueError(f"op={op!r}: choose one of {', '.join(OPERATIONS)}")
        return found[op]

    @cached_property
    def _by_axes(self) -> Mapping[frozenset[str], Mapping[str, AlphaBeta]]:
        """Lines of every operation, for all combinations of axes."""
        return {
            frozenset(map(str, axes)): self._lines_of(extents_of(self.shape, axes))
            for axes in _combinations(len(self.shape))
        }

    def _lines_of(self, extents: Extents) -> Mapping[str, AlphaBeta]:
        """Return the lines of a kind of groups, scaled from larger groups if it was not measured."""
        num_ranks = _num_ranks(extents)
        if num_ranks == 1:
            return dict.fromkeys(OPERATIONS, AlphaBeta(0.0, 0.0))
        if extents in self.lines:
            return self.lines[extents]
        world_size = math.prod(self.shape)
        around = min(
            (known for known in self.lines if is_within(extents, known, world_size)),
            key=lambda known: (_num_ranks(known), known),
        )
        return {
            op: over_ring(op, of_link(op, line, _num_ranks(around)), num_ranks)
            for op, line in self.lines[around].items()
        }


def over_ring(op: str, link: AlphaBeta, num_ranks: int) -> AlphaBeta:
    """Return the line of an operation over a ring of links; see [Note: cost of a ring]."""
    steps, share = _ring(op, num_ranks)
    return AlphaBeta(steps * link.alpha, share * link.beta, link.error)


def of_link(op: str, line: AlphaBeta, num_ranks: int) -> AlphaBeta:
    """Return the line of a link from the line of an operation over its ring; the inverse of `over_ring`."""
    steps, share = _ring(op, num_ranks)
    return AlphaBeta(line.alpha / steps, line.beta / share, line.error)


def _ring(op: str, num_ranks: int) -> tuple[int, float]:
    """Return the number of sequential messages of a rank, and its bytes as a fraction of the total."""
    if num_ranks == 1:
        return 0, 0.0
    if op == "point_to_point":
        return 1, 1.0
    rounds = 2 if op == "all_reduce" else 1
    return rounds * (num_ranks - 1), rounds * (num_ranks - 1) / num_ranks


def extents_of(shape: Sequence[int], axes: Sequence[int]) -> Extents:
    """Return the kind of groups along some axes of a grid, comparable between all grids over the ranks.

    Args:
        shape: The extents of the grid.
        axes: Ascending numbers of axes.
    """
    found: list[tuple[int, int]] = []
    for axis in axes:
        extent, stride = shape[axis], math.prod(shape[axis + 1 :])
        if extent == 1:
            continue
        if found and found[-1][1] == extent * stride:  # adjacent axes: merge them
            found[-1] = (found[-1][0] * extent, stride)
        else:
            found.append((extent, stride))
    return tuple(found)


def is_within(inner: Extents, outer: Extents, world_size: int) -> bool:
    """Whether each group of one kind is contained in a single group of another kind."""
    return all(
        _first_of(place, outer) == _first_of(_first_of(place, inner), outer) for place in range(world_size)
    )


def _first_of(place: int, extents: Extents) -> int:
    """Return the first place of the group of a place of the grid."""
    return place - sum(place // stride % extent * stride for extent, stride in extents)


def _num_ranks(extents: Extents) -> int:
    return math.prod(extent for extent, _ in extents)


def _combinations(num_axes: int) -> list[tuple[int, ...]]:
    """Return all choices of at least one axis, fewest first."""
    return [
        axes for count in range(1, num_axes + 1) for axes in itertools.combinations(range(num_axes), count)
    ]
