"""Tensor layout: a sharding spec, and the axes along which the ranks hold terms of a sum.

It is what torch's DTensor says by `Shard`, `Replicate` and `Partial`, with the order in which axes cut a
dimension.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from colossalai.tensor._spec import ShardingSpec


class AxisPlacement(NamedTuple):
    """The axes of a layout: a node of the graph of layouts. Axes of one rank are left out.

    Attributes:
        dims: For each dimension the axes that cut it, the coarsest cut first.
        partial: The axes along which ranks hold terms of a sum, outermost first.
    """

    dims: tuple[tuple[str, ...], ...]
    partial: tuple[str, ...] = ()

    def __str__(self) -> str:
        cut = ", ".join("*".join(axes) or "-" for axes in self.dims)
        return f"({cut})" + (f" + sum over {'*'.join(self.partial)}" if self.partial else "")


@dataclass(frozen=True)
class ShardingLayout:
    """How the ranks of a mesh hold a tensor.

    Attributes:
        spec: How it is cut.
        partial: The axes along which each rank holds a term of the same slice, whose sum is the value. They
            are kept in the order of the mesh, without axes of one rank.
    """

    spec: ShardingSpec
    partial: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        mesh = self.spec.mesh
        for axis in (*self.partial, *self.spec.axes):
            if axis not in mesh.axes:
                raise ValueError(f"a layout names axes of its mesh, {list(mesh.axes)}, not {axis!r}")
        both = set(self.partial) & set(self.spec.axes)
        if both:
            raise ValueError(
                f"axes {sorted(both)} cut the tensor, so ranks along them hold no terms of one sum"
            )
        kept = tuple(axis for axis in mesh.axes if axis in self.partial and mesh.axes[axis] > 1)
        object.__setattr__(self, "partial", kept)

    @property
    def placement(self) -> AxisPlacement:
        """Its axes alone."""
        extents = self.spec.mesh.axes
        dims = tuple(tuple(axis for axis in axes if extents[axis] > 1) for axes in self.spec.dims)
        return AxisPlacement(dims, self.partial)

    def at(self, placement: AxisPlacement) -> "ShardingLayout":
        """Return the layout of the same tensor, over the same mesh, by other axes."""
        spec = self.spec
        moved = ShardingSpec(spec.shape, placement.dims, spec.mesh, spec.stored_as, spec.parts)
        return ShardingLayout(moved, placement.partial)


def as_layout(layout: ShardingLayout | ShardingSpec) -> ShardingLayout:
    """Return a layout, of a spec the one without sums."""
    return layout if isinstance(layout, ShardingLayout) else ShardingLayout(layout)


@dataclass(frozen=True)
class Extents:
    """What a placement must fit: the shape of a tensor, and the axes of a mesh.

    Attributes:
        shape: The global shape, as it is stored.
        axes: The axes of more than one rank and their extents, outermost first.
        itemsize: Bytes of an element.
        is_cut_by_parts: Whether a dimension consists of parts that are cut each for itself.
    """

    shape: tuple[int, ...]
    axes: Mapping[str, int]
    itemsize: int
    is_cut_by_parts: bool = False

    def num_ranks(self, axes: tuple[str, ...]) -> int:
        """Return the number of ranks along axes taken together."""
        count = 1
        for axis in axes:
            count *= self.axes[axis]
        return count

    def local_bytes(self, placement: AxisPlacement) -> int:
        """Return the bytes of a rank's slice."""
        num_bytes = self.itemsize
        for size, axes in zip(self.shape, placement.dims, strict=True):
            num_bytes *= size // self.num_ranks(axes)
        return num_bytes

    def largest(self, *placements: AxisPlacement) -> int:
        """Return the bytes of the largest of a rank's slices, which is what costs of collectives ask for."""
        return max(map(self.local_bytes, placements))
