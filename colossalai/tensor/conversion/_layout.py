"""Tensor layout: a sharding spec, and the axes along which the ranks hold terms of a sum.

It corresponds to the `Shard`, `Replicate` and `Partial` placements of torch's DTensor, and adds the order of
the axes that shard a dimension.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from colossalai.tensor._spec import ShardingSpec


class AxisPlacement(NamedTuple):
    """The axes of a layout: a node of the graph of layouts. Axes of one rank are left out.

    Attributes:
        dims: For each dimension the axes that shard it, outermost first.
        partial: Axes along which ranks hold terms of a sum, outermost first.
    """

    dims: tuple[tuple[str, ...], ...]
    partial: tuple[str, ...] = ()

    def __str__(self) -> str:
        cut = ", ".join("*".join(axes) or "-" for axes in self.dims)
        return f"({cut})" + (f" + sum over {'*'.join(self.partial)}" if self.partial else "")


@dataclass(frozen=True)
class ShardingLayout:
    """Layout of a tensor over the ranks of a mesh.

    Attributes:
        spec: Sharding of the tensor.
        partial: Axes along which each rank holds a term of the same slice; the value is the sum. They are
            stored in the order of the mesh, without axes of one rank.
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
        """The axes of the layout."""
        extents = self.spec.mesh.axes
        dims = tuple(tuple(axis for axis in axes if extents[axis] > 1) for axes in self.spec.dims)
        return AxisPlacement(dims, self.partial)

    def at(self, placement: AxisPlacement) -> "ShardingLayout":
        """Return the layout of the same tensor over the same mesh with other axes."""
        spec = self.spec
        moved = ShardingSpec(spec.shape, placement.dims, spec.mesh, spec.stored_as, spec.parts)
        return ShardingLayout(moved, placement.partial)


def as_layout(layout: ShardingLayout | ShardingSpec) -> ShardingLayout:
    """Return a layout; a spec becomes a layout without sums."""
    return layout if isinstance(layout, ShardingLayout) else ShardingLayout(layout)


@dataclass(frozen=True)
class Extents:
    """Constraints of a placement: the shape of a tensor, and the axes of a mesh.

    Attributes:
        shape: Global shape, as stored.
        axes: Axes of more than one rank and their extents, outermost first.
        itemsize: Size of an element in bytes.
        is_cut_by_parts: Whether a dimension consists of parts that are sharded separately.
    """

    shape: tuple[int, ...]
    axes: Mapping[str, int]
    itemsize: int
    is_cut_by_parts: bool = False

    def num_ranks(self, axes: tuple[str, ...]) -> int:
        """Return the number of ranks along the flattened axes."""
        count = 1
        for axis in axes:
            count *= self.axes[axis]
        return count

    def local_bytes(self, placement: AxisPlacement) -> int:
        """Return the size of a rank's slice in bytes."""
        num_bytes = self.itemsize
        for size, axes in zip(self.shape, placement.dims, strict=True):
            num_bytes *= size // self.num_ranks(axes)
        return num_bytes

    def largest(self, *placements: AxisPlacement) -> int:
        """Return the size in bytes of a rank's largest slice, from which collective costs are computed."""
        return max(map(self.local_bytes, placements))
