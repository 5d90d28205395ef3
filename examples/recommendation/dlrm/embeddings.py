"""Tables of embeddings that are divided among the ranks, each rank with a cache."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from data import Clicks
from torch import Tensor, nn

from colossalai.nn.parallel.layers import (
    ParallelCachedEmbeddingBag,
    ParallelCachedEmbeddingBagTablewise,
    ParallelCachedEmbeddingBagTablewiseSplitCache,
    TablewiseEmbeddingBagConfig,
)

INIT_STD = 0.02
TABLEWISE: dict[str, Any] = {
    "tables": ParallelCachedEmbeddingBagTablewise,
    "split_cache": ParallelCachedEmbeddingBagTablewiseSplitCache,
}


class Tables(nn.Module):
    """The embeddings of each categorical feature, in tables that are divided among the ranks.

    Args:
        kind: "tables" or "split_cache" for whole tables on each rank, "columns" for columns of all tables.
        sizes: Number of rows of each table.
        dim: Width of all rows.
        cached_rows: Number of rows of each table that are cached.
    """

    begins: Tensor

    def __init__(self, kind: str, sizes: Sequence[int], *, dim: int, cached_rows: Sequence[int]) -> None:
        super().__init__()
        self.num_tables, self.dim, self.is_by_table = len(sizes), dim, kind in TABLEWISE
        # Each rank has the ids of its own samples.
        options: dict[str, Any] = {"mode": "sum", "sparse": True, "local_batches": True}
        weights = [torch.randn(size, dim) * INIT_STD for size in sizes]
        if self.is_by_table:
            configs = [
                TablewiseEmbeddingBagConfig(size, cached, initial_weight=weight, name=f"feature_{number}")
                for number, (size, cached, weight) in enumerate(zip(sizes, cached_rows, weights, strict=True))
            ]
            self.bag = TABLEWISE[kind](configs, dim, **options)
        elif kind == "columns":  # one table with the rows of all
            frequencies = torch.cat([1 / torch.arange(1, size + 1, dtype=torch.float64) for size in sizes])
            self.bag = ParallelCachedEmbeddingBag(
                sum(sizes),
                dim,
                _weight=torch.cat(weights),
                cache_ratio=sum(cached_rows) / sum(sizes),
                ids_freq_mapping=frequencies,
                **options,
            )
        else:
            raise ValueError(f"TABLES is {kind!r}; choose one of {', '.join([*TABLEWISE, 'columns'])}")
        begins = torch.tensor([0, *sizes[:-1]]).cumsum(0)
        self.register_buffer("begins", begins, persistent=False)

    @property
    def caches(self) -> list[Any]:
        """The cached bags of this rank, whose statistics are those of one cache each."""
        return [*getattr(self.bag, "cached_embedding_bag_list", [self.bag])]

    def prefetch(self, loader: Iterable[Clicks]) -> Iterable[Clicks]:
        """Return a loader of the same batches, whose rows are read while the batch before them computes."""
        ahead: Iterable[Clicks] = self.bag.prefetch(loader, ids=lambda batch: self.numbered(batch.ids))
        return ahead

    def numbered(self, ids: Tensor) -> Tensor:
        """Number ids (batch, tables) over all tables: (bags, 1), in the order that the bag takes."""
        ids = ids + self.begins
        return (ids.T if self.is_by_table else ids).reshape(-1, 1)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the rows (batch, tables, dim) of ids (batch, tables) of this rank's samples."""
        rows: Tensor = self.bag(self.numbered(ids))  # (batch, tables * dim), or a row for each bag
        return rows.view(-1, self.num_tables, self.dim)
