"""Slot map of a cache: which row of a table is in which slot, and which rows are evicted.

Rows are numbered by the ids of the table. The map holds indices only; `CachedParamMgr` moves the values.

[Note: coldest slots]
Rows are evicted in the order of a priority, which can only rise while a row stays. A pass over all slots
takes longer than a lookup, so it collects several times the slots that a batch needs: all those up to a bound
of the priority. The next batches choose among them until too few are left. Entering rows take slots of the
collection, so it stays complete.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import NamedTuple, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_EMPTY = -1
_HOST = "cpu"  # whatever the default device is


Indices = NDArray[np.int64]


class EvictionStrategy(Enum):
    """Order in which cached rows are evicted.

    Attributes:
        LFU: The rows of the fewest batches so far first; the least recently used first among equal ones.
        DATASET: The rows with the lowest frequency in `ids_freq_mapping` first; without it the largest ids.
        LRU: The least recently used rows first.
        BELADY: The rows whose next use is the furthest in the window of `prefetch` first, those outside of
            it before all others: by `ids_freq_mapping` as DATASET, without it as LFU.
    """

    LFU = 1
    DATASET = 2
    LRU = 3
    BELADY = 4


class CacheOverflowError(RuntimeError):
    """A batch has more distinct rows than its cache can hold."""


@dataclass(frozen=True)
class RowExchange:
    """Rows that enter and leave a cache.

    Attributes:
        slots: (n,): slots of the entering rows.
        entering: (n,): ids of the entering rows.
        left_slots: (m,): slots of the leaving rows, m <= n.
        leaving: (m,): ids of the leaving rows.
    """

    slots: Tensor
    entering: Tensor
    left_slots: Tensor
    leaving: Tensor


class KnownBatch:
    """A batch whose lookup is to come.

    Args:
        ids: (n,), int64, with duplicates.

    Attributes:
        ids: The ids.
        is_in_range: Whether they are of rows of the table.
    """

    def __init__(self, ids: Tensor) -> None:
        self.ids = ids
        self.is_in_range = True

    @cached_property
    def rows(self) -> Tensor:
        """The ids in order, without duplicates."""
        return torch.from_numpy(sorted_distinct(self.ids.numpy()))


class BatchSlots(NamedTuple):
    """Slots of a batch.

    Attributes:
        slots: The slot of each id, of the shape, type and device of the ids.
        distinct: (n,): the slots without duplicates, in host memory.
    """

    slots: Tensor
    distinct: Tensor


class _Needed(NamedTuple):
    """Slots of the rows that a batch, batches in flight and the next batches need."""

    present: Indices
    is_pinned: NDArray[np.bool_]
    later: list[Indices]


class SlotMap:
    """Map between the rows of a table and the slots of a cache.

    A cache of all rows has each in the slot of its own number. The map takes 4 bytes for each row, 8 with the
    strategy LFU and 16 more with frequencies, and up to 33 for each slot, in host memory.

    See [Note: coldest slots].

    Args:
        num_rows: Number of rows of the table.
        num_slots: Number of rows that the cache holds, at most `num_rows`.
        strategy: Order of eviction.
        fixed: A row that is always in a slot, `fixed_slot`; None for none.
        name: Name of the table in error messages.

    Attributes:
        row_of: (num_slots,): id of the row in each slot, -1 in an empty one.
        num_pins: (num_slots,): number of batches that need the row in each slot.
        num_moves: Number of times that rows have entered or left.
        table_begins: The first row of each table, if the rows are those of several.
    """

    table_begins: tuple[int, ...] = (0,)

    def __init__(
        self,
        num_rows: int,
        num_slots: int,
        *,
        strategy: EvictionStrategy,
        fixed: int | None = None,
        name: str = "the table",
    ) -> None:
        self.num_rows = num_rows
        self.num_slots = num_slots
        self.strategy = strategy
        self.name = name
        self.row_of = torch.full((num_slots,), _EMPTY, device=_HOST)
        self.num_pins = torch.zeros(num_slots, dtype=torch.int32, device=_HOST)
        self._slot_of = torch.full((num_rows,), _EMPTY, dtype=torch.int32, device=_HOST)
        self._num_batches: Tensor | None = None  # (rows,): batches in which a row was used
        if strategy in (EvictionStrategy.LFU, EvictionStrategy.BELADY):
            self._num_batches = torch.zeros(num_rows, dtype=torch.int32, device=_HOST)
        self._last_batch = torch.zeros(num_slots, dtype=torch.int64, device=_HOST)  # in which a slot was used
        self._position = torch.zeros(num_slots, dtype=torch.int32, device=_HOST)  # of `distinct`
        self._coldest: Indices | None = None  # the slots of the least priority
        self._bound = 0  # their largest priority
        self._batch = 0
        self._by_frequency: Tensor | None = None  # all ids, the most frequent first; None: in their order
        self._rank: Tensor | None = None  # the place of each id in that order
        self.num_moves = 0
        self._fixed = fixed
        if fixed is not None:
            self._place_fixed(fixed)
            self.num_pins[self.fixed_slot] = 1

    @property
    def fixed_slot(self) -> int | None:
        """Slot of the row that is never evicted, None without one."""
        if self._fixed is None:
            return None
        return self._fixed if self.num_slots == self.num_rows else 0

    @property
    def num_empty(self) -> int:
        """Number of slots without a row."""
        return int((self.row_of == _EMPTY).sum())

    def slots_of(self, rows: Tensor) -> Tensor:
        """Return the slots of rows, -1 for those that are not cached."""
        return torch.from_numpy(self._slot_of.numpy().take(rows.numpy())).long()

    def slots_after(self, exchange: RowExchange, rows: Tensor) -> Tensor:
        """Return the slots that rows will have after an exchange, all of which are cached then."""
        slots, all_rows = self._slot_of.numpy().take(rows.numpy()), rows.numpy()
        is_missing = slots < 0
        places = np.searchsorted(exchange.entering.numpy(), all_rows[is_missing])
        slots[is_missing] = exchange.slots.numpy()[places]
        return torch.from_numpy(slots).long()

    def distinct(self, slots: Tensor) -> Tensor:
        """Return slots without duplicates, without sorting."""
        # Of duplicates the last one written remains: its position is equal for exactly one of them.
        flat, position = slots.numpy(), np.arange(slots.numel(), dtype=np.int32)
        last = self._position.numpy()
        last[flat] = position
        return torch.from_numpy(flat[last.take(flat) == position])

    def check(self, ids: Tensor) -> None:
        """Check that ids are rows of the table.

        Raises:
            TypeError: `ids` are not of type int64 or int32.
            ValueError: An id is negative or at least `num_rows`.
        """
        if ids.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"ids for {self.name} are of type {ids.dtype}; they must be torch.int64 or int32")
        if not ids.numel():
            return
        least, largest = (int(value) for value in ids.aminmax())
        if least < 0 or largest >= self.num_rows:
            wrong = least if least < 0 else largest
            raise ValueError(
                f"id {wrong} is out of range for {self.name}, which has {self.num_rows} rows: ids must be "
                f"from 0 to {self.num_rows - 1}"
            )

    def plan(
        self, ids: Tensor, *, later: Sequence[Tensor] = (), is_pinned: NDArray[np.bool_] | None = None
    ) -> RowExchange:
        """Return which rows enter for a batch, and which leave: those that the strategy puts first.

        Args:
            ids: (n,), int64, the ids of the batch, in range; with duplicates.
            later: Rows of the next batches, the nearest first. They leave after all others, those of the
                furthest next use first.
            is_pinned: (num_slots,): the slots that are pinned, if others than now.

        Raises:
            CacheOverflowError: The batch has more distinct rows than there are slots that are not pinned.
        """
        slots, rows = self._slot_of.numpy().take(ids.numpy()), ids.numpy()
        is_missing = slots < 0
        entering = sorted_distinct(rows[is_missing])
        if is_pinned is None:
            is_pinned = self.num_pins.numpy() > 0
        cached = [self._slot_of.numpy().take(each.numpy()) for each in later] if entering.size else []
        needed = _Needed(slots[~is_missing], is_pinned, [each[each >= 0] for each in cached])
        return self._make_room(entering, needed)

    def apply(self, exchange: RowExchange) -> None:
        """Give slots to the rows that enter."""
        self.num_moves += 1
        slot_of, slots, entering = self._slot_of.numpy(), exchange.slots.numpy(), exchange.entering.numpy()
        slot_of[exchange.leaving.numpy()] = _EMPTY
        self.row_of.numpy()[slots] = entering
        slot_of[entering] = slots

    def drop(self, exchange: RowExchange) -> None:
        """Empty the slots of rows whose values have not come, after an interrupted `apply`, too."""
        self._slot_of[exchange.leaving] = _EMPTY
        self._slot_of[exchange.entering] = _EMPTY
        self.row_of[exchange.slots] = _EMPTY
        self._coldest = None

    def are_counted(self, slots: Tensor) -> bool:
        """Return whether all slots have rows that were used in the last batch."""
        flat = slots.numpy()
        if not flat.size:
            return True
        return bool(flat.min() >= 0 and (self._last_batch.numpy().take(flat) == self._batch).all())

    def count(self, slots: Tensor) -> None:
        """Count a batch as a use of the rows in its slots.

        Args:
            slots: (n,), without duplicates.
        """
        self._batch += 1
        used = slots.numpy()
        if self._num_batches is not None:
            self._num_batches.numpy()[self.row_of.numpy().take(used)] += 1
        self._last_batch.numpy()[used] = self._batch

    def plan_filling(self, num_rows: int) -> RowExchange:
        """Return an exchange that gives empty slots to the most frequent rows.

        Args:
            num_rows: Number of rows to cache, at most; fewer if there are fewer empty slots.
        """
        first = torch.arange(
            min(num_rows + 1, self.num_rows), device=_HOST
        )  # one of them may be in the fixed slot
        if self._by_frequency is not None:
            first = self._by_frequency[first]
        absent = first[self._slot_of[first] == _EMPTY]
        entering = absent[: min(num_rows, self.num_empty)].numpy()
        return self._make_room(entering, _Needed(entering[:0], self.num_pins.numpy() > 0, []))

    def clear(self) -> None:
        """Empty all slots but the fixed one."""
        self.num_moves += 1
        rows = self.row_of[self.row_of != _EMPTY]
        self._slot_of[rows] = _EMPTY
        self.row_of.fill_(_EMPTY)
        self._coldest = None
        if self._fixed is not None:
            self._place_fixed(self._fixed)

    def order_by(self, frequencies: Tensor) -> None:
        """Set the order of rows by frequency.

        Args:
            frequencies: (num_rows,): how often each row is used.
        """
        self._by_frequency = frequencies.argsort(descending=True, stable=True)
        self._rank = torch.empty_like(self._by_frequency)
        self._rank[self._by_frequency] = torch.arange(self.num_rows, device=_HOST)
        self._coldest = None

    def pin(self, slots: Tensor) -> None:
        """Protect the rows in slots, without duplicates, from eviction until `unpin`."""
        self.num_pins.numpy()[slots.numpy()] += 1

    def unpin(self, slots: Tensor) -> None:
        """Undo one `pin` of the same slots."""
        self.num_pins.numpy()[slots.numpy()] -= 1

    def reset_pins(self) -> None:
        """Unpin all rows but the fixed one."""
        self.num_pins.zero_()
        if self._fixed is not None:
            self.num_pins[self.fixed_slot] = 1

    def _place_fixed(self, row: int) -> None:
        slot = self.fixed_slot
        assert slot is not None
        self.row_of[slot] = row
        self._slot_of[row] = slot

    def _make_room(self, entering: Indices, needed: _Needed) -> RowExchange:
        """Choose as many rows to leave as enter, less the empty slots."""
        slots = entering
        if entering.size and self.num_slots < self.num_rows:
            slots = self._choose(entering.size, needed)
        rows = self.row_of.numpy().take(slots)
        is_used = rows != _EMPTY
        parts = slots, entering, slots[is_used], rows[is_used]
        return RowExchange(*map(torch.from_numpy, parts))

    def _choose(self, number: int, needed: _Needed) -> Indices:
        """Return slots for a number of rows: those of the least priority that are not needed.

        Raises:
            CacheOverflowError: The batch and those in flight need too many.
        """
        is_kept = np.zeros(self.num_slots, dtype=bool)
        # Rows of this batch stay as those of earlier ones do, or its own rows would evict each other.
        for each in (needed.present, *needed.later):
            is_kept[each] = True
        if self._coldest is not None:
            priority = self._priorities(self._coldest)
            is_cold = priority <= self._bound
            self._coldest, priority = self._coldest[is_cold], priority[is_cold]
            is_free = ~(is_kept.take(self._coldest) | needed.is_pinned.take(self._coldest))
            if int(is_free.sum()) >= number:
                return _least(self._coldest[is_free], priority[is_free], number)
        free = np.flatnonzero(~(is_kept | needed.is_pinned))
        if free.size < number:
            self._coldest = None  # rows enter slots outside of it
            slots = np.append(free, self._choose_needed(number - free.size, needed))
            if slots.size < number:
                self._raise_overflow(number, needed)
            return slots
        priority = self._priorities(np.arange(self.num_slots))
        num_cold = min(free.size, max(4 * number, self.num_slots // 8))
        self._bound = int(np.partition(priority[free], num_cold - 1)[num_cold - 1])
        self._coldest = np.flatnonzero(priority <= self._bound)
        return _least(free, priority[free], number)

    def _choose_needed(self, number: int, needed: _Needed) -> Indices:
        """Return slots of rows that the next batches need, of the furthest next use first; or all such."""
        distance = np.zeros(self.num_slots, dtype=np.int32)
        for steps, each in reversed([*enumerate(needed.later, 1)]):
            distance[each] = steps
        distance[needed.present] = 0
        distance[needed.is_pinned] = 0
        slots = np.flatnonzero(distance)
        if slots.size <= number:
            return slots
        num_nearer = slots.size - number
        cut = np.partition(distance[slots], num_nearer)[num_nearer]  # rows at this distance leave in part
        further, at_cut = slots[distance[slots] > cut], slots[distance[slots] == cut]
        return np.append(further, _least(at_cut, self._priorities(at_cut), number - further.size))

    def _priorities(self, slots: Indices) -> Indices:
        """Return a number for each slot; the smallest are evicted first, empty slots before all others."""
        rows = self.row_of.numpy().take(slots)
        last = self._last_batch.numpy().take(slots)
        if self._num_batches is not None and (self.strategy is EvictionStrategy.LFU or self._rank is None):
            # The count in the upper half: the last use decides between equal counts.
            num_batches = self._num_batches.numpy().take(rows, mode="wrap").astype(np.int64)
            priority: Indices = (num_batches << 32) + last
        elif self.strategy is EvictionStrategy.LRU:
            priority = last
        elif self._rank is None:
            priority = self.num_rows - rows
        else:
            priority = self.num_rows - self._rank.numpy().take(rows, mode="wrap")
        priority[rows == _EMPTY] = _EMPTY
        return priority

    def _raise_overflow(self, num_missing: int, needed: _Needed) -> NoReturn:
        is_present = np.zeros(self.num_slots, dtype=bool)
        is_present[needed.present] = True
        num_others = int((needed.is_pinned & ~is_present).sum())
        pinned, remedy = "", "raise cache_ratio, or make the batch smaller"
        if num_others:
            pinned = (
                f", {num_others} of them pinned by padding_idx or by batches that wait for backward and step"
            )
            remedy = (
                "raise cache_ratio, make batches smaller, evaluate under torch.no_grad(), or step with an "
                "optimizer of its parameters()"
            )
        num_distinct = num_missing + int(is_present.sum())
        raise CacheOverflowError(
            f"a batch has {num_distinct} distinct ids for {self.name}, and its cache holds "
            f"{self.num_slots} rows{pinned}: {remedy}"
        )


def _least(slots: Indices, priority: Indices, number: int) -> Indices:
    """Return the slots of the least priority."""
    if slots.size == number:
        return slots
    chosen: Indices = slots[np.argpartition(priority, number)[:number]]
    return chosen


def sorted_distinct(values: Indices) -> Indices:
    """Return values in order, without duplicates; torch's sort takes ten times as long as numpy's."""
    found: Indices = np.sort(values)
    is_first = np.ones(found.size, dtype=bool)
    is_first[1:] = found[1:] != found[:-1]
    distinct: Indices = found[is_first]
    return distinct
