"""Byte ledger: bytes that a block of code sends, by operation and axis, and optionally the time it takes.

The bytes of an operation are those that one rank sends over a ring (the papers' count). For p ranks and n
bytes:
all-gather of a slice of n: (p-1) n; reduce-scatter and all-to-all of n: (p-1)/p n; all-reduce of n:
2 (p-1)/p n; broadcast and reduce of n: (p-1)/p n, the mean over the ranks; a shift to the next rank: n. For
an exchange with arbitrary sizes, they are the bytes that this rank sends.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch

from colossalai._clock import Clock

_CLOCK = Clock(now=time.perf_counter)


@dataclass(frozen=True)
class LedgerEntry:
    """One operation of this rank.

    Attributes:
        op: Name of the operation.
        axis: Name of its axis.
        num_bytes: Bytes that this rank sent.
        seconds: Duration on this rank, including the wait for the others; 0 without a timed ledger.
    """

    op: str
    axis: str
    num_bytes: float
    seconds: float = 0.0


@dataclass
class Ledger:
    """The operations of a block, in order.

    Attributes:
        entries: Entries of the operations.
        timed: Whether the entries have a duration.
        clock: Clock of the durations.
    """

    entries: list[LedgerEntry] = field(default_factory=list)
    timed: bool = False
    clock: Clock = _CLOCK

    def num_bytes(self, op: str | None = None, axis: str | None = None) -> float:
        """Return the bytes that this rank sent, optionally of one operation or along one axis."""
        return sum(entry.num_bytes for entry in self._of(op, axis))

    def seconds(self, op: str | None = None, axis: str | None = None) -> float:
        """Return the duration of the operations, optionally of one kind or along one axis."""
        return sum(entry.seconds for entry in self._of(op, axis))

    def count(self, op: str | None = None, axis: str | None = None) -> int:
        """Return the number of operations, optionally of one kind or along one axis."""
        return len(self._of(op, axis))

    def _of(self, op: str | None, axis: str | None) -> list[LedgerEntry]:
        return [entry for entry in self.entries if op in (None, entry.op) and axis in (None, entry.axis)]


open_ledgers: list[Ledger] = []
"""Ledgers of the open blocks; without one, a collective records nothing."""


@contextmanager
def ledger(*, timed: bool = False, clock: Clock = _CLOCK) -> Iterator[Ledger]:
    """Record the operations of `colossalai.communication` within the block; blocks can be nested.

    Args:
        timed: Whether to time each operation. The accelerator is synchronized before and after it, so that
            nothing overlaps with it; time the whole block in a run without a timed ledger.
        clock: Clock of the durations.
    """
    book = Ledger(timed=timed, clock=clock)
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
    """Whether an open ledger is timed."""
    return any(book.timed for book in open_ledgers)


def record(op: str, axis: str, tensor: torch.Tensor, num_ranks: int) -> AbstractContextManager[None]:
    """Return a context that records an operation on `tensor` in every open ledger."""
    if not open_ledgers:
        return _UNRECORDED
    return _recorded(op, axis, tensor.nbytes * _RING_SHARE[op](num_ranks))


def record_bytes(op: str, axis: str, num_bytes: float) -> AbstractContextManager[None]:
    """Return a context that records an operation with `num_bytes` bytes sent by this rank; see `record`."""
    return _recorded(op, axis, num_bytes) if open_ledgers else _UNRECORDED


@contextmanager
def _recorded(op: str, axis: str, num_bytes: float) -> Iterator[None]:
    books = list(open_ledgers)
    starts = _times_of(books)
    yield
    for book, start, end in zip(books, starts, _times_of(books), strict=True):
        book.entries.append(LedgerEntry(op, axis, num_bytes, end - start))


def _times_of(books: Sequence[Ledger]) -> list[float]:
    """Return the present time of each ledger, 0 of an untimed one."""
    if any(book.timed for book in books) and torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return [book.clock.now() if book.timed else 0.0 for book in books]
