"""Which rows of keys and values the queries of a step look at, from one step to the next.

See [Note: attention as bags of rows].
"""

from dataclasses import dataclass
from typing import Self

import numpy as np


@dataclass(frozen=True)
class SeenSlots:
    """What queries see, position by position from their first blocks on.

    Attributes:
        positions: (queries, positions) of the keys in their sequences.
        hidden: The same shape: what a query does not see.
        slots: The same shape: where keys and values are. Slots that are not seen may hold anything, and 0
            times NaN is NaN: the query's own is in their place.
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
        """Return what queries see; for the arguments see `BagIndices`."""
        width = table.shape[1] * block_size
        positions = first_blocks[:, None] * block_size + np.arange(width)
        hidden = positions > at[:, None]
        if window is not None:
            hidden |= positions <= at[:, None] - window
        slots = (table[:, :, None] * block_size + np.arange(block_size)).reshape(len(table), -1)
        return cls(positions, hidden, np.where(hidden, own_slots[:, None], slots))


class BagIndices:
    """Which rows of the keys and values queries look at, as arrays.

    Args:
        table: (queries, blocks) the blocks of each.
        at: (queries,) positions.
        first_blocks: (queries,) how many blocks are passed over.
        own_slots: (queries,) where its own key is.
        known: Heads, size of a key, query heads, window.
        block_size: Tokens of a block.
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
        """Return indices, made of those of the step before where most queries only go on."""
        name = (known, int(table[0, 0]))
        kept = None if memo is None else memo.take(name)
        if not (isinstance(kept, cls) and kept._go_on(table, at, first_blocks, own_slots)):
            kept = cls(table, at, first_blocks, own_slots, known, block_size)
        if memo is not None:
            memo.keep(name, kept)
        return kept

    def _go_on(
        self, table: np.ndarray, at: np.ndarray, first_blocks: np.ndarray, own_slots: np.ndarray
    ) -> bool:
        """Become the indices of other queries; False, and nothing is changed, where too much is new."""
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
    """The indices of the last steps, which those of the next ones differ little from.

    Most sequences go on in the blocks that they have: one position more is seen. To write the indices of all
    positions anew would be work that grows with the texts, beside an attention that does so already.
    """

    _MOST = 8  # steps that take turns: groups of lengths, shapes of layers, batches that are under way

    def __init__(self) -> None:
        self._kept: dict[object, tuple[int, BagIndices]] = {}
        self._step = 0

    def begin_step(self) -> None:
        """Say that the arrays of the step before are not in use any more."""
        self._step += 1

    def take(self, name: object) -> BagIndices | None:
        """Return what may be changed: nothing that this step has made itself."""
        step, kept = self._kept.get(name, (self._step, None))
        return kept if step < self._step else None

    def keep(self, name: object, indices: BagIndices) -> None:
        """Keep the indices of this step for one behind it."""
        if len(self._kept) >= self._MOST and name not in self._kept:
            self._kept.clear()
        self._kept[name] = self._step, indices
