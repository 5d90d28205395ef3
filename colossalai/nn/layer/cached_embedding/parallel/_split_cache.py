"""Several cached embeddings of one width, each with one owner among the ranks and a cache of its own."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from colossalai.communication import copy_forward_reduce_backward
from colossalai.nn.layer.cached_embedding._bag import CachedEmbeddingBag
from colossalai.nn.layer.cached_embedding._prefetch import IdsOf, check_ids_of, prefetch
from colossalai.nn.layer.cached_embedding._slots import EvictionStrategy
from colossalai.nn.layer.cached_embedding.parallel._batches import BatchExchange, Collected, IdsOfRanks
from colossalai.nn.layer.cached_embedding.parallel._columns import check_shape
from colossalai.nn.layer.cached_embedding.parallel._exchange import BagExchange
from colossalai.nn.layer.cached_embedding.parallel._placement import TablewiseEmbeddingBagConfig
from colossalai.nn.layer.cached_embedding.parallel._tables import TableBatch
from colossalai.nn.layer.cached_embedding.parallel._tablewise import Configs, place
from colossalai.tensor import RowCacheModule

Batch = TypeVar("Batch")


class ParallelCachedEmbeddingBagTablewiseSplitCache(RowCacheModule):
    """Tables of embeddings, each on one of the data-parallel ranks and behind a cache of its own.

    As `ParallelCachedEmbeddingBagTablewise`; the caches do not compete for slots. Tables have the bits of
    `torch.nn.EmbeddingBag`s with every optimizer, on any number of ranks.

    Args:
        embedding_bag_config_list: The tables, the same on all ranks.
        embedding_dim: Width of all rows.
        padding_idx: Id within each table that does not contribute to a bag and has no gradient.
        max_norm: Refused; it would change rows in the forward.
        norm_type: The p of `max_norm`; without effect.
        scale_grad_by_freq: Whether a gradient is divided by how often its id is in the batch.
        sparse: Whether gradients are sparse.
        mode: Reduction of the rows of a bag: "sum", "mean" or "max".
        include_last_offset: Whether `offsets` ends with the number of ids.
        dtype: Data type of the tables.
        device: Device of the caches.
        warmup_ratio: Share of a cache that is filled with the most frequent rows at once.
        pin_weight: Whether the tables are in pinned memory. Default: where the caches are on an accelerator.
        evict_strategy: Order in which rows are evicted.
        cache_ratio: Share of the rows that a cache holds, for tables without `cuda_row_num`.
        overflow: See `CachedEmbeddingBag`.
        local_batches: See `ParallelCachedEmbeddingBagTablewise`.
        name: Name of the tables together in error messages.

    Attributes:
        placement: The rank of each table; it prints the loads and the imbalance.

    Raises:
        ValueError: An argument is out of range, two tables have one name, or the ranks of the job share
            sequences.
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
        mode: str = "mean",
        include_last_offset: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        warmup_ratio: float = 0.7,
        pin_weight: bool | None = None,
        evict_strategy: EvictionStrategy = EvictionStrategy.LFU,
        *,
        cache_ratio: float = 0.01,
        overflow: str = "error",
        local_batches: bool = False,
        name: str = "",
    ) -> None:
        super().__init__()
        configs = embedding_bag_config_list
        _, embedding_dim = check_shape(1, embedding_dim)
        tables = place(
            configs, cache_ratio=cache_ratio, padding_idx=padding_idx, name=name or type(self).__name__
        )
        self.placement = tables.placement
        self.embedding_dim = embedding_dim
        self.include_last_offset = include_last_offset
        self._tables = tables
        self._exchange = BagExchange(tables.axis, tables.name)
        self._batches = BatchExchange(tables.axis, tables.name)
        self.local_batches = local_batches
        # A rank without tables has a spare row, whose optimizer and parameter are checked as those of tables.
        self._spare: tuple[CachedEmbeddingBag, ...] = ()
        self.register_parameter("spare_weight", None)

        def make(
            config: TablewiseEmbeddingBagConfig, weight: Tensor, padding: int | None, name: str
        ) -> _OwnTable:
            return _OwnTable(
                config.num_embeddings,
                embedding_dim,
                padding,
                max_norm,
                norm_type,
                scale_grad_by_freq,
                sparse,
                weight,
                mode,
                include_last_offset,
                dtype,
                device,
                config.num_slots(cache_ratio) / config.num_embeddings,
                config.ids_freq_mapping,
                warmup_ratio,
                config.buffer_size,
                pin_weight,
                evict_strategy,
                overflow=overflow,
                name=name,
            )

        for each in tables.names:
            if each in {*dir(type(self)), *vars(self), *self._parameters}:
                raise ValueError(
                    f"a table has the name {each!r}, which is an attribute of the module: change it"
                )
        weights = tables.draw(configs, embedding_dim, dtype)
        for table, weight in zip(tables.own, weights, strict=True):
            self.add_module(
                tables.names[table], make(configs[table], weight, padding_idx, tables.names[table])
            )
        if not tables.own:
            row = torch.zeros(1, embedding_dim, dtype=dtype, device="cpu")
            self._spare = (make(TablewiseEmbeddingBagConfig(1), row, None, tables.name),)
            self.spare_weight = self._spare[0].cache_weight_mgr.param
        for bag in (*self.cached_embedding_bag_list, *self._spare):
            bag.cache_weight_mgr.axis = tables.axis
        for bag in self._spare:
            bag.cache_weight_mgr.parts = ()

    @property
    def cached_embedding_bag_list(self) -> list[CachedEmbeddingBag]:
        """The tables of this rank."""
        return [self._bag(table) for table in self._tables.own]

    def forward(
        self,
        indices: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
        shape_hook: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Reduce the rows of each bag of the whole batch; return those of this rank's part of the batch.

        Args:
            indices: Ids: (tables * bags, ids), or (ids,) with `offsets`, in the order of the tables; the same
                on all ranks, or those of this rank's part of the batch with `local_batches`.
            offsets: (tables * bags,): where each bag begins.
            per_sample_weights: A factor for each id, of the shape of `indices`; for mode "sum".
            shape_hook: Function of the output.

        Returns:
            (bags of this rank, tables * embedding_dim), in the order of the tables.

        Raises:
            ValueError: The ranks have different batches, or an id is out of range.
            RuntimeError: The batch has more distinct ids than a cache holds.
        """
        tables, has_last = self._tables, self.include_last_offset
        per_sample_weights = self._factors(per_sample_weights, self._any_param.dtype)
        batch = TableBatch(indices, offsets, per_sample_weights)
        is_whole = tables.axis.size == 1 or not self.local_batches
        if is_whole and per_sample_weights is not None:
            batch = batch._replace(factors=copy_forward_reduce_backward(per_sample_weights, tables.axis))

        def collect() -> Collected | None:
            if is_whole:
                return None
            return self._batches.collect(lambda: tables.cut(batch, has_last=has_last), param=self._any_param)

        def look_up(collected: Collected | None) -> tuple[Tensor, Sequence[int] | None]:
            self._exchange.check_job(self.parameters())
            if collected is not None:
                own = tables.merge(collected, has_last=has_last)
                return self._reduce(own, sum(collected.num_bags), is_whole=False), collected.num_bags
            batch.check(len(tables.names), has_last=has_last)
            num_bags = batch.num_bags(len(tables.names), has_last=has_last)
            return self._reduce(batch, num_bags, is_whole=True), None

        given = {"ids": indices, "offsets": offsets, "per_sample_weights": per_sample_weights}
        output = self._exchange(
            look_up,
            given if is_whole else {},
            collect,
            widths=tables.widths(self.embedding_dim),
            device=self._any_param.device,
        )
        output = tables.in_order(output, self.embedding_dim)
        return output if shape_hook is None else shape_hook(output)

    def _reduce(self, batch: TableBatch, num_bags: int, *, is_whole: bool) -> Tensor:
        """Reduce the rows of the bags of this rank's tables.

        Args:
            batch: The bags.
            num_bags: Number of bags of each table.
            is_whole: Whether `batch` has all tables.
        """
        tables, has_last = self._tables, self.include_last_offset
        parts = tables.parts(batch, num_bags, has_last=has_last, is_whole=is_whole)
        outputs = [self._bag(table)(*part) for table, part in zip(tables.own, parts, strict=True)]
        if outputs:
            return self._output(torch.cat(outputs, 1))
        # Empty bags, whose graph is that of ranks with tables.
        [spare] = self._spare
        empty = torch.zeros(num_bags + has_last, dtype=torch.int64, device=batch.ids.device)
        factors = None if batch.factors is None else batch.factors.flatten()[:0]
        output: Tensor = spare(batch.ids.flatten()[:0].long(), empty, factors)
        return self._output(output[:, :0])

    def prefetch(
        self,
        loader: Iterable[Batch],
        depth: int = 4,
        ids: IdsOf | None = None,
    ) -> Iterable[Batch]:
        """Return a loader of the same batches, whose rows come while the batch before them computes.

        With `local_batches` all ranks read it alike, each its own parts: reading a batch is a collective.

        Args:
            loader: See `CachedEmbeddingBag.prefetch`.
            depth: Number of batches that are known ahead; 0 for none.
            ids: Function that returns the ids of a batch. Default: a batch is its ids.

        Raises:
            ValueError: `depth` is not a number of batches.
            TypeError: `loader` cannot be iterated, or `ids` not be called.
        """
        check_ids_of(ids)
        tables = self._tables
        if self.local_batches and tables.axis.size > 1:
            shared = IdsOfRanks(self._batches, self._any_param, tables.cut_ids, tables.by_own_table)
            caches = [bag.cache_weight_mgr for bag in (*self.cached_embedding_bag_list, *self._spare)]
            return prefetch(loader, caches, depth, ids, shared)
        for table in self._tables.own:
            loader = self._bag(table).prefetch(loader, depth, self._tables.ids_of_table(table, ids))
        for spare in self._spare:  # the loader is read at the same times on all ranks
            loader = spare.prefetch(loader, depth, lambda batch: [])
        return loader

    def print_comm_stats(self) -> None:
        """Log hits, misses and the rows that moved so far, of the tables of this rank."""
        for bag in self.cached_embedding_bag_list:
            bag.print_comm_stats()

    @property
    def _any_param(self) -> nn.Parameter:
        return next(self.parameters())

    def _bag(self, table: int) -> CachedEmbeddingBag:
        bag = self._modules[self._tables.names[table]]
        assert isinstance(bag, CachedEmbeddingBag)
        return bag

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        tables = self._tables
        if keep_vars:  # the modules have saved tables of this rank
            return
        weights = self._exchange.succeeded(
            lambda: {table: self._bag(table).weight for table in tables.own}, device=self._any_param.device
        )
        for table, (name, rows) in enumerate(zip(tables.names, tables.sizes, strict=True)):
            whole = tables.whole(table, weights.get(table), (rows, self.embedding_dim), self._any_param)
            destination[f"{prefix}{name}.weight"] = whole.detach()

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        spare = self._parameters.pop("spare_weight")
        found: list[str] = []
        try:
            super()._load_from_state_dict(
                state_dict, prefix, local_metadata, strict, missing_keys, found, error_msgs
            )
        finally:
            self._parameters["spare_weight"] = spare
        remote = {
            f"{prefix}{name}.weight": (rows, self.embedding_dim)
            for table, (name, rows) in enumerate(zip(self._tables.names, self._tables.sizes, strict=True))
            if table not in self._tables.own
        }
        unexpected_keys.extend(key for key in found if key not in remote)
        # Tables of other ranks are checked, too: all ranks raise the same error.
        for key, shape in remote.items():
            if key not in state_dict:
                missing_keys.extend([key] if strict else [])
            elif tuple(state_dict[key].shape) != shape:
                error_msgs.append(
                    f"size mismatch for {key}: copying a param with shape {tuple(state_dict[key].shape)} "
                    f"from checkpoint, the shape of the table is {shape}."
                )


class _OwnTable(CachedEmbeddingBag):
    """A table of this rank, in a module that checks the ranks."""

    def _get_name(self) -> str:
        return "CachedEmbeddingBag"

    def _check_ranks(self, name: str) -> None:
        """Do nothing."""


ParallelCachedEmbeddingBagTablewiseSpiltCache = ParallelCachedEmbeddingBagTablewiseSplitCache
"""Documented spelling of `ParallelCachedEmbeddingBagTablewiseSplitCache`."""
