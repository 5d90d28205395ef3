"""Indices of the key and value rows of the queries of a step, updated from one step to the next.

See [Note: attention as bags of rows].
"""

from dataclasses import dataclass
from typing import Self

import numpy as np


@dataclass(frozen=True)
class SeenSlots:
    """Slots of the keys of each query, from its first block on.

    Attributes:
        positions: (queries, positions) positions of the keys in their sequences.
        hidden: Mask of the same shape: True for keys that a query does not see.
        slots: Slots of keys and values, in the same shape. Hidden slots may contain NaN, and 0 times NaN is
            NaN, so the query's own slot replaces them.
    """

    positions: np.ndarray
    hidden: np.ndarray
    slots: np.ndarray

    @classmethod
    def of(
        cls,
        table: np.ndarray,
        at: np.ndarray,
        first_blocks: np.ndarray,
        own_slots: np.ndarray,
        window: int | None,
        block_size: int,
    ) -> Self:
        """Build the slots of queries; for the arguments see `BagIndices`."""
        width = table.shape[1] * block_size
        positions = first_blocks[:, None] * block_size + np.arange(width)
        hidden = positions > at[:, None]
        if window is not None:
            hidden |= positions <= at[:, None] - window
        slots = (table[:, :, None] * block_size + np.arange(block_size)).reshape(len(table), -1)
        return cls(positions, hidden, np.where(hidden, own_slots[:, None], slots))


class BagIndices:
    """Indices of the key and value rows of queries, as arrays.

    Args:
        table: (queries, blocks) blocks of each query.
        at: (queries,) positions.
        first_blocks: (queries,) number of skipped blocks.
        own_slots: (queries,) slot of the query's own key.
        known: Number of heads, size of a key, number of query heads, window.
        block_size: Number of tokens of a block.
    """

    def __init__(
        self,
        table: np.ndarray,
        at: np.ndarray,
        first_blocks: np.ndarray,
        own_slots: np.ndarray,
        known: tuple[int, int, int, int | None],
        block_size: int,
    ) -> None:
        self.table, self.at, self.first_blocks, self.known = table, at, first_blocks, known
        self.block_size = block_size
        num_heads, key_size, num_query_heads, window = known
        self.head = np.arange(num_query_heads) // (num_query_heads // num_heads)
        key_rows = (table[:, None, :, None] * num_heads + self.head[:, None, None]) * key_size
        key_rows = key_rows + np.arange(key_size)  # (queries, heads, blocks, features)
        seen = SeenSlots.of(table, at, first_blocks, own_slots, window, block_size)
        self.positions, self.hidden = seen.positions, seen.hidden
        value_rows = seen.slots[:, None, :] * num_heads + self.head[:, None]  # (queries, heads, positions)
        largest = max(int(key_rows.max()), int(value_rows.max()), key_rows.size)
        kind = np.int32 if largest < 2**31 else np.int64
        self.key_rows, self.value_rows = key_rows.astype(kind), value_rows.astype(kind)
        self.key_starts = np.arange(0, key_rows.size, key_size, dtype=kind)
        self.value_starts = np.arange(0, value_rows.size, table.shape[1] * block_size, dtype=kind)

    @classmethod
    def of(
        cls,
        table: np.ndarray,
        at: np.ndarray,
        first_blocks: np.ndarray,
        own_slots: np.ndarray,
        known: tuple[int, int, int, int | None],
        block_size: int,
        memo: "BagsMemo | None",
    ) -> Self:
        """Return the indices of a step, updated from those of the previous step if most queries continue."""
        name = (known, int(table[0, 0]))
        kept = None if memo is None else memo.take(name)
        if not (isinstance(kept, cls) and kept._update_in_place(table, at, first_blocks, own_slots)):
            kept = cls(table, at, first_blocks, own_slots, known, block_size)
        if memo is not None:
            memo.keep(name, kept)
        return kept

    def _update_in_place(
        self, table: np.ndarray, at: np.ndarray, first_blocks: np.ndarray, own_slots: np.ndarray
    ) -> bool:
        """Update the indices in place for other queries; return False without changes if too many are new."""
        window = self.known[-1]
        if self.table.shape != table.shape or window is not None:
            return False
        goes_on = (self.at + 1 == at) & (self.first_blocks == first_blocks) & (self.table == table).all(1)
        others = np.flatnonzero(~goes_on)
        if 2 * len(others) > len(at):
            return False
        if len(others):
            new = BagIndices(
                table[others],
                at[others],
                first_blocks[others],
                own_slots[others],
                self.known,
                self.block_size,
            )
            if new.key_rows.dtype != self.key_rows.dtype:
                return False
            for name in ("key_rows", "value_rows", "hidden", "positions"):
                getattr(self, name)[others] = getattr(new, name)
        self.table, self.at, self.first_blocks = table, at, first_blocks
        rows = np.flatnonzero(goes_on)
        places = at[rows] - first_blocks[rows] * self.block_size
        self.hidden[rows, places] = False
        self.value_rows[rows, :, places] = own_slots[rows, None] * self.known[0] + self.head
        return True


class BagsMemo:
    """Indices of the last steps, to be updated for the next ones.

    Most sequences continue in their blocks, with one more visible position. Building the indices of all
    positions again would cost time in proportion to the context, in addition to attention itself.
    """

    _MOST = 8  # alternating steps: groups of lengths, shapes of layers, batches in flight

    def __init__(self) -> None:
        self._kept: dict[object, tuple[int, BagIndices]] = {}
        self._step = 0

    def begin_step(self) -> None:
        """Begin a step: the arrays of the previous step are not in use any more."""
        self._step += 1

    def take(self, name: object) -> BagIndices | None:
        """Return indices that can be modified: not those of the current step."""
        step, kept = self._kept.get(name, (self._step, None))
        return kept if step < self._step else None

    def keep(self, name: object, indices: BagIndices) -> None:
        """Store the indices of this step for a later one."""
        if len(self._kept) >= self._MOST and name not in self._kept:
            self._kept.clear()
        self._kept[name] = self._step, indices
