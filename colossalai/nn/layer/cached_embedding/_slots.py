"""Slot map of a cache: which row of a table is in which slot, and which rows are evicted.

Rows are numbered by the ids of the table. The map holds indices only; `CachedParamMgr` moves the values.
"""

from dataclasses import dataclass
from enum import Enum
from typing import NoReturn

import torch
from torch import Tensor

_KEPT = torch.iinfo(torch.int64).max  # priority of a slot that must not be evicted
_EMPTY = -1
_HOST = "cpu"  # whatever the default device is


class EvictionStrategy(Enum):
    """Order in which cached rows are evicted.

    Attributes:
        LFU: The rows of the fewest batches so far first; the least recently used first among equal ones.
        DATASET: The rows with the lowest frequency in `ids_freq_mapping` first; without it the largest ids.
        LRU: The least recently used rows first.
    """

    LFU = 1
    DATASET = 2
    LRU = 3


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


class SlotMap:
    """Map between the rows of a table and the slots of a cache.

    A cache of all rows has each in the slot of its own number. The map takes 8 bytes for each row (24 with
    frequencies) and 20 for each slot, in host memory.

    Args:
        num_rows: Number of rows of the table.
        num_slots: Number of rows that the cache holds, at most `num_rows`.
        strategy: Order of eviction.
        fixed: A row that is always in a slot, `fixed_slot`; None for none.
        name: Name of the table in error messages.

    Attributes:
        row_of: (num_slots,): id of the row in each slot, -1 in an empty one.
        num_pins: (num_slots,): number of batches that need the row in each slot.
        num_moves: Number of times that rows have entered.
    """

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
        self._num_batches = torch.zeros(num_rows, dtype=torch.int32, device=_HOST)  # in which a row was used
        self._last_batch = torch.zeros(num_slots, dtype=torch.int64, device=_HOST)  # in which a slot was used
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
        return self._slot_of[rows].long()

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

    def plan(self, ids: Tensor) -> RowExchange:
        """Return which rows enter for a batch, and which leave: those that the strategy puts first.

        Args:
            ids: (n,), int64, the ids of the batch, in range; with duplicates.

        Raises:
            RuntimeError: The batch has more distinct rows than there are slots that are not pinned.
        """
        slots = self.slots_of(ids)
        missing = ids[slots < 0]
        entering = missing.unique() if missing.numel() else missing
        return self._make_room(entering, present=slots[slots >= 0])

    def apply(self, exchange: RowExchange) -> None:
        """Give slots to the rows that enter."""
        self.num_moves += 1
        self._slot_of[exchange.leaving] = _EMPTY
        self.row_of[exchange.slots] = exchange.entering
        self._slot_of[exchange.entering] = exchange.slots.to(torch.int32)

    def drop(self, exchange: RowExchange) -> None:
        """Empty the slots of rows whose values have not come, after an interrupted `apply`, too."""
        self._slot_of[exchange.leaving] = _EMPTY
        self._slot_of[exchange.entering] = _EMPTY
        self.row_of[exchange.slots] = _EMPTY

    def count(self, ids: Tensor) -> tuple[Tensor, int]:
        """Count the uses of the rows of a batch, all of which have slots.

        Args:
            ids: (n,), int64, the ids of the batch, with duplicates.

        Returns:
            The slots, (n,), and the number of distinct rows.
        """
        slots = self.slots_of(ids)
        self._batch += 1
        self._num_batches[ids] = self._num_batches[ids] + 1  # once for duplicates: equal values are assigned
        self._last_batch[slots] = self._batch
        return slots, self._count_distinct(slots)

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
        return self._make_room(absent[: min(num_rows, self.num_empty)], present=absent[:0])

    def clear(self) -> None:
        """Empty all slots but the fixed one."""
        rows = self.row_of[self.row_of != _EMPTY]
        self._slot_of[rows] = _EMPTY
        self.row_of.fill_(_EMPTY)
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

    def pin(self, slots: Tensor) -> None:
        """Protect the rows in slots from eviction until `unpin`; duplicates count once."""
        self.num_pins[slots] = self.num_pins[slots] + 1

    def unpin(self, slots: Tensor) -> None:
        """Undo one `pin` of the same slots."""
        self.num_pins[slots] = self.num_pins[slots] - 1

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

    def _make_room(self, entering: Tensor, *, present: Tensor) -> RowExchange:
        """Choose as many rows to leave as enter, less the empty slots; those in the slots `present` stay."""
        if not entering.numel():
            return RowExchange(entering, entering, entering, entering)
        # Rows of this batch stay as those of earlier ones do, or its own rows would evict each other.
        kept = self.num_pins > 0
        kept[present] = True
        num_free = self.num_slots - int(kept.sum())
        if entering.numel() > num_free:
            self._raise_overflow(entering.numel(), present.unique().numel(), num_kept=int(kept.sum()))
        if self.num_slots == self.num_rows:
            return RowExchange(entering, entering, entering[:0], entering[:0])
        # Empty slots come first, kept ones last, and there are enough of the others.
        priority = self._priorities().masked_fill_(kept, _KEPT)
        slots = priority.topk(entering.numel(), largest=False, sorted=False).indices
        rows = self.row_of[slots]
        return RowExchange(slots, entering, slots[rows != _EMPTY], rows[rows != _EMPTY])

    def _priorities(self) -> Tensor:
        """Return a number for each slot; the smallest are evicted first, empty slots before all others."""
        rows = self.row_of
        if self.strategy is EvictionStrategy.LRU:
            priority = self._last_batch.clone()
        elif self.strategy is EvictionStrategy.LFU:
            # The count in the upper half: the last use decides between equal counts.
            priority = (self._num_batches[rows].long() << 32) + self._last_batch
        else:
            priority = self.num_rows - (rows if self._rank is None else self._rank[rows])
        return priority.masked_fill_(rows == _EMPTY, _EMPTY)

    def _raise_overflow(self, num_missing: int, num_present: int, *, num_kept: int) -> NoReturn:
        others = num_kept - num_present
        pinned, remedy = "", "raise cache_ratio, or make the batch smaller"
        if others:
            pinned = f", {others} of them pinned by padding_idx or by batches that wait for backward and step"
            remedy = "raise cache_ratio, make batches smaller, or evaluate under torch.no_grad()"
        raise RuntimeError(
            f"a batch has {num_missing + num_present} distinct ids for {self.name}, and its cache holds "
            f"{self.num_slots} rows{pinned}: {remedy}"
        )

    @staticmethod
    def _count_distinct(slots: Tensor) -> int:
        """Return the number of distinct slots, without sorting."""
        if not slots.numel():
            return 0
        # Of duplicates the last one written remains: its position is equal for exactly one of them.
        position = torch.arange(slots.numel(), device=_HOST)
        last = torch.empty(int(slots.max()) + 1, dtype=torch.int64, device=_HOST)
        last[slots] = position
        return int((last[slots] == position).sum())
