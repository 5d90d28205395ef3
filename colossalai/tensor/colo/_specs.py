"""Specs of a ColoTensor: dist spec, compute spec, and both with their process group.

Users write these specs. The package converts them to a `ShardingSpec` over the mesh of the process group,
from which all other modules read the sharding.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from colossalai.tensor._spec import ShardingSpec
from colossalai.tensor.colo._process_group import TENSOR_AXIS, ProcessGroup


class DistSpec(ABC):
    """Base class of the distribution of a tensor over tensor-parallel ranks: `ShardSpec` or `ReplicaSpec`."""

    @abstractmethod
    def cut_dim(self, num_dims: int, group: ProcessGroup) -> int | None:
        """Return the sharded dimension of a tensor of `num_dims`, None if it is replicated.

        Raises:
            ValueError: The spec does not fit the tensor, or the `group`.
        """


@dataclass(frozen=True)
class ReplicaSpec(DistSpec):
    """Every tensor-parallel rank holds the full tensor."""

    def cut_dim(self, num_dims: int, group: ProcessGroup) -> int | None:
        """See the base class."""
        return None


@dataclass(frozen=True, init=False)
class ShardSpec(DistSpec):
    """Each tensor-parallel rank holds an equal part along one dimension.

    Attributes:
        dims: List with the dimension; negative ones count from the end.
        num_partitions: List with the number of parts, which equals the number of tensor-parallel ranks.

    Raises:
        ValueError: `dims` and `num_partitions` do not have one entry each.
    """

    dims: tuple[int, ...]
    num_partitions: tuple[int, ...]

    def __init__(self, dims: Sequence[int], num_partitions: Sequence[int]) -> None:
        if len(dims) != 1 or len(num_partitions) != 1:
            raise ValueError(
                f"dims={list(dims)}, num_partitions={list(num_partitions)}: a tensor is cut along one "
                "dimension, so each has one entry; colossalai.tensor.ShardingSpec has cuts along several"
            )
        object.__setattr__(self, "dims", tuple(dims))
        object.__setattr__(self, "num_partitions", tuple(num_partitions))

    def cut_dim(self, num_dims: int, group: ProcessGroup) -> int | None:
        """See the base class."""
        [dim], [parts] = self.dims, self.num_partitions
        if not -num_dims <= dim < num_dims:
            raise ValueError(f"dims is [{dim}], and the tensor has {num_dims} dimensions")
        if parts != group.tp_world_size():
            raise ValueError(
                f"num_partitions is [{parts}], and {group} has {group.tp_world_size()} tensor-parallel "
                "ranks, which each hold a part: give [pg.tp_world_size()]"
            )
        return dim % num_dims if parts > 1 else None


class ComputePattern(Enum):
    """Kind of tensor parallelism of a parameter."""

    TP1D = 0
    TP2D = 1
    TP2P5D = 2
    TP3D = 3


class ComputeSpec:
    """Use of a sharded parameter in functions.

    Args:
        compute_pattern: The kind of tensor parallelism.

    Attributes:
        compute_pattern: As given.
        output_replicate: Whether sharded outputs of functions with this parameter are gathered.

    Raises:
        NotImplementedError: `compute_pattern` is another one than `TP1D`.
    """

    def __init__(self, compute_pattern: ComputePattern) -> None:
        if compute_pattern is not ComputePattern.TP1D:
            raise NotImplementedError(
                f"{compute_pattern}: parameters of existing models are cut in 1D. Layers of colossalai.nn "
                "(Linear, Embedding, LayerNorm, ...) compute in 2d, 2.5d and 3d, by "
                "parallel=dict(tensor=dict(size=..., mode='2d')) in the config"
            )
        self.compute_pattern = compute_pattern
        self.output_replicate = True

    def set_output_replicate(self, flag: bool = True) -> None:
        """Set whether outputs are gathered; with False each rank keeps its slice for the next function."""
        self.output_replicate = flag

    def __repr__(self) -> str:
        return f"ComputeSpec({self.compute_pattern}, output_replicate={self.output_replicate})"


@dataclass(frozen=True)
class ColoTensorSpec:
    """Metadata of a ColoTensor.

    Attributes:
        pg: Process group.
        dist_attr: Distribution over the tensor-parallel ranks.
        compute_attr: Compute spec, or None.
    """

    pg: ProcessGroup
    dist_attr: DistSpec = ReplicaSpec()
    compute_attr: ComputeSpec | None = None


def sharding_spec(whole_shape: Sequence[int], dim: int, group: ProcessGroup) -> ShardingSpec:
    """Return the spec of a tensor that is sharded along `dim`.

    Raises:
        ValueError: The tensor-parallel ranks do not divide `whole_shape[dim]`.
    """
    size, num_ranks = whole_shape[dim], group.tp_world_size()
    if size % num_ranks:
        padded = -(-size // num_ranks) * num_ranks
        raise ValueError(
            f"dimension {dim} of shape {tuple(whole_shape)} is {size}, which the {num_ranks} "
            f"tensor-parallel ranks do not divide: cut another one, or make it {padded} "
            "(colossalai.tensor.pad_to; PaddedSpec remembers the size without padding)"
        )
    dims = tuple((TENSOR_AXIS,) if number == dim else () for number in range(len(whole_shape)))
    return ShardingSpec(tuple(whole_shape), dims, group.mesh)
