"""Notations of a cut: "S0RS1", a dict from dimensions to axes, torch's placements; and how they are read.

"S01R" is a matrix whose rows are cut over the axes 0 and 1 of the mesh, the coarsest cut first, and whose
columns are replicated. A digit is the position of an axis in `mesh.axes`, including axes of one rank, so that
it means the same axis for all extents. There are ten digits: axes from the eleventh on have no notation, and
are given by their names.
"""

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from colossalai.context import Mesh

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement

Dims = tuple[tuple[str, ...], ...]
_DIMENSION = re.compile(r"R|S[0-9]+")


class HasMesh(Protocol):
    """A view of a mesh."""

    @property
    def mesh(self) -> Mesh:
        """The mesh."""


def mesh_of(mesh: Mesh | HasMesh) -> Mesh:
    """Return the mesh that something is, or is a view of."""
    return mesh if isinstance(mesh, Mesh) else mesh.mesh


def dims_of_notation(notation: str, mesh: Mesh) -> Dims:
    """Return for each dimension the axes that cut it.

    Args:
        notation: One `R` (replicated) or `S` and digits for each dimension.
        mesh: The mesh, whose axes the digits count.

    Raises:
        ValueError: `notation` has anything else in it, or a digit of no axis.
    """
    dimensions = _DIMENSION.findall(notation)
    if "".join(dimensions) != notation:
        raise ValueError(
            f"{notation!r} is not the notation of a cut: write R for each dimension that all ranks have, "
            "and S with the positions of the axes that cut it for any other one, as in 'S0RS12'"
        )
    return tuple(_axes_at([int(digit) for digit in dimension[1:]], mesh) for dimension in dimensions)


def notation_of(dims: Dims, mesh: Mesh) -> str:
    """Return the notation of the axes that cut each dimension.

    Raises:
        ValueError: The position of an axis of `dims` in `mesh` has two digits.
    """
    positions = [[_position(axis, mesh) for axis in axes] for axes in dims]
    for axes, of_dim in zip(dims, positions, strict=True):
        for axis, position in zip(axes, of_dim, strict=True):
            if position > 9:
                raise ValueError(
                    f"axis {axis!r} is number {position} of the mesh, and notations have one digit for an "
                    "axis: use `dims`, which names the axes"
                )
    return "".join("S" + "".join(map(str, of_dim)) if of_dim else "R" for of_dim in positions)


def dims_of_partition(partition: Mapping[int, Sequence[int]], num_dims: int, mesh: Mesh) -> Dims:
    """Return for each dimension the axes that cut it, of a dict from dimensions to positions of axes.

    Args:
        partition: Dimensions that it leaves out are replicated; they may count from the end.
        num_dims: The number of dimensions.
        mesh: The mesh, whose axes the positions count.

    Raises:
        ValueError: `partition` names a dimension that is not there, or twice, or a position of no axis.
    """
    dims: list[tuple[str, ...]] = [()] * num_dims
    for dim, positions in partition.items():
        if not -num_dims <= dim < num_dims:
            raise ValueError(f"dimension {dim} in {dict(partition)} of a tensor of {num_dims} dimensions")
        if dims[dim]:
            raise ValueError(f"dimension {dim % num_dims} is twice in {dict(partition)}")
        dims[dim] = _axes_at(positions, mesh)
    return tuple(dims)


def partition_of_dims(dims: Dims, mesh: Mesh) -> dict[int, list[int]]:
    """Return the dict from dimensions that are cut to the positions of their axes."""
    return {dim: [_position(axis, mesh) for axis in axes] for dim, axes in enumerate(dims) if axes}


def dims_of_placements(placements: "Sequence[Placement]", num_dims: int, mesh: Mesh) -> Dims:
    """Return for each dimension the axes that cut it, of torch's placements, one for each axis of the mesh.

    Raises:
        ValueError: `placements` are more or fewer than the axes of `mesh`, or one is neither `Shard` of a
            dimension that is there nor `Replicate`.
    """
    from torch.distributed.tensor import Replicate, Shard

    if len(placements) != len(mesh.axes):
        raise ValueError(
            f"{len(placements)} placements for the {len(mesh.axes)} axes {list(mesh.axes)}: give one for each"
        )
    dims: list[list[str]] = [[] for _ in range(num_dims)]
    for axis, placement in zip(mesh.axes, placements, strict=True):
        if type(placement) is Replicate:
            continue
        if type(placement) is not Shard:  # torch's strided shards are not a subclass everywhere
            raise ValueError(
                f"{placement} along {axis!r} is not a cut: a spec takes Shard(dim) and Replicate(), and "
                "terms of a sum are the `partial` of a ShardingLayout"
            )
        if not -num_dims <= placement.dim < num_dims:
            raise ValueError(f"{placement} along {axis!r} of a tensor of {num_dims} dimensions")
        dims[placement.dim].append(axis)
    return tuple(map(tuple, dims))


def placements_of_dims(dims: Dims, mesh: Mesh) -> "tuple[Placement, ...]":
    """Return torch's placements of a cut, one for each axis of the mesh.

    Raises:
        ValueError: Axes of `dims` shard a dimension in another order than that of `mesh`, which `Shard`
            cannot express.
    """
    from torch.distributed.tensor import Replicate, Shard

    found: dict[str, Placement] = {}
    for dim, axes in enumerate(dims):
        several = [axis for axis in axes if mesh.axis_size(axis) > 1]
        if sorted(several, key=list(mesh.axes).index) != several:
            raise ValueError(
                f"dimension {dim} is cut over {' then '.join(several)}, and torch's Shard cuts over the "
                f"outer axis first, in the order {list(mesh.axes)}: convert to that order before"
            )
        found.update(dict.fromkeys(axes, Shard(dim)))
    return tuple(found.get(axis, Replicate()) for axis in mesh.axes)


def _axes_at(positions: Sequence[int], mesh: Mesh) -> tuple[str, ...]:
    axes = list(mesh.axes)
    for position in positions:
        if not 0 <= position < len(axes):
            raise ValueError(f"there is no axis {position}: the mesh has {dict(enumerate(axes))}")
    return tuple(axes[position] for position in positions)


def _position(axis: str, mesh: Mesh) -> int:
    axes = list(mesh.axes)
    if axis not in axes:
        raise ValueError(f"{axis!r} is not one of the axes {axes} of the mesh, which have positions")
    return axes.index(axis)
