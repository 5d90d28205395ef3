"""User-defined parallel modes: one more row in the table of modes.

A user subclasses `ProcessGroupInitializer`, registers it in `DIST_GROUP_INITIALIZER`, names it in
`INITIALIZER_MAPPING`, and sets the name as `parallel.tensor.mode`.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from colossalai.context._config import Config, ConfigException
from colossalai.context._parallel_mode import TENSOR_LAYOUTS
from colossalai.registry import DIST_GROUP_INITIALIZER

ALLOWED_MODES: tuple[str | None, ...] = (*TENSOR_LAYOUTS, "sequence")
"""The tensor modes without an initializer, including "sequence", which cuts sequences."""

INITIALIZER_MAPPING: dict[str, str] = {}
"""From a user-defined tensor mode to the registered name of its `ProcessGroupInitializer`."""

Partition = Sequence[Sequence[int]]


class ProcessGroupInitializer(ABC):
    """Defines the groups of ranks of a user-defined parallel mode.

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
    def init_parallel_groups(self) -> Mapping[Hashable, Partition] | Iterable[tuple[Any, ...]] | None:
        """Return the groups of ranks of each mode; called once, at launch, on every rank.

        The names of the modes are free: a `ParallelMode`, a member of an own `Enum`, a string. It returns one
        of these:

        - for every mode all its groups: lists of ranks in which each rank of the job occurs once. The same
          value must be returned on every rank; the mesh makes the process groups at their first use.
        - for every mode the group of this rank, made here with `torch.distributed.new_group`, as a tuple
          `(local rank, size, process group, CPU group, ranks, mode)`, or a list of such tuples; the CPU group
          can be left out.
        - None: the groups are kept outside of the context.
        """


@dataclass(frozen=True)
class OwnGroup:
    """The group of this rank in a user-defined mode.

    Attributes:
        ranks: Its global ranks.
        group: The process group, if the user has made it.
        cpu_group: A group for tensors in host memory, likewise.
    """

    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None = None
    cpu_group: dist.ProcessGroup | None = None


def own_groups(name: str, *, arguments: Mapping[str, Any], **sizes: Any) -> dict[Hashable, OwnGroup]:
    """Run the user's initializer of a mode and return, for each of its modes, the group of this rank.

    Args:
        name: The tensor mode, a key of `INITIALIZER_MAPPING`.
        arguments: The other entries of `parallel.tensor` than size and mode.
        sizes: The arguments of `ProcessGroupInitializer`.

    Raises:
        ConfigException: The initializer does not take `arguments`, or its groups are not a partition of the
            ranks.
    """
    initializer_class = DIST_GROUP_INITIALIZER.get_module(INITIALIZER_MAPPING[name])
    try:
        initializer = initializer_class(**sizes, **arguments)
    except TypeError as error:
        raise ConfigException(
            f"parallel.tensor does not fit {initializer_class.__name__}: {error}"
        ) from error
    found = initializer.init_parallel_groups()
    who = f"{initializer_class.__name__}.init_parallel_groups()"
    if found is None:
        return {}
    if isinstance(found, Mapping):
        return {mode: _own_part(who, mode, partition, sizes) for mode, partition in found.items()}
    is_row = isinstance(found, tuple) and len(found) > 0 and not isinstance(found[0], tuple)
    rows = [found] if is_row else found
    if (
        not rows
        or not isinstance(rows, list | tuple)
        or not all(isinstance(row, tuple) and len(row) in _ROW_LENGTHS for row in rows)
    ):
        raise ConfigException(
            f"{who} returns {found!r:.200}; it must be a dict from each mode to its groups of ranks, a list "
            "of tuples (local rank, size, process group, CPU group, ranks, mode), or None"
        )
    return dict(_as_written(who, row, sizes) for row in rows)


_ROW_LENGTHS = (2, 5, 6)  # (mode, groups); without and with a CPU group


def _own_part(who: str, mode: Hashable, partition: Partition, sizes: Mapping[str, Any]) -> OwnGroup:
    """Return the group of a partition of the ranks that contains this one."""
    try:
        is_one = sorted(rank for ranks in partition for rank in ranks) == list(range(sizes["world_size"]))
    except TypeError:  # not lists of numbers
        is_one = False
    if not is_one:
        raise ConfigException(
            f"{who} gives {mode!r} the groups {partition}; each of the {sizes['world_size']} ranks must "
            "be in exactly one of them"
        )
    return OwnGroup(next(tuple(ranks) for ranks in partition if sizes["rank"] in ranks))


def _as_written(who: str, row: tuple[Any, ...], sizes: Mapping[str, Any]) -> tuple[Hashable, OwnGroup]:
    """Return the mode and group of a tuple: (mode, groups), or a group of this rank that the user made."""
    if len(row) == 2:
        return row[0], _own_part(who, row[0], row[1], sizes)
    local_rank, size, group, *cpu_group, ranks, mode = row
    ranks = tuple(ranks)
    here = ranks.index(sizes["rank"]) if sizes["rank"] in ranks else None
    if here is None or (here, len(ranks)) != (local_rank, size):
        raise ConfigException(
            f"{who} returns that rank {sizes['rank']} is number {local_rank} of the {size} ranks of "
            f"{mode!r}, whose ranks are {list(ranks)}: it must be among them, at that position"
        )
    return mode, OwnGroup(ranks, group, cpu_group[0] if cpu_group else None)
