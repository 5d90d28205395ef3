"""Progress counters in shared memory, and the wait for them.

Each counter is a 32-bit word in its own cache line, with one writer. It only grows, and wraps: a value is
behind another one if the difference is at least half of the range. A waiting rank spins briefly, and then
sleeps in the kernel (futex), in slices: between two slices it checks that the other ranks are alive, and
signals such as Ctrl-C are handled.

[Note: order of data and counters]
A writer stores its bytes in shared memory, calls `fence`, and sets its counter. A reader loads the counter's
new value, calls `fence`, and reads the bytes. The counter must not be visible before the bytes. Both sides
can break that: the writer's stores can become visible in another order, and the reader's loads can be
reordered. x86-64 keeps the order of stores and the order of loads, so `fence` is a no-op there. Other
processors keep neither, and `fence` is an atomic operation in the kernel (FUTEX_WAKE_OP on a private word),
which orders everything around it. No processor keeps a store before a later load of another word. So a writer
never decides by a load, after its own store, whether a reader sleeps: it always wakes. The kernel orders both
sides: under the lock that the wake-up also takes, it compares the word with the value that the sleeper saw.
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

LINE = 64  # bytes of a cache line; words of two writers in one line slow each other down
SLICE_S = 0.01  # between two checks of the other ranks in a wait; an ending job gives them 0.1 s for errors

# Before a sleep: loads alone, then loads with a yield of the core in between. With a core per rank they last
# as long as a sleep and a wake-up; with fewer cores than ranks there are fewer yields.
_SPINS, _YIELDS, _FEW_YIELDS = 20, 120, 5
_FUTEX_NUMBERS = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}
_WAIT, _WAKE, _WAKE_OP = 0, 1, 5
_ADD_ONE = (1 << 28) | (1 << 12)  # of FUTEX_WAKE_OP: add 1 to the second word; wake its sleepers if it was 0
_ALL = 2**31 - 1
_HALF, _MASK = 2**31, 2**32 - 1


def is_behind(value: int, target: int) -> bool:
    """Whether a counter with `value` has not reached `target`."""
    return (value - target) & _MASK >= _HALF


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Futex:
    """Linux futex: sleep and wake by the address of a word.

    Args:
        number: Number of the system call.
        is_ordered: Whether the processor keeps the order of stores and the order of loads.
    """

    def __init__(self, number: int, *, is_ordered: bool) -> None:
        self._call = ctypes.CDLL(None, use_errno=True).syscall
        self._number = ctypes.c_long(number)
        self._own = ctypes.c_uint32(0)
        self._is_ordered = is_ordered
        self._check()

    def fence(self) -> None:
        """Order everything before against everything after; see [Note: order of data and counters]."""
        if not self._is_ordered:
            self.add_and_wake(ctypes.addressof(self._own))

    def wake(self, address: int) -> None:
        """Wake all threads that sleep on a word."""
        self._call(self._number, ctypes.c_void_p(address), _WAKE, _ALL, None, None, 0)

    def add_and_wake(self, address: int) -> None:
        """Add one to a word with several writers atomically, and wake all threads that sleep on it."""
        where = ctypes.c_void_p(address)
        self._call(self._number, where, _WAKE_OP, _ALL, ctypes.c_void_p(0), where, ctypes.c_int(_ADD_ONE))

    def sleep(self, address: int, seen: int, seconds: float) -> None:
        """Sleep until a wake-up, for `seconds` at most; return at once if the word differs from `seen`."""
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
    """Polling wait for systems without a futex.

    Args:
        is_ordered: Whether the processor keeps the order of stores and the order of loads.
    """

    _PAUSE_S = 0.0002

    def __init__(self, *, is_ordered: bool) -> None:
        self._lock = threading.Lock()
        self._is_ordered = is_ordered

    def fence(self) -> None:
        """Order everything before against everything after.

        Operations before the first release stay before it, operations after the second acquisition stay after
        it, and the two keep their order.
        """
        for _ in range(0 if self._is_ordered else 2):
            with self._lock:
                pass

    def wake(self, address: int) -> None:
        """Do nothing: a waiting thread polls."""

    def add_and_wake(self, address: int) -> None:
        """Do nothing: a waiting thread polls all its conditions, not only this word."""

    def sleep(self, address: int, seen: int, seconds: float) -> None:
        """Sleep for a short time."""
        time.sleep(min(self._PAUSE_S, seconds))


def waiting_of_this_system() -> Futex | Polling:
    """Return the wait mechanism of this system."""
    machine = platform.machine()
    is_ordered = machine in ("x86_64", "AMD64", "i686")
    if sys.platform == "linux" and sys.maxsize > 2**32 and machine in _FUTEX_NUMBERS:
        try:
            return Futex(_FUTEX_NUMBERS[machine], is_ordered=is_ordered)
        except OSError:
            pass  # blocked by a sandbox: polling works everywhere
    return Polling(is_ordered=is_ordered)


class Counters:
    """Words of a segment, a cache line each.

    Args:
        segment: The segment.
        start: Offset of the first word in bytes, a multiple of `LINE`.
        waiting: Wait mechanism of this system.
        num_ranks: Number of ranks that wait for one another.
    """

    def __init__(self, segment: Segment, start: int, waiting: Futex | Polling, num_ranks: int) -> None:
        self._yields = _YIELDS if num_ranks <= (os.cpu_count() or 1) else _FEW_YIELDS
        self._words = segment.words
        self._first = start // 4
        self._address = segment.address + start
        self._waiting = waiting

    def value(self, index: int) -> int:
        """Return the value of a counter."""
        return self._words[self._first + index * (LINE // 4)]

    def set(self, index: int, value: int) -> None:
        """Set a counter of this rank after all earlier writes, and wake the threads that wait for it."""
        # The stores of data before the store of the counter.
        self._waiting.fence()
        self._words[self._first + index * (LINE // 4)] = value & _MASK
        # Always: a check for sleeping ranks could be reordered before the store.
        self._waiting.wake(self._address + index * LINE)

    def fence(self) -> None:
        """Order the read of a counter before the reads of the data."""
        self._waiting.fence()

    def ring(self, index: int) -> None:
        """Add one to a word that several ranks write, and wake the threads that sleep on it."""
        self._waiting.add_and_wake(self._address + index * LINE)

    def wake(self, index: int) -> None:
        """Wake the threads that wait for a counter, to check another condition."""
        self._waiting.wake(self._address + index * LINE)

    def wait_for(self, index: int, target: int, check: Callable[[], None]) -> None:
        """Wait until a counter has reached `target`.

        Args:
            index: Index of the counter.
            target: Value to wait for.
            check: Called before the first slice of sleep and after each; it raises to end the wait.
        """
        words, place = self._words, self._first + index * (LINE // 4)
        turns = 0
        while (words[place] - target) & _MASK >= _HALF:
            turns += 1
            if turns > _SPINS + self._yields:
                seen = words[place]
                check()
                if is_behind(seen, target):
                    self._waiting.sleep(self._address + index * LINE, seen, SLICE_S)
            elif turns > _SPINS:
                os.sched_yield()
        # The load of the counter before the loads of the data by the caller.
        self._waiting.fence()

    def wait_for_change(self, index: int, seen: int, seconds: float, *, spins: bool = True) -> None:
        """Sleep until a word differs from `seen`, for `seconds` at most.

        Args:
            index: Index of the word.
            seen: Last value of the word.
            seconds: Time limit.
            spins: Whether to spin first.
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
