"""The byte ledger: what a block of code sends, by operation and axis; and how long that takes, where asked.

Bytes are those that one rank sends when the operation runs over a ring (the papers' count): for p ranks and n
bytes,
all-gather of a slice of n: (p-1) n; reduce-scatter and all-to-all of n: (p-1)/p n; all-reduce of n:
2 (p-1)/p n; broadcast and reduce of n: (p-1)/p n, the mean over the ranks; a shift to the next rank: n. Of
an exchange, in which each rank sends what it likes to whom it likes, they are those that this rank sends.
"""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class LedgerEntry:
    """One operation of this rank.

    Attributes:
        op: Its name.
        axis: The name of the axis that it ran along.
        num_bytes: Bytes that this rank sent.
        seconds: How long this rank was in it, waiting for the others included; 0 if nobody asked.
    """

    op: str
    axis: str
    num_bytes: float
    seconds: float = 0.0


@dataclass
class Ledger:
    """The operations of a block, in order.

    Attributes:
        entries: One for each operation.
        timed: Whether they carry seconds.
    """

    entries: list[LedgerEntry] = field(default_factory=list)
    timed: bool = False

    def num_bytes(self, op: str | None = None, axis: str | None = None) -> float:
        """Return the bytes that this rank sent, of one operation and along one axis where given."""
        return sum(entry.num_bytes for entry in self._of(op, axis))

    def seconds(self, op: str | None = None, axis: str | None = None) -> float:
        """Return the time that this rank spent in them, of one operation and along one axis where given."""
        return sum(entry.seconds for entry in self._of(op, axis))

    def count(self, op: str | None = None, axis: str | None = None) -> int:
        """Return the number of operations, of one kind and along one axis where given."""
        return len(self._of(op, axis))

    def _of(self, op: str | None, axis: str | None) -> list[LedgerEntry]:
        return [entry for entry in self.entries if op in (None, entry.op) and axis in (None, entry.axis)]


open_ledgers: list[Ledger] = []
"""The ledgers whose blocks are running; where there is none, a collective notes nothing."""


@contextmanager
def ledger(*, timed: bool = False) -> Iterator[Ledger]:
    """Record what is sent within the block, by `colossalai.communication`; blocks may be nested.

    Args:
        timed: Also take the time of each operation. An accelerator is waited for before and after it, so that
            nothing overlaps with it: read the time of the whole block from a run without.
    """
    book = Ledger(timed=timed)
    open_ledgers.append(book)
    try:
        yield book
    finally:
        open_ledgers[:] = [other for other in open_ledgers if other is not book]


_RING_SHARE = {
    "all_gather": lambda p: p - 1,
    "reduce_scatter": lambda p: (p - 1) / p,
    "all_to_all": lambda p: (p - 1) / p,
    "all_reduce": lambda p: 2 * (p - 1) / p,
    "broadcast": lambda p: (p - 1) / p,
    "reduce": lambda p: (p - 1) / p,
    "shift": lambda p: 1,
}
_UNRECORDED = nullcontext()


def is_timed() -> bool:
    """Whether an open ledger takes the time."""
    return any(book.timed for book in open_ledgers)


def record(op: str, axis: str, tensor: torch.Tensor, num_ranks: int) -> AbstractContextManager[None]:
    """Return a context for an operation on `tensor`, which notes it in every open ledger."""
    if not open_ledgers:
        return _UNRECORDED
    return _recorded(op, axis, tensor.nbytes * _RING_SHARE[op](num_ranks))


def record_bytes(op: str, axis: str, num_bytes: float) -> AbstractContextManager[None]:
    """Return a context for an operation in which this rank sends so many bytes; see `record`."""
    return _recorded(op, axis, num_bytes) if open_ledgers else _UNRECORDED


@contextmanager
def _recorded(op: str, axis: str, num_bytes: float) -> Iterator[None]:
    books, timed = list(open_ledgers), is_timed()
    start = _now() if timed else 0.0
    yield
    seconds = _now() - start if timed else 0.0
    for book in books:
        book.entries.append(LedgerEntry(op, axis, num_bytes, seconds if book.timed else 0.0))


def _now() -> float:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()
