"""A model with cached tables and dense layers, the same in one process by torch, and batches for both."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from colossalai.booster.plugin import (
    GeminiPlugin,
    LowLevelZeroPlugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from colossalai.nn.layer.cached_embedding import ParallelCachedEmbeddingBag
from colossalai.nn.parallel.layers import (
    ParallelCachedEmbeddingBagTablewise,
    ParallelCachedEmbeddingBagTablewiseSplitCache,
    TablewiseEmbeddingBagConfig,
)

SIZES, DIM = (60, 150, 90), 8
BEGINS = (0, 60, 210)
KINDS = ("columns", "one", "split")
PLUGINS: dict[str, Callable[..., Any]] = {
    "ddp": TorchDDPPlugin,
    "zero1": lambda precision="fp32", **options: LowLevelZeroPlugin(stage=1, precision=precision, **options),
    "zero2": lambda precision="fp32", **options: LowLevelZeroPlugin(stage=2, precision=precision, **options),
    "fsdp": TorchFSDPPlugin,
    "gemini": lambda precision="fp32", **options: GeminiPlugin(precision=precision, **options),
}


class Batch(NamedTuple):
    """Samples: ids in the order of the tables, (tables * samples, ids), features, and targets."""

    ids: Tensor
    dense: Tensor
    targets: Tensor

    @property
    def own(self) -> "Batch":
        """The ids of all ranks, with features and targets of this one."""
        num_ranks, rank = dist.get_world_size(), dist.get_rank()
        return Batch(self.ids, *(each.tensor_split(num_ranks)[rank] for each in self[1:]))


def batches(number: int, *, seed: int = 0, size: int = 8) -> Iterator[Batch]:
    """Yield batches of ids by a power law."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(number):
        ids = [
            begin + (rows * torch.rand(size, 3, generator=generator) ** 3).long()
            for begin, rows in zip(BEGINS, SIZES, strict=True)
        ]
        dense = torch.rand(size, 4, generator=generator, dtype=torch.float64)
        yield Batch(torch.cat(ids), dense, dense.sum(1) + ids[0][:, 0] % 2)


class Ranker(nn.Module):
    """A score of each sample."""

    def __init__(self, tables: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.tables = tables
        self.bottom = nn.Linear(4, 5, dtype=dtype)
        self.top = nn.Sequential(
            nn.Linear(5 + len(SIZES) * DIM, 7, dtype=dtype), nn.Tanh(), nn.Linear(7, 1, dtype=dtype)
        )

    def forward(self, ids: Tensor, dense: Tensor) -> Tensor:
        """Return the scores, (samples of this rank,)."""
        bags = self.look_up(ids)
        scores: Tensor = self.top(torch.cat([self.bottom(dense), bags], 1))
        return scores.squeeze(1)

    def look_up(self, ids: Tensor) -> Tensor:
        """Return the bags, (samples of this rank, tables * dim)."""
        tables = self.tables
        if isinstance(tables, nn.ModuleDict):
            parts = zip(tables.children(), ids.tensor_split(len(SIZES)), BEGINS, strict=True)
            return torch.cat([table(part - begin) for table, part, begin in parts], 1)
        if isinstance(tables, nn.ModuleList):  # a table of all ids, looked up for each
            [table] = tables
            return torch.cat([table(part) for part in ids.tensor_split(len(SIZES))], 1)
        if isinstance(tables, ParallelCachedEmbeddingBagTablewise):
            bags: Tensor = tables(ids, already_split_along_rank=False)
        else:
            bags = tables(ids)
        return bags


def make_rankers(
    kind: str,
    *,
    cache_ratio: float = 0.3,
    dtype: torch.dtype = torch.float64,
    local_batches: bool = False,
    **options: Any,
) -> tuple[Ranker, Ranker]:
    """Return the model of one process by torch, and that of all ranks, with the same values."""
    torch.manual_seed(0)
    options = {"mode": "sum", "sparse": True, "dtype": dtype, **options}
    if kind == "columns":
        tables: nn.Module = nn.ModuleList(
            [
                ParallelCachedEmbeddingBag(
                    sum(SIZES), DIM, cache_ratio=cache_ratio, local_batches=local_batches, **options
                )
            ]
        )
        plain: nn.Module = nn.ModuleList([nn.EmbeddingBag(sum(SIZES), DIM, **options)])
    else:
        configs = [TablewiseEmbeddingBagConfig(rows, round(rows * cache_ratio)) for rows in SIZES]
        kinds = {
            "one": ParallelCachedEmbeddingBagTablewise,
            "split": ParallelCachedEmbeddingBagTablewiseSplitCache,
        }
        tables = kinds[kind](configs, DIM, local_batches=local_batches, **options)
        plain = nn.ModuleDict(
            {f"table_{number}": nn.EmbeddingBag(rows, DIM, **options) for number, rows in enumerate(SIZES)}
        )
    model = Ranker(tables, dtype)
    reference = Ranker(plain, dtype)
    reference.load_state_dict(model.state_dict())
    return reference, model


def loss_of(scores: Tensor, targets: Tensor) -> Tensor:
    """Return the mean squared error, in float64."""
    return (scores.double() - targets).square().mean()
