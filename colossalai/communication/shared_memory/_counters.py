"""Counters in shared memory: what a rank has done, and how the others wait for it.

Each counter is a 32-bit word with a cache line and one writer of its own. It only grows, and wraps: one value
is behind another one if the difference is at least half of what a word holds. Who waits looks some times, and
sleeps in the kernel then (futex), by slices: between two slices it looks whether those it waits for still
live, and a signal such as Ctrl-C gets its turn.

[Note: no reader sees half a message]
A writer puts its bytes into shared memory, calls `fence`, and sets its counter. A reader sees the counter's
new value, calls `fence`, and reads the bytes. What must not happen is that the counter is seen before the
bytes, by either side's doing: the writer's stores may become visible in another order, and the reader's loads
may be done in another order than the program's. x86-64 keeps the order of stores among one another and that
of loads among one another, so there `fence` is nothing. Other processors keep neither, and `fence` is an
atomic operation in the kernel (FUTEX_WAKE_OP on a word of our own), which orders everything around it.
Neither processor keeps a store before a later load of something else. So nobody here decides by a load, after
its own store, whether somebody sleeps: who has set a counter always wakes. The kernel orders both sides
there: it compares the word with what the sleeper has seen, under a lock that the waking takes as well.
tests/communication/shared_memory/test_model.py runs all interleavings of it, with and without fences.
"""

import ctypes
import errno
import os
import platform
import sys
import threading
import time
from collections.abc import Callable

from colossalai.communication.shared_memory._segment import Segment

LINE = 64  # bytes that processors exchange as one; words of two writers in one line slow each other down
SLICE_S = 0.01  # of a wait, between two looks at the others: who ends a job gives them 0.1 s to say why

# Before sleeping: looks alone, then looks between which another process may have the core. Where each rank
# has a core they last as long as falling asleep and waking up; where ranks share cores, others need these.
_SPINS, _YIELDS, _FEW_YIELDS = 20, 120, 5
_FUTEX_NUMBERS = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}
_WAIT, _WAKE, _WAKE_OP = 0, 1, 5
_ADD_ONE = (1 << 28) | (1 << 12)  # of FUTEX_WAKE_OP: add 1 to the second word; wake its sleepers if it was 0
_ALL = 2**31 - 1
_HALF, _MASK = 2**31, 2**32 - 1


def is_behind(value: int, target: int) -> bool:
    """Whether a counter that is at `value` has not come to `target`."""
    return (value - target) & _MASK >= _HALF


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Futex:
    """Sleeping and waking by the address of a word, of Linux.

    Args:
        number: Of the system call.
        is_ordered: Whether the processor keeps the order of stores, and that of loads.
    """

    def __init__(self, number: int, *, is_ordered: bool) -> None:
        self._call = ctypes.CDLL(None, use_errno=True).syscall
        self._number = ctypes.c_long(number)
        self._own = ctypes.c_uint32(0)
        self._is_ordered = is_ordered
        self._check()

    def fence(self) -> None:
        """Order everything before against everything after; see [Note: no reader sees half a message]."""
        if not self._is_ordered:
            self.add_and_wake(ctypes.addressof(self._own))

    def wake(self, address: int) -> None:
        """Wake all who sleep at a word."""
        self._call(self._number, ctypes.c_void_p(address), _WAKE, _ALL, None, None, 0)

    def add_and_wake(self, address: int) -> None:
        """Add one to a word that several may write, in one piece, and wake all who sleep at it."""
        where = ctypes.c_void_p(address)
        self._call(self._number, where, _WAKE_OP, _ALL, ctypes.c_void_p(0), where, ctypes.c_int(_ADD_ONE))

    def sleep(self, address: int, seen: int, seconds: float) -> None:
        """Sleep until somebody wakes or `seconds` are over; not at all if the word is not `seen` now."""
        limit = _TimeSpec(int(seconds), int(seconds % 1 * 1e9))
        self._call(
            self._number,
            ctypes.c_void_p(address),
            _WAIT,
            ctypes.c_uint32(seen),
            ctypes.byref(limit),
            None,
            0,
        )

    def _check(self) -> None:
        word = ctypes.c_uint32(7)
        self.add_and_wake(ctypes.addressof(word))
        ctypes.set_errno(0)
        self.sleep(ctypes.addressof(word), 7, SLICE_S)
        if word.value != 8 or ctypes.get_errno() != errno.EAGAIN:
            raise OSError(ctypes.get_errno(), "this system does not let a process sleep at a word")


class Polling:
    """Waiting by looking again and again, where there is no futex.

    Args:
        is_ordered: Whether the processor keeps the order of stores, and that of loads.
    """

    _PAUSE_S = 0.0002

    def __init__(self, *, is_ordered: bool) -> None:
        self._lock = threading.Lock()
        self._is_ordered = is_ordered

    def fence(self) -> None:
        """Order everything before against everything after.

        What comes before the first release stays before it, what comes after the second acquisition stays
        after it, and the two keep their order.
        """
        for _ in range(0 if self._is_ordered else 2):
            with self._lock:
                pass

    def wake(self, address: int) -> None:
        """Wake nobody: who waits looks by itself."""

    def add_and_wake(self, address: int) -> None:
        """Do nothing: who waits looks at the rest again, and not only at this word."""

    def sleep(self, address: int, seen: int, seconds: float) -> None:
        """Pause a little."""
        time.sleep(min(self._PAUSE_S, seconds))


def waiting_of_this_system() -> Futex | Polling:
    """Return how processes wait here."""
    machine = platform.machine()
    is_ordered = machine in ("x86_64", "AMD64", "i686")
    if sys.platform == "linux" and sys.maxsize > 2**32 and machine in _FUTEX_NUMBERS:
        try:
            return Futex(_FUTEX_NUMBERS[machine], is_ordered=is_ordered)
        except OSError:
            pass  # a sandbox that has closed it: polling works everywhere
    return Polling(is_ordered=is_ordered)


class Counters:
    """Some words of a segment, a cache line each.

    Args:
        segment: The memory.
        start: Where the first one lies, a multiple of `LINE`.
        waiting: How processes wait here.
        num_ranks: How many ranks wait for one another.
    """

    def __init__(self, segment: Segment, start: int, waiting: Futex | Polling, num_ranks: int) -> None:
        self._yields = _YIELDS if num_ranks <= (os.cpu_count() or 1) else _FEW_YIELDS
        self._words = segment.words
        self._first = start // 4
        self._address = segment.address + start
        self._waiting = waiting

    def value(self, index: int) -> int:
        """Return where a counter is."""
        return self._words[self._first + index * (LINE // 4)]

    def set(self, index: int, value: int) -> None:
        """Set a counter of this rank, after all that it stands for, and wake who waits for it."""
        self._waiting.fence()
        self._words[self._first + index * (LINE // 4)] = value & _MASK
        self._waiting.wake(self._address + index * LINE)

    def fence(self) -> None:
        """Order what was read of a counter before what is read of the data."""
        self._waiting.fence()

    def ring(self, index: int) -> None:
        """Add one to a word that several ranks write, and wake who sleeps at it."""
        self._waiting.add_and_wake(self._address + index * LINE)

    def wake(self, index: int) -> None:
        """Wake who waits for a counter, to look at something else."""
        self._waiting.wake(self._address + index * LINE)

    def wait_for(self, index: int, target: int, look: Callable[[], None]) -> None:
        """Wait until a counter has come to `target`.

        Args:
            index: The counter.
            target: Where to.
            look: Called before the first slice of sleep and after each; it raises to end the wait.
        """
        words, place = self._words, self._first + index * (LINE // 4)
        turns = 0
        while (words[place] - target) & _MASK >= _HALF:
            turns += 1
            if turns > _SPINS + self._yields:
                seen = words[place]
                look()
                if is_behind(seen, target):
                    self._waiting.sleep(self._address + index * LINE, seen, SLICE_S)
            elif turns > _SPINS:
                os.sched_yield()
        self._waiting.fence()

    def wait_for_change(self, index: int, seen: int, seconds: float, *, spins: bool = True) -> None:
        """Sleep until a word is not `seen` any more, or `seconds` are over.

        Args:
            index: Its place.
            seen: What it was.
            seconds: The time limit.
            spins: Whether to look for a while first.
        """
        words, place = self._words, self._first + index * (LINE // 4)
        turns = 0 if spins else _SPINS + self._yields
        while words[place] == seen and turns < _SPINS + self._yields:
            turns += 1
            if turns > _SPINS:
                os.sched_yield()
        if words[place] == seen:
            self._waiting.sleep(self._address + index * LINE, seen, seconds)
        self._waiting.fence()
