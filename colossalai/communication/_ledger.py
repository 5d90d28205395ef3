"""The byte ledger: what a block of code sends, by operation and axis.

Bytes are those that one rank sends when the operation runs over a ring (the papers' count): for p ranks and n
bytes,
all-gather of a slice of n: (p-1) n; reduce-scatter of n: (p-1)/p n; all-reduce of n: 2 (p-1)/p n; broadcast
and reduce of n: (p-1)/p n, the mean over the ranks; a shift to the next rank: n.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Entry:
    """One operation of this rank.

    Attributes:
        op: Its name.
        axis: The name of the axis that it ran along.
        num_bytes: Bytes that this rank sent.
    """

    op: str
    axis: str
    num_bytes: float


@dataclass
class Ledger:
    """The operations of a block, in order."""

    entries: list[Entry] = field(default_factory=list)

    def num_bytes(self, op: str | None = None, axis: str | None = None) -> float:
        """Return the bytes that this rank sent, of one operation and along one axis where given."""
        return sum(entry.num_bytes for entry in self._of(op, axis))

    def count(self, op: str | None = None, axis: str | None = None) -> int:
        """Return the number of operations, of one kind and along one axis where given."""
        return len(self._of(op, axis))

    def _of(self, op: str | None, axis: str | None) -> list[Entry]:
        return [entry for entry in self.entries if op in (None, entry.op) and axis in (None, entry.axis)]


_open: list[Ledger] = []


@contextmanager
def ledger() -> Iterator[Ledger]:
    """Record what is sent within the block, by `colossalai.communication`; blocks may be nested."""
    book = Ledger()
    _open.append(book)
    try:
        yield book
    finally:
        _open.remove(book)


_RING_SHARE = {
    "all_gather": lambda p: p - 1,
    "reduce_scatter": lambda p: (p - 1) / p,
    "all_reduce": lambda p: 2 * (p - 1) / p,
    "broadcast": lambda p: (p - 1) / p,
    "reduce": lambda p: (p - 1) / p,
    "shift": lambda p: 1,
}


def record(op: str, axis: str, tensor: torch.Tensor, num_ranks: int) -> None:
    """Note an operation on `tensor` in every open ledger."""
    if _open:
        entry = Entry(op, axis, tensor.nbytes * _RING_SHARE[op](num_ranks))
        for book in _open:
            book.entries.append(entry)
