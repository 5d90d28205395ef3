"""Several cached embeddings of one width, each of which has one owner among the ranks.

Ids are numbered over all tables: those of a table follow the ones before it. A batch is in the order of the
tables (the format of torchrec's KeyedJaggedTensor): all bags of the first table, then those of the second.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from colossalai.communication import copy_forward_reduce_backward
from colossalai.logging import get_dist_logger
from colossalai.nn.layer.cached_embedding._bag import CachedEmbeddingBag
from colossalai.nn.layer.cached_embedding._prefetch import PrefetchLoader, check_ids_of, prefetch
from colossalai.nn.layer.cached_embedding._slots import EvictionStrategy
from colossalai.nn.layer.cached_embedding._table import check_not_lazy
from colossalai.nn.layer.cached_embedding.parallel._batches import (
    BatchExchange,
    Collected,
    IdsOfRanks,
    RankBags,
)
from colossalai.nn.layer.cached_embedding.parallel._columns import check_ids, check_shape
from colossalai.nn.layer.cached_embedding.parallel._exchange import BagExchange, batch_axis
from colossalai.nn.layer.cached_embedding.parallel._placement import TablewiseEmbeddingBagConfig
from colossalai.nn.layer.cached_embedding.parallel._tables import PlacedTables, TableBatch

Batch = TypeVar("Batch")
Configs = Sequence[TablewiseEmbeddingBagConfig]


class ParallelCachedEmbeddingBagTablewise(CachedEmbeddingBag):
    """Tables of embeddings, each on one of the data-parallel ranks; those of a rank are behind one cache.

    Each rank looks up the bags of its tables for the whole batch, whose ids all ranks are given, or their own
    part (`local_batches`). One all-to-all gives it the bags of all tables for its part of the batch; see
    [Note: batches of several ranks]. Dense layers go under `torch.nn.parallel.DistributedDataParallel`, this
    module does not.

    A forward of b bags for each of the rank's t tables sends (b - b / R) t embedding_dim elements to other
    ranks; the backward receives as many. With `local_batches` it sends the lengths and ids of the rank's
    part, 8 bytes each, except those for its own tables.

    `weight` has the tables of this rank, one after the other. `state_dict()` has each table under the key
    "name.weight", as `torch.nn.ModuleDict` of `torch.nn.EmbeddingBag`s, in host memory: all ranks call it.
    States of the optimizer are those of the tables of this rank.

    Args:
        embedding_bag_config_list: The tables, the same on all ranks.
        embedding_dim: Width of all rows.
        padding_idx: Id within each table that does not contribute to a bag and has no gradient.
        max_norm: Refused; it would change rows in the forward.
        norm_type: The p of `max_norm`; without effect.
        scale_grad_by_freq: Whether a gradient is divided by how often its id is in the batch.
        sparse: Whether gradients are sparse.
        _weight: The tables of this rank, one after the other. Default: the `initial_weight` of each.
        mode: Reduction of the rows of a bag: "sum", "mean" or "max".
        include_last_offset: Whether `offsets` ends with the number of ids.
        dtype: Data type of the tables.
        device: Device of the cache.
        cache_ratio: Share of the rows that the cache holds, for tables without `cuda_row_num`.
        warmup_ratio: Share of the cache that is filled with the most frequent rows at once.
        buffer_size: Number of rows that are copied at a time; 0 for 64 MiB of them.
        pin_weight: Whether the tables are in pinned memory. Default: where the cache is on an accelerator.
        evict_strategy: Order in which rows are evicted.
        overflow: See `CachedEmbeddingBag`.
        local_batches: Whether each rank is given its own part of the batch, of all tables, as from a
            `DistributedSampler`; else the whole batch, the same on all ranks, or the bags of its tables.
        name: Name of the tables together in error messages.

    Attributes:
        placement: The rank of each table; it prints the loads and the imbalance.

    Raises:
        ValueError: An argument is out of range, some of the tables have frequencies and others have not, two
            have one name, or the ranks of the job share sequences.
    """

    def __init__(  # noqa: PLR0913 - the documented options
        self,
        embedding_bag_config_list: Configs,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        _weight: Tensor | None = None,
        mode: str = "mean",
        include_last_offset: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        cache_ratio: float = 0.01,
        warmup_ratio: float = 0.7,
        buffer_size: int = 0,
        pin_weight: bool | None = None,
        evict_strategy: EvictionStrategy = EvictionStrategy.LFU,
        *,
        overflow: str = "error",
        local_batches: bool = False,
        name: str = "",
    ) -> None:
        configs = embedding_bag_config_list
        _, embedding_dim = check_shape(1, embedding_dim)
        tables = place(
            configs, cache_ratio=cache_ratio, padding_idx=padding_idx, name=name or type(self).__name__
        )
        _check_frequencies(configs)
        own = [configs[table] for table in tables.own]
        num_rows = max(sum(config.num_embeddings for config in own), 1)  # a spare row without tables
        num_slots = max(sum(config.num_slots(cache_ratio) for config in own), 1)
        # The row of padding is always in the cache.
        num_slots = min(num_slots + bool(tables.own_padding), num_rows)
        weights = tables.draw(configs, embedding_dim, dtype)
        if _weight is None:
            _weight = torch.zeros(num_rows, embedding_dim, dtype=dtype, device="cpu")
            for begin, weight in zip(tables.own_begins, weights, strict=True):
                _weight[begin : begin + len(weight)] = weight
        elif any(config.initial_weight is not None for config in configs):
            raise ValueError(
                "tables are given twice, by _weight and by initial_weight: leave one of them out"
            )
        elif tuple(_weight.shape) != (num_rows, embedding_dim):
            raise ValueError(
                f"_weight has the shape {tuple(_weight.shape)}; the tables of this rank have "
                f"{(num_rows, embedding_dim)}"
            )
        # Before the base class, which checks the ranks.
        self._tables, self._exchange = tables, BagExchange(tables.axis, tables.name)
        self._batches = BatchExchange(tables.axis, tables.name)
        self.local_batches = local_batches
        self.placement = tables.placement
        super().__init__(
            num_rows,
            embedding_dim,
            tables.own_padding[0] if tables.own_padding else None,  # also for the other tables
            max_norm,
            norm_type,
            scale_grad_by_freq,
            sparse,
            _weight,
            mode,
            include_last_offset,
            dtype,
            device,
            num_slots / num_rows,
            _frequencies(own),
            warmup_ratio,
            buffer_size,
            pin_weight,
            evict_strategy,
            overflow=overflow,
            name=tables.name,
        )
        self.padding_idx = padding_idx
        self.cache_weight_mgr.set_tables(tables.own_begins or [0])
        self.cache_weight_mgr.axis = tables.axis
        self.cache_weight_mgr.parts = tuple(
            (f"{tables.names[table]}.weight", begin, tables.sizes[table])
            for table, begin in zip(tables.own, tables.own_begins, strict=True)
        )

    def forward(
        self,
        indices: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
        shape_hook: Callable[[Tensor], Tensor] | None = None,
        already_split_along_rank: bool | None = None,
        cache_op: bool = True,
    ) -> Tensor:
        """Reduce the rows of each bag of the whole batch; return those of this rank's part of the batch.

        Args:
            indices: Ids: (tables * bags, ids), or (ids,) with `offsets`, in the order of the tables.
            offsets: (tables * bags,): where each bag begins.
            per_sample_weights: A factor for each id, of the shape of `indices`; for mode "sum".
            shape_hook: Function of the output.
            already_split_along_rank: Whether the batch has the tables of this rank only, whose ids are
                numbered over these; else it has all tables, and is the same on all ranks. Default: True, and
                False with `local_batches`.
            cache_op: Whether `indices` are ids. With False they are slots of `cache_weight_mgr.prepare_ids`.

        Returns:
            (bags of this rank, tables * embedding_dim), in the order of the tables.

        Raises:
            ValueError: The ranks have different batches, or an id is out of range.
            RuntimeError: The batch has more distinct ids than the cache holds.
        """
        tables, has_last = self._tables, self.include_last_offset
        per_sample_weights = self._factors(per_sample_weights, self.cache_weight_mgr.param.dtype)
        batch = TableBatch(indices, offsets, per_sample_weights)
        is_local = self.local_batches and tables.axis.size > 1
        is_whole = not is_local and not self._is_split(already_split_along_rank)
        if is_whole and per_sample_weights is not None:
            batch = batch._replace(factors=copy_forward_reduce_backward(per_sample_weights, tables.axis))
        num_tables = len(tables.names) if is_whole else len(tables.own)
        takes_ids = self.cache_op and cache_op

        def collect() -> Collected | None:
            return self._collect(batch, already_split_along_rank, takes_ids=takes_ids) if is_local else None

        def look_up(collected: Collected | None) -> tuple[Tensor, Sequence[int] | None]:
            sizes = None
            if collected is not None:
                sizes = collected.num_bags
                num_bags = sum(sizes)
                own = tables.merge(collected, has_last=has_last)
                own = own._replace(ids=tables.with_one_padding(own.ids))
            else:
                num_bags = batch.num_bags(num_tables, has_last=has_last)
                own = self._own_part(batch, num_tables, num_bags, is_whole=is_whole, takes_ids=takes_ids)
            previous, self.cache_op = self.cache_op, takes_ids
            try:
                output = self._reduce(*own)  # (tables of this rank * bags, dim)
            finally:
                self.cache_op = previous
            by_table = output.view(len(tables.own), num_bags, self.embedding_dim)
            return by_table.transpose(0, 1).reshape(num_bags, len(tables.own) * self.embedding_dim), sizes

        given = {"ids": indices, "offsets": offsets, "per_sample_weights": per_sample_weights}
        output = self._exchange(
            look_up,
            given if is_whole else {},
            collect,
            widths=tables.widths(self.embedding_dim),
            device=self.cache_weight_mgr.param.device,
        )
        output = tables.in_order(output, self.embedding_dim)
        return output if shape_hook is None else shape_hook(output)

    def _is_split(self, already_split_along_rank: bool | None) -> bool:
        """Return whether a batch has the tables of this rank only.

        Raises:
            ValueError: A batch has all tables, as `local_batches` is set.
        """
        if already_split_along_rank is None:
            return not self.local_batches
        if already_split_along_rank and self.local_batches:
            raise ValueError(
                f"{self._tables.name} has local_batches=True, so a batch has all tables for the samples of "
                "this rank: leave already_split_along_rank=True out"
            )
        return already_split_along_rank

    def _collect(
        self, batch: TableBatch, already_split_along_rank: bool | None, *, takes_ids: bool
    ) -> Collected | None:
        """Return the bags of this rank's tables for the parts of all ranks; collective."""
        tables, has_last = self._tables, self.include_last_offset

        def cut() -> tuple[int, list[RankBags]]:
            self._is_split(already_split_along_rank)  # refused here: all ranks raise
            check_ids(takes_ids, tables.name)
            return tables.cut(batch, has_last=has_last)

        return self._batches.collect(cut, param=self.cache_weight_mgr.param)

    def _own_part(
        self, batch: TableBatch, num_tables: int, num_bags: int, *, is_whole: bool, takes_ids: bool
    ) -> TableBatch:
        """Return the bags of the tables of this rank, with one id of padding in place of all.

        Raises:
            ValueError: The batch is not one of `num_tables`, or has slots where ids are needed.
        """
        tables, has_last = self._tables, self.include_last_offset
        if not takes_ids and (is_whole or tables.padding_idx is not None):
            reason = "padding_idx is given" if tables.padding_idx is not None else "the batch has all tables"
            raise ValueError(f"{tables.name} was given slots (cache_op=False), and {reason}: pass ids")
        if not num_tables:
            raise ValueError(
                f"rank {tables.axis.rank} along {tables.axis.name} has none of the tables of {tables.name}, "
                "so its part of a batch has no number of bags: pass already_split_along_rank=False and ids "
                "of all tables"
            )
        hint = "" if is_whole else ". Pass already_split_along_rank=False for a batch of all tables"
        batch.check(num_tables, has_last=has_last, hint=hint)
        if not takes_ids:
            return batch
        parts = [*tables.parts(batch, num_bags, has_last=has_last, is_whole=is_whole)]
        batch = tables.join(parts, batch, has_last=has_last)
        return batch._replace(ids=tables.with_one_padding(batch.ids))

    def prefetch(
        self,
        loader: Iterable[Batch],
        depth: int = 4,
        ids: Callable[[Batch], Tensor | Sequence[Tensor]] | None = None,
        already_split_along_rank: bool | None = None,
    ) -> PrefetchLoader[Batch]:
        """Return a loader of the same batches, whose rows come while the batch before them computes.

        With `local_batches` all ranks read it alike, each its own parts: reading a batch is a collective.

        Args:
            loader: See `CachedEmbeddingBag.prefetch`.
            depth: Number of batches that are known ahead; 0 for none.
            ids: Function that returns the ids of a batch. Default: a batch is its ids.
            already_split_along_rank: As of the forward.

        Raises:
            ValueError: `depth` is not a number of batches.
            TypeError: `loader` cannot be iterated, or `ids` not be called.
        """
        check_ids_of(ids)
        tables, cache = self._tables, self.cache_weight_mgr
        is_split = self._is_split(already_split_along_rank)
        if self.local_batches and tables.axis.size > 1:
            shared = IdsOfRanks(
                self._batches,
                cache.param,
                tables.cut_ids,
                lambda own: [tables.with_one_padding(own)],
            )
            return prefetch(loader, [cache], depth, ids, shared)
        return prefetch(loader, [cache], depth, tables.ids_of_own(ids, is_whole=not is_split))

    @property
    def _saved_shapes(self) -> dict[str, tuple[int, int]]:
        return {
            f"{name}.weight": (rows, self.embedding_dim)
            for name, rows in zip(self._tables.names, self._tables.sizes, strict=True)
        }

    def _saved_tables(self) -> Iterable[tuple[str, Tensor]]:
        own, begins = self._tables.own, self._tables.own_begins
        cache = self.cache_weight_mgr
        weight = self._exchange.succeeded(lambda: cache.weight, device=cache.param.device)
        for table, (key, shape) in enumerate(self._saved_shapes.items()):
            part = weight[begins[own.index(table)] :][: shape[0]] if table in own else None
            yield key, self._tables.whole(table, part, shape, cache.param)

    def _load_table(self, key: str, loaded: Tensor, *, is_assigned: bool) -> None:
        table = [*self._saved_shapes].index(key)
        if table in self._tables.own:
            begin = self._tables.own_begins[self._tables.own.index(table)]
            self.cache_weight_mgr.load_rows(begin, loaded)

    @classmethod
    def from_pretrained(cls, embeddings: Tensor, freeze: bool = True, **options: Any) -> Self:
        """Refuse one table.

        Raises:
            TypeError: A module of several tables is made of one (raised on every call).
        """
        raise TypeError(
            f"{cls.__name__} has several tables: give each TablewiseEmbeddingBagConfig its initial_weight"
        )

    def _check_ranks(self, name: str) -> None:
        self._exchange.check_job(self.parameters())

    def extra_repr(self) -> str:
        """Return the arguments in one line."""
        return f"{len(self._tables.names)} tables, {super().extra_repr()}, local_batches={self.local_batches}"


def place(configs: Configs, *, cache_ratio: float, padding_idx: int | None, name: str) -> PlacedTables:
    """Place the tables of a module on the ranks, and log where they are."""
    check_not_lazy(name)
    axis = batch_axis()
    tables = PlacedTables.of(configs, axis, cache_ratio=cache_ratio, padding_idx=padding_idx, name=name)
    if axis.size > 1:
        get_dist_logger().info(f"{name}: {tables.placement}", ranks=[0])
    return tables


def _check_frequencies(configs: Configs) -> None:
    """Check that one cache can order the rows of all tables.

    Raises:
        ValueError: Some have frequencies, others have not.
    """
    missing = [number for number, config in enumerate(configs) if config.ids_freq_mapping is None]
    if 0 < len(missing) < len(configs):
        raise ValueError(
            f"table {configs[missing[0]].name or missing[0]} has no ids_freq_mapping, and others have: "
            "tables behind one cache are compared by it, so give it for all, or for none"
        )


def _frequencies(configs: Configs) -> Tensor | None:
    """Return how often each row of the tables behind one cache is used; None for the default order."""
    if len(configs) < 2 and not (configs and configs[0].ids_freq_mapping is not None):
        return None
    return torch.cat(
        [
            # A power law over the rows of each table: the smaller the id, the more often.
            config.pooling_factor
            / torch.arange(1, config.num_embeddings + 1, dtype=torch.float64, device="cpu")
            if config.ids_freq_mapping is None
            else torch.as_tensor(config.ids_freq_mapping).cpu()
            for config in configs
        ]
    )
