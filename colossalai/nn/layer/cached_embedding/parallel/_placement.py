"""Placement of tables of embeddings on ranks.

[Note: placement of tables]
Tables are placed by a greedy pass, then by moves and swaps while they help. A table loads its rank in three
ways: ids that are looked up, rows that are read into the cache, and rows in host memory. The load of a rank
is the largest of its three shares, each relative to an even division, so no weights between them are needed.
The rank of the largest load counts: all ranks wait for it.
"""

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_MAX_EXCHANGES = 1000
_LEAST_GAIN = 1e-3  # a share of an even division


@dataclass(frozen=True, eq=False)
class TablewiseEmbeddingBagConfig:
    """A table of a `ParallelCachedEmbeddingBagTablewise`, or of `...SplitCache`.

    Args:
        num_embeddings: Number of rows.
        cuda_row_num: Number of rows of its cache; 0 for a share of its rows, the `cache_ratio` of the module.
        assigned_rank: Position of its rank along the data-parallel axis. Default: `place_tables` decides.
        buffer_size: Number of rows that are copied at a time; 0 for 64 MiB of them.
            Used by `...SplitCache`; a shared cache has the `buffer_size` of the module.
        ids_freq_mapping: (num_embeddings,): how often each id is used. Default: the smaller, the more often.
        initial_weight: Values of the table, (num_embeddings, embedding_dim). Default: normal values.
        name: Name in state dicts and error messages. Default: "table_" with its number.
        pooling_factor: Number of ids of a bag, on average.

    Raises:
        ValueError: A number is out of range, or `name` has a dot.
        TypeError: A number of rows is not an integer, or `name` not a string.
    """

    num_embeddings: int
    cuda_row_num: int = 0
    assigned_rank: int | None = None
    buffer_size: int = 0
    ids_freq_mapping: Tensor | Sequence[int] | None = None
    initial_weight: Tensor | None = None
    name: str = ""
    pooling_factor: float = 1.0

    def __post_init__(self) -> None:
        for number in ("num_embeddings", "cuda_row_num", "buffer_size"):
            object.__setattr__(self, number, operator.index(getattr(self, number)))
        if self.num_embeddings < 1:
            raise ValueError(f"num_embeddings is {self.num_embeddings}; a table has at least one row")
        if not 0 <= self.cuda_row_num <= self.num_embeddings:
            raise ValueError(
                f"cuda_row_num is {self.cuda_row_num}; it must be from 1 to the {self.num_embeddings} rows, "
                "or 0 for the cache_ratio of the module"
            )
        if self.buffer_size < 0:
            raise ValueError(
                f"buffer_size is {self.buffer_size}; it must be a number of rows, or 0 for 64 MiB of them"
            )
        if not 0 < self.pooling_factor < math.inf:
            raise ValueError(f"pooling_factor is {self.pooling_factor}; it must be above 0, and finite")
        if self.ids_freq_mapping is not None:
            self._check_frequencies(torch.as_tensor(self.ids_freq_mapping))
        if not isinstance(self.name, str):
            raise TypeError(f"name is {self.name!r}; it must be a string")
        if "." in self.name:
            raise ValueError(f"name is {self.name!r}; a name of a table in a state dict has no dots")

    def _check_frequencies(self, frequencies: Tensor) -> None:
        if frequencies.shape != (self.num_embeddings,):
            raise ValueError(
                f"ids_freq_mapping has the shape {tuple(frequencies.shape)}, and the table has "
                f"{self.num_embeddings} rows: give one frequency for each row"
            )
        if not (frequencies.isfinite() & (frequencies >= 0)).all():
            raise ValueError("ids_freq_mapping has negative or infinite numbers; frequencies are 0 or more")

    def num_slots(self, cache_ratio: float) -> int:
        """Return the number of rows of the cache."""
        return self.cuda_row_num or min(max(round(cache_ratio * self.num_embeddings), 1), self.num_embeddings)

    def miss_share(self, cache_ratio: float) -> float:
        """Return the share of its lookups that a cache of the most frequent rows misses."""
        num_slots = self.num_slots(cache_ratio)
        if self.ids_freq_mapping is None:
            return 1 - num_slots / self.num_embeddings
        frequencies = torch.as_tensor(self.ids_freq_mapping).double()
        total = float(frequencies.sum())
        cached = float(frequencies.topk(num_slots).values.sum())
        return 1 - cached / total if total > 0 else 0.0


@dataclass(frozen=True)
class TablePlacement:
    """The rank of each table, and the loads that follow.

    Attributes:
        ranks: For each table, the position of its rank.
        loads: For each rank, its load relative to an even division: 1.0 for all ranks at best.
    """

    ranks: tuple[int, ...]
    loads: tuple[float, ...]

    @property
    def imbalance(self) -> float:
        """The largest load: by how much the slowest rank exceeds an even division."""
        return max(self.loads)

    def tables_of(self, rank: int) -> list[int]:
        """Return the numbers of the tables of a rank."""
        return [table for table, each in enumerate(self.ranks) if each == rank]

    def __str__(self) -> str:
        numbers = [len(self.tables_of(rank)) for rank in range(len(self.loads))]
        loads = ", ".join(
            f"rank {rank} has {number} (load {load:.2f})"
            for rank, (number, load) in enumerate(zip(numbers, self.loads, strict=True))
        )
        return f"{len(self.ranks)} tables on {len(self.loads)} ranks, imbalance {self.imbalance:.2f}: {loads}"


def place_tables(
    configs: Sequence[TablewiseEmbeddingBagConfig], num_ranks: int, *, cache_ratio: float = 0.01
) -> TablePlacement:
    """Place tables on ranks so that the largest load is small; see [Note: placement of tables].

    The tables are placed one after the other, the largest first, each on the rank that has the least load
    then. Afterwards a table of the rank with the largest load moves to another rank, or changes places with
    one there, as long as that load decreases. The result depends on the arguments only.

    Args:
        configs: The tables. One with an `assigned_rank` stays there.
        num_ranks: Number of ranks.
        cache_ratio: Share of the rows that a cache holds, for tables without `cuda_row_num`.

    Raises:
        ValueError: `configs` is empty, a number is out of range, or an `assigned_rank` is not one of the
            ranks.
        TypeError: `configs` is not a list of tables.
    """
    _check_arguments(configs, num_ranks, cache_ratio)
    shares = _shares(configs, cache_ratio) * num_ranks  # (tables, ways), relative to an even division
    loads = torch.zeros(num_ranks, shares.shape[1], dtype=torch.float64, device="cpu")
    ranks = [-1 if config.assigned_rank is None else config.assigned_rank for config in configs]
    free = [table for table, rank in enumerate(ranks) if rank < 0]
    for table, rank in enumerate(ranks):
        if rank >= 0:
            loads[rank] += shares[table]
    for table in sorted(free, key=lambda table: (-float(shares[table].max()), table)):
        loaded = (loads + shares[table]).max(1).values
        ranks[table] = int((loaded + 1e-6 * loads.sum(1)).argmin())  # of equal ones the one with less in all
        loads[ranks[table]] += shares[table]
    for _ in range(_MAX_EXCHANGES):
        if not _exchange_once(ranks, free, shares, loads):
            break
    return TablePlacement(tuple(ranks), tuple(loads.max(1).values.tolist()))


def _check_arguments(
    configs: Sequence[TablewiseEmbeddingBagConfig], num_ranks: int, cache_ratio: float
) -> None:
    """Check the arguments of `place_tables`."""
    if not isinstance(configs, Sequence) or not all(
        isinstance(each, TablewiseEmbeddingBagConfig) for each in configs
    ):
        raise TypeError(
            f"the tables are {configs!r:.80}; give a list with a TablewiseEmbeddingBagConfig for each"
        )
    if not configs:
        raise ValueError("there are no tables: give a TablewiseEmbeddingBagConfig for each")
    if num_ranks < 1:
        raise ValueError(f"num_ranks is {num_ranks}; it must be at least 1")
    if not 0 < cache_ratio <= 1:
        raise ValueError(f"cache_ratio is {cache_ratio}; it must be above 0 and at most 1")
    for number, config in enumerate(configs):
        if config.assigned_rank is not None and not 0 <= config.assigned_rank < num_ranks:
            raise ValueError(
                f"table {config.name or number} has assigned_rank={config.assigned_rank}; it must be from 0 "
                f"to {num_ranks - 1}, or None for a planned one"
            )


def _shares(configs: Sequence[TablewiseEmbeddingBagConfig], cache_ratio: float) -> Tensor:
    """Return the share of each table in the lookups, the misses and the rows of all: (tables, 3)."""
    ways = torch.tensor(
        [
            (
                config.pooling_factor,
                config.pooling_factor * config.miss_share(cache_ratio),
                config.num_embeddings,
            )
            for config in configs
        ],
        dtype=torch.float64,
        device="cpu",
    )
    return ways / ways.sum(0).clamp(min=torch.finfo(torch.float64).tiny)


def _exchange_once(ranks: list[int], free: Sequence[int], shares: Tensor, loads: Tensor) -> bool:
    """Move or swap tables of the rank with the largest load; return whether that has decreased it.

    Args:
        ranks: The rank of each table; changed.
        free: The tables that may move.
        shares: (tables, ways).
        loads: (ranks, ways); changed.
    """
    peaks = loads.max(1).values
    worst = int(peaks.argmax())
    own = [table for table in free if ranks[table] == worst]
    others = [table for table in free if ranks[table] != worst]
    targets = [rank for rank in range(len(loads)) if rank != worst]
    if not own or not targets:
        return False
    # Each of the own tables for each of the others, or for nothing at each of the other ranks.
    returned = torch.cat([shares[others], torch.zeros(len(targets), shares.shape[1], dtype=shares.dtype)])
    at = [*(ranks[other] for other in others), *targets]
    change = shares[own][:, None] - returned  # (own tables, others, ways)
    after = torch.maximum((loads[worst] - change).max(2).values, (loads[at] + change).max(2).values)
    best = int(after.argmin())
    if float(peaks[worst] - after.flatten()[best]) < _LEAST_GAIN:
        return False
    first, second = divmod(best, len(at))
    table, target, moved = own[first], at[second], change[first, second].clone()
    ranks[table] = target
    if second < len(others):
        ranks[others[second]] = worst
    loads[worst] -= moved
    loads[target] += moved
    return True
