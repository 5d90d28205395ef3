"""How a tensor is cut over a mesh: for each dimension the ordered axes that cut it, replicated over the rest.

Every parameter that a parallel layer cuts carries its spec. What holds for the whole (a norm, a checkpoint of
it) is derived from that.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from colossalai.communication import all_gather
from colossalai.context import Mesh

_ATTRIBUTE = "sharding_spec"


@dataclass(frozen=True)
class ShardingSpec:
    """A cut of a global tensor over a mesh.

    A layer may store a tensor in another order of dimensions than torch does (a linear weight as (in, out)).
    `shape`, `dims`, `cut` and `gather` are in the order that is stored. `whole_shape`, `slice_of` and `whole`
    are in torch's, which is the same under every layout: what is exchanged between layouts is in that one.

    Attributes:
        shape: The global shape, as it is stored.
        dims: For each dimension, the mesh axes that cut it, the coarsest cut first.
        mesh: The mesh.
        stored_as: For each stored dimension, which of torch's it is: stored is `whole.permute(stored_as)`.
            None: the order is torch's.
    """

    shape: tuple[int, ...]
    dims: tuple[tuple[str, ...], ...]
    mesh: Mesh = field(repr=False)
    stored_as: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if len(self.dims) != len(self.shape):
            raise ValueError(f"a spec of {len(self.dims)} dimensions for a tensor of shape {self.shape}")
        if len(set(self.axes)) != len(self.axes):
            raise ValueError(f"an axis cuts twice in {self.dims}")
        if sorted(self._order) != list(range(len(self.shape))):
            raise ValueError(
                f"stored_as={self.stored_as} does not name each of {len(self.shape)} dimensions once"
            )
        for dim, axes in enumerate(self.dims):
            parts = math.prod(self.mesh.axis_size(axis) for axis in axes)
            if self.shape[dim] % parts:
                raise ValueError(
                    f"dimension {dim} of shape {self.shape} is {self.shape[dim]}, which the {parts} ranks "
                    f"along {' x '.join(axes)} do not divide"
                )

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
    def local_shape(self) -> tuple[int, ...]:
        """The shape of this rank's slice."""
        return tuple(size for _, size in self.box())

    def box(self, global_rank: int | None = None) -> tuple[tuple[int, int], ...]:
        """Return (offset, size) in every dimension of the slice of a rank; default: this one."""
        position = self.mesh.coordinate(self.mesh.rank if global_rank is None else global_rank)
        box = []
        for size, axes in zip(self.shape, self.dims, strict=True):
            offset = 0
            for axis in axes:
                size //= self.mesh.axis_size(axis)
                offset += position[axis] * size
            box.append((offset, size))
        return tuple(box)

    def cut(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of this rank's slice of the global tensor."""
        if tuple(tensor.shape) != self.shape:
            raise ValueError(f"the global shape is {self.shape}, not {tuple(tensor.shape)}")
        for dim, (offset, size) in enumerate(self.box()):
            tensor = tensor.narrow(dim, offset, size)
        return tensor.clone(memory_format=torch.contiguous_format)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the global tensor of which every rank holds a slice; one all-gather per cutting axis."""
        for dim, axes in enumerate(self.dims):
            for axis in reversed(axes):
                tensor = all_gather(tensor, dim, self.mesh.axis(axis))
        return tensor

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
) -> ShardingSpec:
    """Return a spec in which axes of one rank are left out: they cut nothing."""
    kept = tuple(tuple(axis for axis in axes if mesh.axis_size(axis) > 1) for axes in dims)
    return ShardingSpec(tuple(shape), kept, mesh, stored_as)


def set_spec(tensor: torch.Tensor, spec: ShardingSpec) -> None:
    """Let a tensor carry its spec."""
    if tuple(tensor.shape) != spec.local_shape:
        raise ValueError(f"a slice of shape {tuple(tensor.shape)} where the spec says {spec.local_shape}")
    setattr(tensor, _ATTRIBUTE, spec)


def spec_of(tensor: torch.Tensor) -> ShardingSpec | None:
    """Return the spec that a tensor carries, None for a replicated one."""
    return getattr(tensor, _ATTRIBUTE, None)
