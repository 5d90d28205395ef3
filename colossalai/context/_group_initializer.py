"""Parallel modes of the user's own: one more row in the table of modes.

A user subclasses `ProcessGroupInitializer`, registers it in `DIST_GROUP_INITIALIZER`, names it in
`INITIALIZER_MAPPING`, and sets the name as `parallel.tensor.mode`.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from colossalai.context._config import Config, ConfigException
from colossalai.registry import DIST_GROUP_INITIALIZER

INITIALIZER_MAPPING: dict[str, str] = {}
"""From a tensor mode of the user's own to the registered name of its `ProcessGroupInitializer`."""

Partition = Sequence[Sequence[int]]


class ProcessGroupInitializer(ABC):
    """Says which groups of ranks a parallel mode of the user's own has.

    Args:
        rank: Global rank of this process.
        world_size: Number of processes.
        config: The whole config.
        data_parallel_size: Data-parallel size.
        pipeline_parallel_size: Number of pipeline stages.
        tensor_parallel_size: Tensor-parallel size; the ranks of a tensor-parallel group are adjacent.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        config: Config,
        data_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        tensor_parallel_size: int = 1,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.config = config
        self.data_parallel_size = data_parallel_size
        self.pipeline_parallel_size = pipeline_parallel_size
        self.tensor_parallel_size = tensor_parallel_size

    @abstractmethod
    def init_parallel_groups(self) -> Mapping[Hashable, Partition]:
        """Return, for every mode, all its groups: lists of ranks in which each rank of the job stands once.

        The names of the modes are free: a `ParallelMode`, a member of an own `Enum`, a string. The same value
        must be returned on every rank; the process groups are made by the mesh when they are first asked for.
        """


def own_groups(name: str, *, arguments: Mapping[str, Any], **sizes: Any) -> dict[Hashable, list[int]]:
    """Run the user's initializer of a mode and return, for each of its modes, the group of this rank.

    Args:
        name: The tensor mode, a key of `INITIALIZER_MAPPING`.
        arguments: What stands in `parallel.tensor` beside size and mode.
        sizes: The arguments of `ProcessGroupInitializer`.

    Raises:
        ConfigException: The arguments do not fit, or the groups are not a partition of the ranks.
    """
    initializer_class = DIST_GROUP_INITIALIZER.get_module(INITIALIZER_MAPPING[name])
    try:
        initializer = initializer_class(**sizes, **arguments)
    except TypeError as error:
        raise ConfigException(
            f"parallel.tensor does not fit {initializer_class.__name__}: {error}"
        ) from error
    groups = {}
    for mode, partition in initializer.init_parallel_groups().items():
        if sorted(rank for ranks in partition for rank in ranks) != list(range(sizes["world_size"])):
            raise ConfigException(
                f"{initializer_class.__name__} gives {mode!r} the groups {partition}; each of the "
                f"{sizes['world_size']} ranks must stand in exactly one of them"
            )
        groups[mode] = next(list(ranks) for ranks in partition if sizes["rank"] in ranks)
    return groups
