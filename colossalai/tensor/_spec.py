"""Sharding spec of a tensor over a mesh: the ordered axes of each dimension, replicated over all other axes.

Every parameter of a parallel layer has its spec. Operations on the full parameter (norms, checkpoints) and
the ranks of its gradient synchronization are derived from the spec.

[Note: ranks of a gradient]
The loss of a step is the mean of the losses L_r of the R parts of the batch, one on each rank of `replicas`.
So the gradient of a tensor w is (1 / R) times the sum over r of dL_r / dw. A backward leaves on a rank the
terms of those losses that the rank's own slice took part in:

- No axis of the replicas cuts w: the rank's own loss only. The sum is over all replicas.
- Some axes do (an expert over `ep`, of dp = edp x ep): the ranks along them hold other slices, and sent this
  one their part of the batch, so their terms are in already. The sum is over the other axes (`edp`).

The divisor is R for both, since the loss is the same.
"""

import itertools
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch
import torch.distributed as dist

from colossalai.communication import all_gather
from colossalai.context import Axis, Mesh
from colossalai.tensor._attributes import FRAGMENT_OF, ROW_CACHE, SHARDING_SPEC
from colossalai.tensor._notation import (
    HasMesh,
    dims_of_notation,
    dims_of_partition,
    dims_of_placements,
    mesh_of,
    notation_of,
    partition_of_dims,
    placements_of_dims,
)

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement


class Stretch(NamedTuple):
    """A range in one dimension that a rank holds.

    Attributes:
        offset: Offset in the global tensor.
        local_offset: Offset in the slice of the rank.
        size: Extent of the range.
    """

    offset: int
    local_offset: int
    size: int


@dataclass(frozen=True)
class ShardingSpec:
    """A cut of a global tensor over a mesh.

    A layer may store a tensor in another order of dimensions than torch does (a linear weight as (in, out)).
    `shape`, `dims`, `cut` and `gather` are in the order that is stored. `whole_shape`, `slice_of` and `whole`
    are in torch's order, which is the same under every layout and is used for exchanges between layouts.

    Attributes:
        shape: The global shape, as it is stored.
        dims: For each dimension, the mesh axes that cut it, the coarsest cut first.
        mesh: The mesh.
        stored_as: For each stored dimension, which of torch's it is: stored is `whole.permute(stored_as)`.
            None: the order is torch's.
        parts: For each dimension, of how many equal parts it consists, each of which is cut for itself: 3 for
            a weight that yields query, key and value one behind the other. None: all are cut as one.
    """

    shape: tuple[int, ...]
    dims: tuple[tuple[str, ...], ...]
    mesh: Mesh = field(repr=False)
    stored_as: tuple[int, ...] | None = None
    parts: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if len(self.dims) != len(self.shape):
            raise ValueError(f"a spec of {len(self.dims)} dimensions for a tensor of shape {self.shape}")
        if len(set(self.axes)) != len(self.axes):
            raise ValueError(f"an axis cuts twice in {self.dims}")
        if sorted(self._order) != list(range(len(self.shape))):
            raise ValueError(
                f"stored_as={self.stored_as} does not name each of {len(self.shape)} dimensions once"
            )
        if len(self.parts_of_dims) != len(self.shape):
            raise ValueError(f"parts={self.parts} for {len(self.shape)} dimensions")
        for dim, (axes, num_parts) in enumerate(zip(self.dims, self.parts_of_dims, strict=True)):
            num_ranks = math.prod(self.mesh.axis_size(axis) for axis in axes)
            if self.shape[dim] % (num_ranks * num_parts):
                of_parts = f"{num_parts} parts of " if num_parts > 1 else ""
                raise ValueError(
                    f"dimension {dim} of shape {self.shape} is {of_parts}{self.shape[dim] // num_parts}, "
                    f"which the {num_ranks} ranks along {' x '.join(axes)} do not divide: nothing is padded "
                    "unless you request it, with pad_to(tensor, shape) and a PaddedSpec of that shape"
                )

    @staticmethod
    def from_notation(notation: str, shape: Sequence[int], mesh: Mesh | HasMesh) -> "ShardingSpec":
        """Return the spec of a notation: "S01R" shards rows over the axes 0 and 1; see `_notation.py`."""
        return ShardingSpec(tuple(shape), dims_of_notation(notation, mesh_of(mesh)), mesh_of(mesh))

    @staticmethod
    def from_dim_partition_dict(
        partition: Mapping[int, Sequence[int]], shape: Sequence[int], mesh: Mesh | HasMesh
    ) -> "ShardingSpec":
        """Return the cut of a dict from dimensions to positions of axes; others are replicated."""
        dims = dims_of_partition(partition, len(shape), mesh_of(mesh))
        return ShardingSpec(tuple(shape), dims, mesh_of(mesh))

    @staticmethod
    def from_placements(
        placements: "Sequence[Placement]", shape: Sequence[int], mesh: Mesh | HasMesh
    ) -> "ShardingSpec":
        """Return the cut of torch's `Shard` and `Replicate`, one for each axis of the mesh."""
        dims = dims_of_placements(placements, len(shape), mesh_of(mesh))
        return ShardingSpec(tuple(shape), dims, mesh_of(mesh))

    @property
    def notation(self) -> str:
        """The cut as "S01R", by the positions of axes in `mesh.axes`."""
        return notation_of(self.dims, self.mesh)

    @property
    def dim_partition_dict(self) -> dict[int, list[int]]:
        """From each dimension that is cut to the positions of its axes in `mesh.axes`."""
        return partition_of_dims(self.dims, self.mesh)

    def to_placements(self) -> "tuple[Placement, ...]":
        """Return torch's placements, one for each axis of the mesh, of a tensor as it is stored.

        Raises:
            ValueError: `dims` has axes in an order that torch's `Shard` cannot express (S10), or `parts` are
                sharded separately.
        """
        if any(axes and count > 1 for axes, count in zip(self.dims, self.parts_of_dims, strict=True)):
            raise ValueError(f"parts={self.parts} are each cut, which torch's Shard cannot express")
        return placements_of_dims(self.dims, self.mesh)

    @property
    def axes(self) -> tuple[str, ...]:
        """All axes that cut the tensor."""
        return tuple(axis for axes in self.dims for axis in axes)

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The global shape in torch's order."""
        return tuple(self.shape[dim] for dim in self.stored_dims)

    @property
    def is_identity(self) -> bool:
        """Whether every rank stores the global tensor as it is."""
        return not self.axes and self.stored_as is None

    @property
    def parts_of_dims(self) -> tuple[int, ...]:
        """For each dimension the number of its parts."""
        return (1,) * len(self.shape) if self.parts is None else self.parts

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of this rank's slice."""
        num_ranks = (math.prod(self.mesh.axis_size(axis) for axis in axes) for axes in self.dims)
        return tuple(size // ranks for size, ranks in zip(self.shape, num_ranks, strict=True))

    def regions(self, global_rank: int | None = None) -> Iterator[tuple[Stretch, ...]]:
        """Yield the boxes of the global tensor that make up the slice of a rank; default: this one.

        A box has one stretch for each dimension. There is one box, or one for each part.
        """
        position = self.mesh.coordinate(self.mesh.rank if global_rank is None else global_rank)
        yield from itertools.product(*(self._stretches(dim, position) for dim in range(len(self.shape))))

    def cut(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of this rank's slice of the global tensor."""
        if tuple(tensor.shape) != self.shape:
            raise ValueError(f"the global shape is {self.shape}, not {tuple(tensor.shape)}")
        position = self.mesh.coordinate(self.mesh.rank)
        for dim, num_parts in enumerate(self.parts_of_dims):
            first = self._stretches(dim, position)[0]
            by_part = tensor.unflatten(dim, (num_parts, tensor.shape[dim] // num_parts)).narrow(
                dim + 1, first.offset, first.size
            )
            tensor = by_part.flatten(dim, dim + 1)
        return tensor.clone(memory_format=torch.contiguous_format)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the global tensor of which every rank holds a slice; one all-gather per cutting axis."""
        for dim, (axes, num_parts) in enumerate(zip(self.dims, self.parts_of_dims, strict=True)):
            if not axes:
                continue
            by_part = tensor.unflatten(dim, (num_parts, tensor.shape[dim] // num_parts))
            for axis in reversed(axes):
                by_part = all_gather(by_part, dim + 1, self.mesh.axis(axis))
            tensor = by_part.flatten(dim, dim + 1)
        return tensor

    def _stretches(self, dim: int, position: dict[str, int]) -> list[Stretch]:
        """Return the ranges of a rank at a position in the mesh along a dimension."""
        num_parts = self.parts_of_dims[dim]
        size = part_size = self.shape[dim] // num_parts
        offset = 0
        for axis in self.dims[dim]:
            size //= self.mesh.axis_size(axis)
            offset += position[axis] * size
        return [Stretch(part * part_size + offset, part * size, size) for part in range(num_parts)]

    def slice_of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return a copy of this rank's slice, as it is stored, of the global tensor in torch's order."""
        if tuple(whole.shape) != self.whole_shape:
            raise ValueError(f"the global shape is {self.whole_shape}, not {tuple(whole.shape)}")
        return self.cut(whole.permute(self._order))

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the global tensor in torch's order; collective as `gather`. It may be a view."""
        return self.gather(tensor).permute(self.stored_dims)

    @property
    def _order(self) -> tuple[int, ...]:
        """Torch's dimension of each stored one."""
        return tuple(range(len(self.shape))) if self.stored_as is None else self.stored_as

    @property
    def stored_dims(self) -> tuple[int, ...]:
        """The stored dimension of each of torch's: the whole is `stored.permute(stored_dims)`."""
        return tuple(self._order.index(dim) for dim in range(len(self.shape)))


def cut_dims(
    shape: Sequence[int],
    dims: Sequence[Sequence[str]],
    mesh: Mesh,
    *,
    stored_as: tuple[int, ...] | None = None,
    parts: tuple[int, ...] | None = None,
) -> ShardingSpec:
    """Return a spec in which axes of one rank are left out: they cut nothing."""
    kept = tuple(tuple(axis for axis in axes if mesh.axis_size(axis) > 1) for axes in dims)
    return ShardingSpec(tuple(shape), kept, mesh, stored_as, parts)


def set_spec(tensor: torch.Tensor, spec: ShardingSpec) -> None:
    """Set the spec of a tensor."""
    if tuple(tensor.shape) != spec.local_shape:
        raise ValueError(f"a slice of shape {tuple(tensor.shape)} where the spec has {spec.local_shape}")
    setattr(tensor, SHARDING_SPEC, spec)


def spec_of(tensor: torch.Tensor) -> ShardingSpec | None:
    """Return the spec of a tensor, None for a replicated tensor."""
    return getattr(tensor, SHARDING_SPEC, None)


Groups = tuple[dist.ProcessGroup, ...]


def by_sharding_groups(tensors: Iterable[torch.Tensor]) -> dict[Groups, list[torch.Tensor]]:
    """Return tensors by the process groups over which they are cut; none for replicated ones.

    A DTensor that carries a spec is cut by both: a tensor-parallel slice that FSDP has cut further. So is a
    fragment of a tensor that carries one. Caches of rows are cut over the ranks that divide their tables.
    """
    found: dict[Groups, list[torch.Tensor]] = {}
    groups_of: dict[
        tuple[Mesh, tuple[str, ...]], Groups
    ] = {}  # models have thousands of tensors and few specs
    for tensor in tensors:
        whole: Any = tensor
        cut_again: Groups = ()
        while (fragment := fragment_of(whole)) is not None:
            whole, group = fragment
            cut_again = (group, *cut_again)
        spec = getattr(whole, SHARDING_SPEC, None)
        groups: Groups = ()
        if spec is not None:
            key = (spec.mesh, spec.axes)
            if key not in groups_of:
                groups_of[key] = tuple(spec.mesh.group(axis) for axis in spec.axes)
            groups = groups_of[key]
        if _is_dtensor(whole):
            mesh, placements = whole.device_mesh, whole.placements
            cut = (dim for dim, placement in enumerate(placements) if placement.is_shard())
            groups = (*groups, *(mesh.get_group(dim) for dim in cut))
        if (cache := getattr(whole, ROW_CACHE, None)) is not None and cache.axis is not None:
            groups = (cache.axis.group,) if cache.axis.size > 1 else ()
        found.setdefault((*groups, *cut_again), []).append(tensor)
    return found


def sharding_groups(tensor: torch.Tensor) -> Groups:
    """Return the process groups over which a tensor is cut; see `by_sharding_groups`."""
    [groups] = by_sharding_groups([tensor])
    return groups


def set_fragment(tensor: torch.Tensor, whole: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Mark a tensor as a fragment, of any length, of another tensor over a process group."""
    setattr(tensor, FRAGMENT_OF, (whole, group))


def fragment_of(tensor: torch.Tensor) -> tuple[torch.Tensor, dist.ProcessGroup] | None:
    """Return the full tensor and the group of a fragment; None for a tensor that is not a fragment."""
    return getattr(tensor, FRAGMENT_OF, None)


def _dtensor_class() -> "type[DTensor] | None":
    """Return the class of torch; None while nothing has imported its module (0.3 s): there are none then."""
    module = sys.modules.get("torch.distributed.tensor")
    return None if module is None else module.DTensor


def _is_dtensor(tensor: torch.Tensor) -> TypeGuard["DTensor"]:
    """Return whether a tensor is a DTensor."""
    dtensor = _dtensor_class()
    return dtensor is not None and isinstance(tensor, dtensor)


def local_slice(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local part of a DTensor; other tensors unchanged."""
    if _is_dtensor(tensor):
        return tensor.to_local()
    return tensor


def local_grads(params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return this rank's slices of the gradients of `params`, those without a gradient left out."""
    grads = [param.grad for param in params if param.grad is not None]
    dtensor = _dtensor_class()
    return [grad.to_local() if isinstance(grad, dtensor) else grad for grad in grads] if dtensor else grads


@dataclass(frozen=True)
class GradientSync:
    """Reduction from the gradients of local backwards to the gradient of the mean loss of the global batch.

    Attributes:
        axis: Axis of the ranks that hold the same slice; their gradients are summed.
        divisor: Number of parts of the batch, by which the sum is divided.
    """

    axis: Axis
    divisor: int


def gradient_sync(tensor: torch.Tensor, replicas: Axis) -> GradientSync:
    """Return over which ranks the gradient of a tensor is summed, and by how much it is divided.

    See [Note: ranks of a gradient]. The ranks are also those that start with the same values.

    Args:
        tensor: A parameter, or a buffer.
        replicas: The ranks that see different parts of the batch: an axis, or several, of a mesh.
    """
    if getattr(tensor, ROW_CACHE, None) is not None:  # complete after the backward
        return GradientSync(replicas.mesh.axis(()), 1)
    spec = spec_of(tensor)
    if spec is None or not spec.axes:
        return GradientSync(replicas, replicas.size)
    mesh = replicas.mesh
    # In a grid the first and the last rank of a group differ along every axis that it runs along.
    first, last = mesh.coordinate(replicas.ranks[0]), mesh.coordinate(replicas.ranks[-1])
    along = tuple(axis for axis in mesh.axes if first[axis] != last[axis])
    kept = tuple(axis for axis in along if axis not in spec.axes)
    return GradientSync(replicas if kept == along else mesh.axis(kept), replicas.size)
