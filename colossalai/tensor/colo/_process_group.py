"""Process groups of a ColoTensor: ranks in a grid, data-parallel outside and tensor-parallel inside."""

from collections.abc import Sequence

import torch.distributed as dist

from colossalai.context import Axis, Layout, Mesh, global_context

DATA_AXIS, TENSOR_AXIS = "dp", "tp"


class ProcessGroup:
    """The ranks of a job as a grid `dp_degree` x `tp_degree`; tensor-parallel neighbours are adjacent ranks.

    It is a view of the job's mesh, whose groups are created on first use. If the job has the same degrees, it
    uses the job's mesh itself. Two process groups of the same degrees are equal.

    Args:
        rank: Global rank of this process. Default: the rank of the launch; other ranks are refused.
        ranks: Ranks of the group. Default: all ranks of the job; other lists are refused.
        tp_degree: Number of ranks that share a tensor. Default: world size / `dp_degree`, or 1.
        dp_degree: Number of replicas. Default: world size / `tp_degree`.

    Raises:
        RuntimeError: The job has not been launched.
        ValueError: `tp_degree` and `dp_degree` do not make up the number of ranks, or `rank` or `ranks` are
            not those of the job.
    """

    def __init__(
        self,
        rank: int | None = None,
        ranks: Sequence[int] | None = None,
        tp_degree: int | None = None,
        dp_degree: int | None = None,
    ) -> None:
        job = global_context.mesh
        if rank is not None and rank != job.rank:
            raise ValueError(f"rank is {rank}, and this process is rank {job.rank} of the job: leave it out")
        if ranks is not None and sorted(ranks) != list(range(job.world_size)):
            raise ValueError(
                f"ranks is {list(ranks)}, and the job has ranks 0 to {job.world_size - 1}: leave it out, as "
                "a tensor is shared over all of them"
            )
        self.tp_degree, self.dp_degree = _degrees(tp_degree, dp_degree, job.world_size)
        self.mesh = self._mesh_of(job)

    def _mesh_of(self, job: Mesh) -> Mesh:
        axes = self.layout.over(job.world_size).axes()
        if axes == job.axes:
            return job
        mesh = Mesh(axes, rank=job.rank, device_type=job.device_type, views={DATA_AXIS: ("edp", "ep")})
        mesh.take_groups_of(job)
        return mesh

    @property
    def layout(self) -> Layout:
        """Layout of a job with these degrees."""
        return Layout(tensor=self.tp_degree, mode="1d") if self.tp_degree > 1 else Layout()

    @property
    def tp_axis(self) -> Axis:
        """Axis of the ranks that share a tensor, for communication."""
        if TENSOR_AXIS in self.mesh.axes:
            return self.mesh.axis(TENSOR_AXIS)
        return Axis(TENSOR_AXIS, (self.mesh.rank,), self.mesh)

    @property
    def dp_axis(self) -> Axis:
        """Axis of the ranks that hold the same slice."""
        return self.mesh.axis(DATA_AXIS)

    def rank(self) -> int:
        """Return the global rank of this process."""
        return self.mesh.rank

    def ranks(self) -> list[int]:
        """Return all ranks."""
        return list(range(self.mesh.world_size))

    def world_size(self) -> int:
        """Return the number of ranks."""
        return self.mesh.world_size

    def tp_world_size(self) -> int:
        """Return the number of ranks that share a tensor."""
        return self.tp_degree

    def dp_world_size(self) -> int:
        """Return the number of ranks that hold the same slice."""
        return self.dp_degree

    def tp_local_rank(self) -> int:
        """Return the position of this rank among those that share a tensor."""
        return self.tp_axis.rank

    def dp_local_rank(self) -> int:
        """Return the position of this rank among those that hold the same slice."""
        return self.dp_axis.rank

    def tp_rank_list(self) -> list[int]:
        """Return the global ranks that share a tensor with this one."""
        return list(self.tp_axis.ranks)

    def dp_rank_list(self) -> list[int]:
        """Return the global ranks that hold the same slice as this one."""
        return list(self.dp_axis.ranks)

    def tp_process_group(self) -> dist.ProcessGroup:
        """Return torch's group of the ranks that share a tensor; all of these ranks must call it."""
        return self.tp_axis.group

    def dp_process_group(self) -> dist.ProcessGroup:
        """Return torch's group of the ranks that hold the same slice; all of these ranks must call it."""
        return self.dp_axis.group

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ProcessGroup) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        return f"ProcessGroup(tp_degree={self.tp_degree}, dp_degree={self.dp_degree})"

    def __deepcopy__(self, memo: dict[int, object]) -> "ProcessGroup":
        """Return the same object: a copy of a tensor is on the same ranks."""
        return self

    def _key(self) -> tuple[int, int, int]:
        return self.tp_degree, self.dp_degree, self.mesh.rank


def _degrees(tp_degree: int | None, dp_degree: int | None, world_size: int) -> tuple[int, int]:
    for name, degree in (("tp_degree", tp_degree), ("dp_degree", dp_degree)):
        if degree is not None and (not isinstance(degree, int) or degree < 1 or world_size % degree):
            raise ValueError(f"{name} is {degree}; it must divide the {world_size} ranks of the job")
    if tp_degree is None:
        tp_degree = 1 if dp_degree is None else world_size // dp_degree
    if dp_degree is None:
        dp_degree = world_size // tp_degree
    if tp_degree * dp_degree != world_size:
        raise ValueError(
            f"tp_degree={tp_degree} and dp_degree={dp_degree} are {tp_degree * dp_degree} ranks, and the job "
            f"has {world_size}: leave one of them out"
        )
    return tp_degree, dp_degree
