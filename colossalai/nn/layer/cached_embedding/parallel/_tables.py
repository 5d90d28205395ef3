"""Tables of embeddings on several ranks, as one rank sees them, and batches of several tables."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from colossalai.communication import broadcast
from colossalai.context import Axis
from colossalai.nn.layer.cached_embedding._bag import check_offsets
from colossalai.nn.layer.cached_embedding._prefetch import IdsOf, flat_ids
from colossalai.nn.layer.cached_embedding.parallel._batches import Collected, RankBags, joined
from colossalai.nn.layer.cached_embedding.parallel._placement import (
    TablePlacement,
    TablewiseEmbeddingBagConfig,
    place_tables,
)

_BLOCK_BYTES = 1 << 24  # sent at a time


class TableBatch(NamedTuple):
    """Bags of several tables: all of the first one, then all of the second.

    Attributes:
        ids: (bags of all tables, ids), or (ids,) with `offsets`.
        offsets: (bags of all tables,): where each bag begins; with the number of ids at the end, if the
            module includes it.
        factors: A factor for each id.
    """

    ids: Tensor
    offsets: Tensor | None
    factors: Tensor | None

    def num_bags(self, num_tables: int, *, has_last: bool) -> int:
        """Return the number of bags of each table."""
        total = len(self.ids) if self.offsets is None else len(self.offsets) - has_last
        return total // num_tables if num_tables else 0

    def check(self, num_tables: int, *, has_last: bool, hint: str = "") -> None:
        """Check that each table has as many bags.

        Args:
            num_tables: Number of tables.
            has_last: Whether offsets end with the number of ids.
            hint: End of an error message.

        Raises:
            ValueError: The number of bags is not a multiple of `num_tables`, there are no bags, or offsets do
                not rise.
        """
        if self.offsets is None and self.ids.dim() != 2:
            raise ValueError(
                f"indices have the shape {tuple(self.ids.shape)}: pass offsets with ids of one dimension, or "
                "a bag in each row"
            )
        total = len(self.ids) if self.offsets is None else len(self.offsets) - has_last
        if self.offsets is not None and len(self.offsets):
            check_offsets(self.offsets, num_ids=len(self.ids))
        if total < 0 or total % num_tables:
            raise ValueError(
                f"a batch of {total} bags is not one of {num_tables} tables: it has as many bags for each, "
                f"all of the first table, then those of the second{hint}"
            )


@dataclass(frozen=True)
class PlacedTables:
    """Tables of several ranks, as one rank sees them; all ids are numbered over the tables in their order.

    Args:
        name: Name of the tables together, in error messages.
        names: Name of each table.
        sizes: Number of rows of each.
        placement: The rank of each.
        axis: The ranks.
        padding_idx: Id within each table that does not contribute to a bag.
    """

    name: str
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    placement: TablePlacement
    axis: Axis
    padding_idx: int | None

    @staticmethod
    def of(
        configs: Sequence[TablewiseEmbeddingBagConfig],
        axis: Axis,
        *,
        cache_ratio: float,
        padding_idx: int | None,
        name: str,
    ) -> "PlacedTables":
        """Return the tables of a module, placed on the ranks of an axis.

        Raises:
            ValueError: Two tables have one name, or `padding_idx` is not a row of each.
        """
        placement = place_tables(configs, axis.size, cache_ratio=cache_ratio)
        names = tuple(config.name or f"table_{number}" for number, config in enumerate(configs))
        if twice := [each for each in names if names.count(each) > 1]:
            raise ValueError(f"two tables have the name {twice[0]!r}; give each its own")
        for table, config in zip(names, configs, strict=True):
            num_rows = config.num_embeddings
            if padding_idx is not None and not -num_rows <= padding_idx < num_rows:
                raise ValueError(
                    f"padding_idx is {padding_idx}, and {table} has {num_rows} rows: it must be an id within "
                    "each table"
                )
        sizes = tuple(config.num_embeddings for config in configs)
        return PlacedTables(name, names, sizes, placement, axis, padding_idx)

    @cached_property
    def begins(self) -> list[int]:
        """The first id of each table, and the end of the last one."""
        return [0, *accumulate(self.sizes)]

    @cached_property
    def own(self) -> list[int]:
        """Numbers of the tables of this rank."""
        return self.placement.tables_of(self.axis.rank)

    @cached_property
    def own_begins(self) -> list[int]:
        """The first row of each table of this rank, one after the other."""
        return self.begins_on(self.axis.rank)

    def begins_on(self, rank: int) -> list[int]:
        """Return the first row of each table of a rank, one after the other."""
        return [0, *accumulate(self.sizes[table] for table in self.placement.tables_of(rank))][:-1]

    def draw(
        self, configs: Sequence[TablewiseEmbeddingBagConfig], dim: int, dtype: torch.dtype | None
    ) -> Iterator[Tensor]:
        """Yield the values of each table of this rank, (rows, dim).

        A table without `initial_weight` is drawn from a seed of its own, and is the same on any ranks. The
        random state has advanced equally on all ranks afterwards.

        Raises:
            ValueError: An `initial_weight` has another shape.
            TypeError: An `initial_weight` is not a tensor.
        """
        dtype = dtype or torch.get_default_dtype()
        seeds = torch.randint(2**31, (len(configs),), device="cpu").tolist()
        for number, config in enumerate(configs):
            shape = (config.num_embeddings, dim)
            if config.initial_weight is None:
                continue
            if not isinstance(config.initial_weight, Tensor):
                raise TypeError(f"initial_weight of {self.names[number]} is not a tensor; it must be one")
            if tuple(config.initial_weight.shape) != shape:
                raise ValueError(
                    f"initial_weight of {self.names[number]} has the shape "
                    f"{tuple(config.initial_weight.shape)}; it must be (num_embeddings, embedding_dim), "
                    f"{shape}"
                )
        for number in self.own:
            weight = configs[number].initial_weight
            if weight is None:
                generator = torch.Generator().manual_seed(seeds[number])
                weight = torch.empty(self.sizes[number], dim, dtype=dtype, device="cpu")
                weight.normal_(generator=generator)
                if self.padding_idx is not None:
                    weight[self.padding_idx].zero_()
                yield weight
            else:  # a copy: the values can be those of another module
                yield torch.empty(weight.shape, dtype=dtype, device="cpu").copy_(weight.detach())

    def parts(
        self, batch: TableBatch, num_bags: int, *, has_last: bool, is_whole: bool = True
    ) -> Iterator[TableBatch]:
        """Yield the bags of each table of this rank, with ids within the table.

        Args:
            batch: The bags of all tables, or those of this rank.
            num_bags: Number of bags of each table.
            has_last: Whether offsets end with the number of ids.
            is_whole: Whether it has all tables; else ids are numbered over those of this rank.

        Raises:
            ValueError: An id is not one of its table.
        """
        ids, offsets, factors = batch
        bounds: list[int] = []
        if offsets is not None:
            num_tables = len(self.sizes) if is_whole else len(self.own)
            bounds = offsets[::num_bags].tolist() if num_bags else [0] * num_tables
            bounds = [*bounds[:num_tables], int(offsets[-1]) if has_last else len(ids)]
        for place, table in enumerate(self.own):
            number, begin = (table, self.begins[table]) if is_whole else (place, self.own_begins[place])
            bags = slice(number * num_bags, (number + 1) * num_bags)
            span = bags if offsets is None else slice(bounds[number], bounds[number + 1])
            own_ids = ids[span] - begin
            self._check_ids(own_ids, table, begin=begin, is_whole=is_whole)
            own_offsets = None
            if offsets is not None:
                own_offsets = offsets[bags] - bounds[number]
                if has_last:
                    own_offsets = torch.cat([own_offsets, own_offsets.new_tensor([len(own_ids)])])
            yield TableBatch(own_ids, own_offsets, None if factors is None else factors[span])

    def join(self, parts: Sequence[TableBatch], batch: TableBatch, *, has_last: bool) -> TableBatch:
        """Return parts of the tables of this rank as one batch, with ids numbered over these.

        Args:
            parts: The result of `parts`.
            batch: The batch of it.
            has_last: Whether offsets end with the number of ids.
        """
        shifted = [part.ids + begin for part, begin in zip(parts, self.own_begins, strict=True)]
        ids = torch.cat([batch.ids[:0], *shifted])
        factors = None
        if batch.factors is not None:
            factors = torch.cat(
                [batch.factors[:0], *(part.factors for part in parts if part.factors is not None)]
            )
        if batch.offsets is None:
            return TableBatch(ids, None, factors)
        num_before = [0, *accumulate(len(part.ids) for part in parts)]
        offsets = [
            (part.offsets[:-1] if has_last else part.offsets) + before
            for part, before in zip(parts, num_before[:-1], strict=True)
            if part.offsets is not None
        ]
        last = batch.offsets.new_tensor([num_before[-1]] if has_last else [])
        return TableBatch(ids, torch.cat([batch.offsets[:0], *offsets, last]), factors)

    def cut(self, batch: TableBatch, *, has_last: bool) -> tuple[int, list[RankBags]]:
        """Return the number of bags of each table, and the bags of each rank's tables, numbered over these.

        Args:
            batch: The bags of all tables, for this rank's part of the batch.
            has_last: Whether offsets end with the number of ids.

        Raises:
            ValueError: The batch is not one of all tables, or an id is not one of its table.
            TypeError: The ids are not integers.
        """
        whole = RankBags.of(*batch, has_last=has_last)
        batch.check(len(self.names), has_last=has_last)
        tables = whole.split(len(self.names))
        for table, bags in enumerate(tables):
            self._check_ids(bags.ids - self.begins[table], table, begin=self.begins[table], is_whole=True)

        def of_rank(rank: int) -> RankBags:
            parts = [
                tables[table]._replace(ids=tables[table].ids + (begin - self.begins[table]))
                for table, begin in zip(self.placement.tables_of(rank), self.begins_on(rank), strict=True)
            ]
            return joined([tables[0].none, *parts])

        return len(tables[0].lengths), [of_rank(rank) for rank in range(self.axis.size)]

    def merge(self, collected: Collected, *, has_last: bool) -> TableBatch:
        """Return the parts of all ranks as one batch of the tables of this rank.

        Args:
            collected: The bags of this rank's tables from each rank.
            has_last: Whether offsets end with the number of ids.
        """
        by_rank = [part.split(len(self.own)) for part in collected.parts]
        by_table = [bags for table in zip(*by_rank, strict=True) for bags in table]
        whole = joined([collected.parts[0].none, *by_table])
        return TableBatch(whole.ids, whole.offsets(has_last=has_last), whole.factors)

    @cached_property
    def own_padding(self) -> list[int]:
        """The ids of padding, numbered over the tables of this rank."""
        if self.padding_idx is None:
            return []
        return [
            begin + self.padding_idx % self.sizes[table]
            for begin, table in zip(self.own_begins, self.own, strict=True)
        ]

    def with_one_padding(self, ids: Tensor) -> Tensor:
        """Return ids, numbered over the tables of this rank, with the first id of padding in place of all."""
        for row in self.own_padding[1:]:
            ids = ids.masked_fill(ids == row, self.own_padding[0])
        return ids

    def in_order(self, output: Tensor, dim: int) -> Tensor:
        """Return bags, (bags, tables * dim), from the order of ranks in the order of tables."""
        by_rank = [table for rank in range(self.axis.size) for table in self.placement.tables_of(rank)]
        if by_rank == sorted(by_rank):
            return output
        order = torch.tensor(by_rank, device=output.device).argsort()
        by_table = output.view(len(output), len(by_rank), dim)
        return by_table.index_select(1, order).view(len(output), len(by_rank) * dim)

    def widths(self, dim: int) -> list[int]:
        """Return the number of columns of each rank's bags."""
        return [len(self.placement.tables_of(rank)) * dim for rank in range(self.axis.size)]

    def whole(self, table: int, own: Tensor | None, shape: tuple[int, int], like: Tensor) -> Tensor:
        """Return a table on all ranks, in host memory; collective.

        Args:
            table: Number of the table.
            own: Its values on its owner, None on other ranks.
            shape: Its shape.
            like: A tensor of its data type, on the device of tensors that are sent.
        """
        if self.axis.size == 1:
            assert own is not None, "one rank has all tables"
            return own
        owner = self.axis.ranks[self.placement.ranks[table]]
        # A copy of an own table, too: the tables of all ranks stay those of one step.
        whole = torch.empty(shape, dtype=like.dtype, device="cpu") if own is None else own.detach().clone()
        size = max(_BLOCK_BYTES // max(whole[:1].nbytes, 1), 1)
        for block in whole.split(size):
            # Joined by all ranks of the axis; the owner sends.
            sent = broadcast(block.to(like.device), owner, self.axis)
            if own is None:
                block.copy_(sent)
        return whole

    def cut_ids(self, ids: Tensor) -> list[Tensor]:
        """Return the ids for each rank, numbered over its tables; for prefetch."""
        tables = [self.ids_of_table(table, None)(ids) for table in range(len(self.names))]
        return [
            torch.cat(
                [
                    ids[:0],
                    *(
                        tables[table] + begin
                        for table, begin in zip(
                            self.placement.tables_of(rank), self.begins_on(rank), strict=True
                        )
                    ),
                ]
            )
            for rank in range(self.axis.size)
        ]

    def by_own_table(self, ids: Tensor) -> list[Tensor]:
        """Return ids, numbered over the tables of this rank, for each of them, or none for a spare one."""
        own = [
            ids[(ids >= begin) & (ids < begin + self.sizes[table])] - begin
            for table, begin in zip(self.own, self.own_begins, strict=True)
        ]
        return own or [ids[:0]]

    def ids_of_own(self, ids: IdsOf | None, *, is_whole: bool) -> IdsOf:
        """Return the function of a batch's ids on this rank, as they are looked up; for prefetch.

        Args:
            ids: The function of a batch's ids; None if a batch is its ids.
            is_whole: Whether a batch has all tables; else ids are numbered over those of this rank.
        """

        def own_ids(batch: Any) -> list[Tensor]:
            if not is_whole:
                return [self.with_one_padding(flat_ids(batch, ids))]
            parts = (self.ids_of_table(table, ids)(batch) for table in self.own)
            return [
                self.with_one_padding(part + begin)
                for part, begin in zip(parts, self.own_begins, strict=True)
            ]

        return own_ids

    def ids_of_table(self, table: int, ids: IdsOf | None) -> Callable[[Any], Tensor]:
        """Return the function of a batch's ids within a table; for prefetch."""
        begin, end = self.begins[table : table + 2]

        def table_ids(batch: Any) -> Tensor:
            flat = flat_ids(batch, ids)
            return flat[(flat >= begin) & (flat < end)] - begin

        return table_ids

    def _check_ids(self, ids: Tensor, table: int, *, begin: int, is_whole: bool) -> None:
        is_outside = (ids < 0) | (ids >= self.sizes[table])
        if is_outside.any():
            numbering = "ids are numbered over all tables"
            if not is_whole:
                numbering = (
                    "with already_split_along_rank=True a batch has the tables of this rank, with ids "
                    "numbered over these; pass False for a batch of all tables"
                )
            raise ValueError(
                f"id {int(ids[is_outside][0]) + begin} is out of range for {self.names[table]} of "
                f"{self.name}, whose ids are from {begin} to {begin + self.sizes[table] - 1}: {numbering}"
            )
