"""Mesh: the ranks of a job as one named n-D grid, which owns every process group.

A group is made at its first use, by its members alone, so that a group which only some ranks use costs the
others nothing and cannot make them wait.

[Note: names of groups]
Members meet in the store under the name of the group. torch derives the name from the members and from the
number of groups that the process has made so far. If some ranks have made one more (for example the two ends
of a pipeline, for a shared embedding), they and the others would wait for each other under different names
forever. So the name here has only the members and the number of groups of these members that a rank has made
in this job, which is equal on all members. Destroyed groups count, too. Otherwise a rank could read the
entries of an old group in the store (addresses, names of memory) as those of its peers.

[Note: readiness of a group]
gloo returns on a rank as soon as the rank's own connections are made. If that rank then ends, because its
script is done, it closes connections for which another one still waits: "Connection closed by peer". So a
group of CPUs is returned when all members have it. They meet in the store: a collective would shift the count
of the user's collectives. NCCL connects at the first use, which all members join.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from colossalai.monitor import section


def make_group(
    ranks: Sequence[int], *, purpose: str, backend: str | None = None, keeps_order: bool = False
) -> dist.ProcessGroup:
    """Make the process group of some ranks; collective over its members alone.

    Args:
        ranks: The members, by global rank. Another order is another group.
        purpose: Part of the name, to distinguish groups of the same members.
        backend: The communication library. Default: the job's.
        keeps_order: Whether the group has the members in this order; torch sorts them otherwise.

    Raises:
        ValueError: `keeps_order`, and this torch sorts the members of every group.
    """
    name = f"{purpose}:{'-'.join(map(str, ranks))}"
    options: dict[str, Any] = {}
    if keeps_order:
        if "sort_ranks" not in inspect.signature(dist.new_group).parameters:
            raise ValueError(
                f"a process group of the ranks {list(ranks)}: torch {torch.__version__} sorts the members of "
                "groups; number the ranks of the mesh row by row, or take a newer torch"
            )
        options = {"sort_ranks": False}
    with section(f"making the process group {name}"), _name_for_groups(name):
        group = dist.new_group(list(ranks), backend=backend, use_local_synchronization=True, **options)
        assert isinstance(group, dist.ProcessGroup), f"this rank is not one of {list(ranks)}"
        # The members wait for each other in the store; see [Note: readiness of a group].
        if torch.device("cpu") in group._device_types and dist.get_backend(group) != "fake":
            _meet(f"met in {group.group_name}", len(ranks))
    return group


def _meet(place: str, num_ranks: int) -> None:
    """Return when `num_ranks` ranks have called this for a place; a place can be used again."""
    store = distributed_c10d._get_default_store()
    meeting, number = divmod(store.add(place, 1) - 1, num_ranks)
    if number == num_ranks - 1:
        store.set(f"{place}, meeting {meeting}", "")
    store.wait([f"{place}, meeting {meeting}"])


def _number_made(name: str) -> int:
    """Return the number of groups of a name that this rank has made in the job, and count one more."""
    if dist.get_backend() != "fake":  # the store belongs to the job, and a new launch has a new one
        return distributed_c10d._get_default_store().add(f"{name}: made by rank {dist.get_rank()}", 1) - 1
    taken = set(distributed_c10d._world.pg_names.values())
    return next(number for number in range(len(taken) + 1) if f"{name}#{number}" not in taken)


@contextmanager
def _name_for_groups(name: str) -> Iterator[None]:
    """Make torch use a name for the group that the block makes; see [Note: names of groups]."""
    original = getattr(distributed_c10d, "_process_group_name", None)
    if original is None:  # a torch version with another naming of groups
        yield
        return
    number = _number_made(name)
    distributed_c10d._process_group_name = lambda *_args, **_kwargs: distributed_c10d.GroupName(
        f"{name}#{number}"
    )
    try:
        yield
    finally:
        distributed_c10d._process_group_name = original


Axes = str | Sequence[str]
T = TypeVar("T")


@dataclass(frozen=True)
class Axis:
    """One or several axes of a mesh taken together, as seen from this rank, with their process group.

    Attributes:
        name: Name in messages and in the ledger.
        ranks: The global ranks along it, this one among them.
        mesh: The mesh that makes the group.
    """

    name: str
    ranks: tuple[int, ...]
    mesh: "Mesh" = field(repr=False)

    @cached_property
    def size(self) -> int:
        """Number of ranks along it."""
        return len(self.ranks)

    @cached_property
    def rank(self) -> int:
        """Position of this rank along it."""
        return self.ranks.index(self.mesh.rank)

    @cached_property
    def group(self) -> dist.ProcessGroup:
        """The process group, made at the first access and kept until `Mesh.forget_groups`."""
        return self.mesh.bind_group(self)

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields without the group, which cannot be copied; it is looked up again when needed."""
        return {"name": self.name, "ranks": self.ranks, "mesh": self.mesh}


class Mesh:
    """A grid of ranks with named axes, outermost axis first.

    Args:
        axes: Axis names and extents, outermost first; the product is the world size. Neighbours along the
            last axis have adjacent ranks.
        rank: The global rank of this process.
        device_type: Type of the devices that hold the tensors ("cpu", "cuda", ...).
        views: Names for several adjacent axes taken as one, for example `{"dp": ("edp", "ep")}`.
        order: The global ranks by their place in the grid, row by row; None: a rank is its place.

    Raises:
        ValueError: `order` does not name each rank of the grid once.
    """

    def __init__(
        self,
        axes: Mapping[str, int],
        *,
        rank: int,
        device_type: str = "cpu",
        views: Mapping[str, tuple[str, ...]] | None = None,
        order: Sequence[int] | None = None,
    ) -> None:
        self.axes = dict(axes)
        self.rank = rank
        self.world_size = math.prod(axes.values())
        self.order = tuple(range(self.world_size)) if order is None else tuple(order)
        if sorted(self.order) != list(range(self.world_size)):
            raise ValueError(
                f"order={list(self.order)} of a mesh of {self.world_size} ranks: name each of the ranks "
                f"0 to {self.world_size - 1} once"
            )
        self.device_type = device_type
        self._views = dict(views or {})
        self._axes: dict[tuple[str, ...], Axis] = {}
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._bound = WeakValueDictionary[int, Axis]()  # axes that keep one of the groups, by id
        self._device_meshes: dict[tuple[str, ...], DeviceMesh] = {}
        self._derived: dict[Callable[..., Any], Any] = {}

    def __repr__(self) -> str:
        # If the other axes of a view have one rank, the view is named instead: edp=2, ep=1 is dp=2.
        names = {
            parts[0]: view
            for view, parts in self._views.items()
            if self.axes[parts[0]] == self.axis_size(view)
        }
        extents = ", ".join(f"{names.get(axis, axis)}={size}" for axis, size in self.axes.items() if size > 1)
        return f"Mesh({extents or 'one rank'}; rank {self.rank} of {self.world_size})"

    def __deepcopy__(self, memo: dict[int, Any]) -> "Mesh":
        """Return the mesh itself: a copy is on the same ranks, and process groups cannot be copied."""
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a saved model's mesh, without groups, which are made anew when needed."""
        empty: dict[str, Any] = {"_axes": {}, "_groups": {}, "_device_meshes": {}, "_derived": {}}
        return {name: value for name, value in (self.__dict__ | empty).items() if name != "_bound"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the state from `__getstate__`."""
        self.__dict__.update(state, _bound=WeakValueDictionary())

    def axis(self, axes: Axes) -> Axis:
        """Return `axes` taken together as one axis to communicate along."""
        names = (axes,) if isinstance(axes, str) else tuple(axes)
        if names not in self._axes:
            self._axes[names] = Axis("*".join(names), tuple(self.ranks(names)), self)
        return self._axes[names]

    def name_of(self, ranks: Sequence[int]) -> str | None:
        """Return the name of the axis, or of the axes taken together, along some ranks; None without one."""
        seen = {part for parts in self._views.values() for part in parts}
        plain = [*self._views, *(name for name in self.axes if name not in seen)]  # outermost first
        runs = [
            tuple(plain[begin : begin + count])
            for count in range(1, len(plain) + 1)
            for begin in range(len(plain))
        ]
        wanted = sorted(ranks)
        for names in [*runs, *((name,) for name in self.axes), *self._axes]:
            if len(wanted) > 1 and sorted(self.ranks(names)) == wanted:
                return "*".join(name for name in names if self.axis_size(name) > 1)
        return None

    def axis_size(self, axes: Axes) -> int:
        """Return the number of ranks along `axes` taken together."""
        return math.prod(self.axes[axis] for axis in self._resolve(axes))

    def axis_rank(self, axes: Axes) -> int:
        """Return this rank's position along `axes` taken together (row-major, outermost first)."""
        position = 0
        for axis in self._resolve(axes):
            position = position * self.axes[axis] + self.coordinate(self.rank)[axis]
        return position

    def axis_rank_in_order(self, axes: Sequence[str]) -> int:
        """Return this rank's position along `axes` in the given order, the first one varying slowest."""
        position = 0
        for axis in axes:
            position = position * self.axis_size(axis) + self.axis_rank(axis)
        return position

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The axes of the ranks that hold the same parameters and compute different parts of a batch.

        Parts are samples (`dp`), positions of sequences (`sp`), or activations of axial layers (`dap`).
        """
        return ("dp", *(axis for axis in ("sp", "dap") if self.axes.get(axis, 1) > 1))

    @property
    def replica_axes(self) -> tuple[str, ...]:
        """The axes of the ranks that compute one replica of the model together: all but those in `dp`."""
        of_data = self._resolve("dp")
        return tuple(axis for axis in self.axes if axis not in of_data)

    @property
    def observer_axes(self) -> tuple[str, ...]:
        """The axes of the ranks that together have the losses and outputs of the whole batch.

        The replicas and, in a pipeline, its stages: all stages have the loss, the last one the output.
        """
        return (*self.batch_axes, "pp") if self.axes.get("pp", 1) > 1 else self.batch_axes

    def coordinate(self, global_rank: int) -> dict[str, int]:
        """Return the position of a rank along every axis."""
        place = self.order.index(global_rank)
        position = {}
        for axis, size in reversed(self.axes.items()):
            place, position[axis] = divmod(place, size)
        return position

    def ranks(self, axes: Axes) -> list[int]:
        """Return the global ranks of this rank's group along `axes`, in the order of the grid."""
        wanted = self._resolve(axes)
        here = self.coordinate(self.rank)
        first = sum(here[axis] * stride for axis, stride in self._strides.items() if axis not in wanted)
        return self._ranks_from(first, wanted)

    def all_ranks(self, axes: Axes) -> list[list[int]]:
        """Return all groups along `axes`, each as returned by `ranks`, in the order of the grid."""
        wanted = self._resolve(axes)
        fixed = [axis for axis in self.axes if axis not in wanted]
        return [self._ranks_from(first, wanted) for first in self._places_along(fixed)]

    @property
    def _strides(self) -> dict[str, int]:
        """For each axis, the distance of its neighbours in the order of the grid."""
        strides, stride = {}, 1
        for axis, size in reversed(self.axes.items()):
            strides[axis] = stride
            stride *= size
        return strides

    def _places_along(self, axes: Sequence[str]) -> list[int]:
        """Return the places of the grid along some axes, from the first place, in the order of the grid.

        It uses no tensors: a trace of a layer that communicates would record operations on them.
        """
        strides = self._strides
        places = [0]
        for axis in axes:
            steps = range(0, self.axes[axis] * strides[axis], strides[axis])
            places = [place + step for place in places for step in steps]
        return places

    def _ranks_from(self, first: int, axes: Sequence[str]) -> list[int]:
        return [self.order[first + place] for place in self._places_along(axes)]

    def group(self, axes: Axes) -> dist.ProcessGroup:
        """Return the process group of this rank along `axes`; collective at the first call."""
        return self.group_of(self.ranks(axes))

    def group_of(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        """Return the process group of the given global ranks, which include this rank."""
        own_order = self.order != tuple(range(self.world_size)) and list(ranks) != sorted(ranks)
        # Pipelines have two groups of the same members, in two orders, which torch sorts alike.
        key = (-1, *ranks) if own_order else tuple(ranks)
        if key not in self._groups:
            self._groups[key] = self._make_group(tuple(ranks), keeps_order=own_order)
        return self._groups[key]

    def bind_group(self, axis: Axis) -> dist.ProcessGroup:
        """Return the process group of an axis, which caches it until `forget_groups`."""
        self._bound[id(axis)] = axis
        return self.group_of(axis.ranks)

    def adopt_group(self, ranks: Sequence[int], group: dist.ProcessGroup) -> None:
        """Keep a group that the user has made of some ranks, unless there is one already."""
        self._groups.setdefault(tuple(ranks), group)

    def take_groups_of(self, other: "Mesh") -> None:
        """Use the groups of another mesh over the same ranks."""
        self._unbind()
        self._groups, self._bound = other._groups, other._bound

    def forget_groups(self) -> None:
        """Drop all groups: layers hold a mesh beyond the job, and no group may outlive the job.

        A gloo group that is alive when the process ends can abort it, by its own running thread.
        """
        self._groups.clear()
        self._unbind()
        self._device_meshes.clear()

    def _unbind(self) -> None:
        for axis in self._bound.values():
            axis.__dict__.pop("group", None)
        self._bound.clear()

    def derived(self, make: "Callable[[Mesh], T]") -> T:
        """Return `make(mesh)`, made at the first call and cached in the mesh.

        For values that depend on the grid alone and are slow to compute, such as conversion plans.

        Args:
            make: A class or a function of a module; also the key of the cache.
        """
        if make not in self._derived:
            self._derived[make] = make(self)
        found: T = self._derived[make]
        return found

    def device_mesh(self, axes: Axes) -> DeviceMesh:
        """Return torch's `DeviceMesh` over `axes`, on the same groups as `group`."""
        names = (axes,) if isinstance(axes, str) else tuple(axes)
        if names not in self._device_meshes:
            groups = [self.group(name) for name in names]
            if len(names) == 1:
                made = DeviceMesh.from_group(groups[0], self.device_type, mesh_dim_names=names)
            else:
                grid = torch.tensor(self.ranks(names)).reshape(tuple(self.axis_size(name) for name in names))
                made = DeviceMesh.from_group(groups, self.device_type, mesh=grid, mesh_dim_names=names)
            self._device_meshes[names] = made
        return self._device_meshes[names]

    def _resolve(self, axes: Axes) -> tuple[str, ...]:
        """Return the plain axes of an axis, a view or a sequence of them, in the order of the grid."""
        names = (axes,) if isinstance(axes, str) else tuple(axes)
        plain = {part for name in names for part in self._views.get(name, (name,))}
        unknown = plain - set(self.axes)
        if unknown:
            raise ValueError(f"no mesh axis {sorted(unknown)}; this mesh has {[*self.axes, *self._views]}")
        return tuple(axis for axis in self.axes if axis in plain)

    def _make_group(self, ranks: tuple[int, ...], *, keeps_order: bool) -> dist.ProcessGroup:
        if ranks == tuple(range(self.world_size)):
            world = dist.group.WORLD
            assert world is not None, "the default process group exists as long as the mesh"
            return world
        purpose = "mesh in its order" if keeps_order else "mesh"
        return make_group(ranks, purpose=purpose, keeps_order=keeps_order)
