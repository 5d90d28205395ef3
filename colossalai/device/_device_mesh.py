"""Device mesh: a grid of ranks with numbered axes and the costs of communication along each of them.

It is a view of a `colossalai.context.Mesh`, which has the ranks and their process groups, and adds costs:
assumed ones from the latency and bandwidth of the links along each axis, or measured ones. Shapes and costs
need no job, so that a program on one computer can plan for many.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from colossalai.cluster import broadcast_value
from colossalai.context import Mesh
from colossalai.device._profile import machine_of_job, measure_speed
from colossalai.device._search import Operation, ShapeChoice, search_shape
from colossalai.device._speed import Machine, MeshSpeed
from colossalai.device._speed_file import from_json, to_json


class DeviceMesh:
    """A logical grid over physical devices, one for each rank.

    Args:
        physical_mesh_id: The global ranks, each once, in a tensor of any shape.
        mesh_shape: The extents of the logical grid, outermost first, filled row by row. Default: those of
            `logical_mesh_id`, otherwise of `physical_mesh_id`.
        logical_mesh_id: The global ranks at their places in the logical grid. Default: by `mesh_shape`.
        mesh_alpha: For each axis, the latency of a message between neighbors along it in seconds. Default: 1
            for every axis. Costs are then only meaningful relative to each other.
        mesh_beta: For each axis, the seconds per byte. Default: 1, as for `mesh_alpha`.
        init_process_group: Whether to create the process groups now: along each axis, and of all ranks; every
            rank of the job has to call it then. Otherwise they are created on first use.

    Attributes:
        mesh: The grid, with axes "0", "1", ... If a job already has groups of the same ranks, reuse them by
            `device_mesh.mesh.take_groups_of(mesh)`.
        speed: Costs of operations along the axes.
        physical_mesh_id: The given global ranks.
        logical_mesh_id: The global ranks in the logical grid.
        mesh_alpha: The given value, or its default.
        mesh_beta: The given value, or its default.

    Raises:
        ValueError: `physical_mesh_id` does not have each rank once, `mesh_shape` or `logical_mesh_id` does
            not fit these ranks, `mesh_alpha` or `mesh_beta` does not have one number of 0 or more for each
            axis, or groups are to be created without a job of as many ranks.
    """

    def __init__(
        self,
        physical_mesh_id: torch.Tensor,
        mesh_shape: Sequence[int] | None = None,
        logical_mesh_id: torch.Tensor | None = None,
        mesh_alpha: Sequence[float] | None = None,
        mesh_beta: Sequence[float] | None = None,
        init_process_group: bool = False,
    ) -> None:
        self.physical_mesh_id = physical_mesh_id
        self.logical_mesh_id = _logical(physical_mesh_id, mesh_shape, logical_mesh_id)
        self.shape = tuple(self.logical_mesh_id.shape)
        self.num_devices = self.logical_mesh_id.numel()
        self.mesh_alpha = _coefficients("mesh_alpha", mesh_alpha, self.shape)
        self.mesh_beta = _coefficients("mesh_beta", mesh_beta, self.shape)
        self.mesh = Mesh(
            {str(number): extent for number, extent in enumerate(self.shape)},
            rank=dist.get_rank() if self._is_of_job() else 0,
            device_type=_device_type(),
            order=self.logical_mesh_id.flatten().tolist(),
        )
        self.speed = MeshSpeed.of_links(self.shape, self.mesh_alpha, self.mesh_beta)
        if init_process_group:
            self._check_job("init_process_group=True")
            for axes in (*self.mesh.axes, tuple(self.mesh.axes)):
                if self.mesh.axis_size(axes) > 1:
                    self.mesh.group(axes)

    def __repr__(self) -> str:
        known = "assumed" if self.speed.machine is None else "measured"
        return f"DeviceMesh(shape={self.shape}, {known} costs)"

    def flatten(self) -> "DeviceMesh":
        """Return the mesh with all its ranks along one axis, with the same groups and costs."""
        flat = DeviceMesh(
            self.physical_mesh_id,
            logical_mesh_id=self.logical_mesh_id.flatten(),
            mesh_alpha=[max(self.mesh_alpha)],
            mesh_beta=[max(self.mesh_beta)],
        )
        flat.mesh.take_groups_of(self.mesh)
        flat.speed = self.speed.of_shape(flat.shape)
        return flat

    def all_gather_cost(self, num_bytes: float, mesh_dim: int) -> float:
        """Return the seconds of an all-gather along an axis.

        From the links: (p - 1) alpha + (p - 1) / p beta n for p ranks; see [Note: cost of a ring]. After a
        measurement: alpha + beta n of this operation along this axis. The same holds for other operations.

        Args:
            num_bytes: Bytes of the result, n.
            mesh_dim: The number of the axis; negative ones count from the last.

        Raises:
            ValueError: `num_bytes` is negative, or the mesh has no axis `mesh_dim`.
        """
        return self.speed.cost("all_gather", num_bytes, self._axis(mesh_dim))

    def reduce_scatter_cost(self, num_bytes: float, mesh_dim: int) -> float:
        """Return the seconds of a reduce-scatter: (p - 1) alpha + (p - 1) / p beta n from the links.

        Args:
            num_bytes: Bytes of each rank's operand, n.
            mesh_dim: The number of the axis.

        Raises:
            ValueError: `num_bytes` is negative, or the mesh has no axis `mesh_dim`.
        """
        return self.speed.cost("reduce_scatter", num_bytes, self._axis(mesh_dim))

    def all_reduce_cost(self, num_bytes: float, mesh_dim: int) -> float:
        """Return the seconds of an all-reduce: 2 (p - 1) alpha + 2 (p - 1) / p beta n from the links.

        Args:
            num_bytes: Bytes of each rank's operand, n.
            mesh_dim: The number of the axis.

        Raises:
            ValueError: `num_bytes` is negative, or the mesh has no axis `mesh_dim`.
        """
        return self.speed.cost("all_reduce", num_bytes, self._axis(mesh_dim))

    def all_to_all_cost(self, num_bytes: float, mesh_dim: int) -> float:
        """Return the seconds of an all-to-all: (p - 1) alpha + (p - 1) / p beta n from the links.

        Args:
            num_bytes: Bytes of each rank's operand, n, including its own part.
            mesh_dim: The number of the axis.

        Raises:
            ValueError: `num_bytes` is negative, or the mesh has no axis `mesh_dim`.
        """
        return self.speed.cost("all_to_all", num_bytes, self._axis(mesh_dim))

    def profile(self, *, show_progress: bool = True) -> MeshSpeed:
        """Measure all operations along each axis and each run of adjacent axes; collective over the job.

        Later costs are the measured ones, the same on all ranks. This takes some seconds, during which the
        ranks should be idle otherwise.

        Args:
            show_progress: Whether to draw a bar, if rank 0 has a terminal.

        Raises:
            ValueError: `num_devices` is not the number of ranks of a running job, or it is 1.
        """
        self._check_job("profile()")
        if self.num_devices == 1:
            raise ValueError("profile() of a mesh of one rank: communication needs two ranks or more")
        self.speed = measure_speed(self.mesh, show_progress=show_progress)
        return self.speed

    def save(self, path: str | Path) -> None:
        """Write the measured costs and their machine as JSON; in a job rank 0 writes.

        Raises:
            ValueError: The costs are assumed, not measured.
        """
        text = self.to_json()
        if not self._is_of_job() or dist.get_rank() == 0:
            Path(path).write_text(text)

    def to_json(self) -> str:
        """Return the text that `save` writes.

        Raises:
            ValueError: The costs are assumed, not measured.
        """
        if self.speed.machine is None:
            raise ValueError("the costs of this mesh are assumed: measure them with profile() first")
        return to_json(self.speed, self.mesh.order)

    def load(self, path: str | Path, *, allow_other_machine: bool = False) -> MeshSpeed:
        """Read measured costs, of this shape or of another one over the same ranks.

        In a job rank 0 reads, every rank has to call it, and hosts, cores, device, backend and torch's
        version must match the file. Without a job, hosts, cores and torch's version must be this computer's.

        Args:
            path: File of `save`.
            allow_other_machine: Whether to accept the figures of another machine, to plan for it here.

        Raises:
            ValueError: `path` cannot be read or is not a file of `save`, has other ranks or another order, or
                was measured on another machine; the message has the differences.
        """
        is_of_job = self._is_of_job()
        told = ("", "")
        if not is_of_job or dist.get_rank() == 0:
            try:
                told = ("text", Path(path).read_text())
            except (OSError, UnicodeDecodeError) as error:  # the other ranks wait in the broadcast below
                told = ("error", str(error))
        kind, text = broadcast_value(told, source=0) if is_of_job else told
        if kind == "error":
            raise ValueError(f"{path} cannot be read: {text}")
        speed, order = from_json(text, name=str(path))
        if order != self.mesh.order:
            raise ValueError(
                f"{path} is of the ranks {list(order)} in this order, the mesh of {list(self.mesh.order)}"
            )
        assert speed.machine is not None, "it is part of the file"
        if not allow_other_machine:
            self._check_machine(path, speed.machine, is_of_job)
        self.speed = speed.of_shape(self.shape)
        return self.speed

    def search_shape(self, operations: Sequence[Operation]) -> ShapeChoice:
        """Return the logical shape of these ranks over which a list of operations takes least time.

        Args:
            operations: Tuples (operation, bytes, role). The operation is one of `OPERATIONS`. The role is any
                name; the shape has one axis for each role, in the cheapest order. Bytes are a number, or a
                function of {role: number of ranks}; `math.inf` forbids a shape:

                    [("all_reduce", 2e7, "tp"), ("all_reduce", lambda ranks: 4e8 / ranks["tp"], "dp")]

        Returns:
            The shape, the role of each of its axes, and the predicted time.

        Raises:
            ValueError: `operations` is empty, has an unknown operation or negative bytes, or forbids all
                shapes.
        """
        return search_shape(self.speed, operations)

    def _axis(self, mesh_dim: int) -> str:
        if not -len(self.shape) <= mesh_dim < len(self.shape):
            raise ValueError(f"mesh_dim={mesh_dim} of a mesh of shape {self.shape}")
        return str(mesh_dim % len(self.shape))

    def _is_of_job(self) -> bool:
        """Whether a job with the ranks of the mesh is running."""
        return dist.is_initialized() and dist.get_world_size() == self.num_devices

    def _check_job(self, what: str) -> None:
        if not self._is_of_job():
            there = f"a job of {dist.get_world_size()}" if dist.is_initialized() else "no job"
            raise ValueError(
                f"{what} of a mesh of {self.num_devices} ranks needs a job of as many, and there is {there}: "
                "call colossalai.launch_from_torch in a script that `colossalai run` starts"
            )

    def _check_machine(self, path: str | Path, machine: Machine, is_of_job: bool) -> None:
        if is_of_job:
            differences = machine.differences(machine_of_job(self.mesh.device_type))
        else:
            here = machine_of_job("cpu")
            num_ranks = len(machine.hosts)
            same = Machine(
                here.hosts * num_ranks, here.cores * num_ranks, machine.device, machine.backend, here.torch
            )
            differences = machine.differences(same)
        if differences:
            raise ValueError(
                f"{path} was measured on another machine ({'; '.join(differences)}): call profile() "
                "here, or, to plan for that machine, load(path, allow_other_machine=True)"
            )


def _logical(
    physical: torch.Tensor, shape: Sequence[int] | None, logical: torch.Tensor | None
) -> torch.Tensor:
    """Return the logical grid of ranks, in host memory."""
    ranks = physical.flatten().tolist()
    if sorted(ranks) != list(range(len(ranks))) or not ranks:
        raise ValueError(f"physical_mesh_id has the ranks {ranks}: name each of 0, 1, 2, ... once")
    if logical is None:
        extents = tuple(physical.shape if shape is None else shape)
        if math.prod(extents) != len(ranks) or min(extents, default=1) < 1 or not extents:
            raise ValueError(f"mesh_shape={extents} is not a shape of {len(ranks)} ranks")
        return physical.cpu().reshape(extents)
    if shape is not None and tuple(shape) != tuple(logical.shape):
        raise ValueError(
            f"mesh_shape={tuple(shape)}, and logical_mesh_id has the shape {tuple(logical.shape)}"
        )
    if sorted(logical.flatten().tolist()) != list(range(len(ranks))) or logical.dim() == 0:
        raise ValueError(
            f"logical_mesh_id has the ranks {logical.flatten().tolist()}: name each rank of "
            "physical_mesh_id once"
        )
    return logical.cpu()


def _coefficients(name: str, given: Sequence[float] | None, shape: Sequence[int]) -> tuple[float, ...]:
    """Return one number for each axis."""
    found = (1.0,) * len(shape) if given is None else tuple(map(float, given))
    if len(found) != len(shape) or not all(math.isfinite(each) and each >= 0 for each in found):
        raise ValueError(
            f"{name}={list(found)} of a mesh of shape {tuple(shape)}: give a finite number of 0 or more for "
            "each axis"
        )
    return found


def _device_type() -> str:
    """Return the type of devices that the job's backend communicates."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and dist.is_initialized():
        library = dist.get_default_backend_for_device(accelerator.type)
        if library in dist.get_backend_config():
            return accelerator.type
    return "cpu"
