"""Membership of a rank in a group over shared memory, and the memory budget of its process."""

import atexit
import os
import re
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.util import Finalize

import torch
import torch.distributed as dist

from colossalai.communication.shared_memory._counters import Counters, waiting_of_this_system
from colossalai.communication.shared_memory._islands import Island
from colossalai.communication.shared_memory._messages import Messages
from colossalai.communication.shared_memory._segment import LEAST_BYTES, Arenas, Segment
from colossalai.communication.shared_memory._slots import Slots
from colossalai.communication.shared_memory._watch import ProcessEnds, WaitOptions, Watch
from colossalai.communication.shared_memory._work import CallQueue

VARIABLE = "COLOSSALAI_SHARED_MEMORY"
_SHARE = 16  # default bound: this fraction of the machine's memory
_END_S = 2.0  # time limit of the join of a thread
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class OpenGroups:
    """Open groups of this process, and their total memory.

    Attributes:
        ends: Descriptors of the processes of other ranks.
        arenas: Memory for tensors that other ranks read in place.
    """

    def __init__(self) -> None:
        self.ends = ProcessEnds()
        self.arenas = Arenas()
        self._open: weakref.WeakSet[Membership] = weakref.WeakSet()
        self._pid = 0

    def add(self, member: "Membership") -> None:
        """Register a group, which is closed before the interpreter ends.

        A thread in compiled code is killed at the end of the interpreter, which would abort the process.
        """
        if self._pid != os.getpid():
            self._pid = os.getpid()
            atexit.register(self.close)
            Finalize(None, self.close, exitpriority=100)  # for forked processes of multiprocessing
        self._open.add(member)

    def discard(self, member: "Membership") -> None:
        """Unregister a group."""
        self._open.discard(member)
        if not self._open:
            self.arenas.give_back()

    def budget(self, num_ranks: int) -> int:
        """Return the bytes that this process may still reserve, if `num_ranks` processes share the machine.

        Raises:
            ValueError: COLOSSALAI_SHARED_MEMORY is not a number of bytes.
        """
        taken = sum(member.num_reserved for member in list(self._open)) + self.arenas.num_reserved
        return bound_of_machine() // num_ranks - taken

    def arena_budget(self, num_ranks: int) -> int:
        """Return the bytes that tensors may still take: half of the bound, which leaves the rest to slots."""
        return bound_of_machine() // num_ranks // 2 - self.arenas.num_reserved

    def close(self) -> None:
        """Close all open groups."""
        if self._pid == os.getpid():
            for member in list(self._open):
                member.close()


def bound_of_machine(environment: Mapping[str, str] = os.environ) -> int:
    """Return the bound of the shared memory of all processes of this machine, in bytes.

    Raises:
        ValueError: COLOSSALAI_SHARED_MEMORY is not a number of bytes.
    """
    text = environment.get(VARIABLE, "")
    if not text:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // _SHARE
    found = re.fullmatch(r"\s*(\d+)\s*([KMGT]?)(i?B)?\s*", text)
    if found is None:
        raise ValueError(f"{VARIABLE} is {text!r}; it must be a number of bytes, such as 268435456 or 256MiB")
    return int(found[1]) * _UNITS[found[2]]


open_groups = OpenGroups()
"""Open groups of this process."""


class Membership:
    """Membership of this rank in an island: its slots, its messages, and their threads.

    Args:
        island: Island of the group.
        ranks: Global ranks of the island, by index.
        where: Returns the name of the group for messages.
        timeout: Time limit of the waits for other ranks, in seconds.
        options: Options of these waits.
    """

    def __init__(
        self,
        island: Island,
        *,
        ranks: Sequence[int],
        where: Callable[[], str],
        timeout: float,
        options: WaitOptions,
    ) -> None:
        segment, layout = island.segment, island.layout
        assert segment is not None, "an island without memory has no members"
        self._segment: Segment = segment
        self._num_ranks = layout.num_ranks
        self._can_lend = layout.num_ranks > 1 and len(island.arenas) == layout.num_ranks - 1
        self._pid = os.getpid()
        self._is_closed = False
        self._closing = threading.Lock()
        waiting = waiting_of_this_system()
        self._progress = Counters(segment, layout.progress, waiting, layout.num_ranks)
        self.watch = Watch(
            segment,
            layout,
            island.index,
            ranks=ranks,
            pids=island.pids,
            ends=open_groups.ends,
            where=where,
            clock=options.clock,
        )
        self.slots = Slots(
            segment,
            layout,
            island.index,
            counters=self._progress,
            watch=self.watch,
            timeout=timeout,
            budget=lambda: open_groups.budget(layout.num_ranks) + self.slots.num_reserved,
            own=open_groups.arenas.current() if self._can_lend else None,
            arenas=island.arenas,
        )
        self.messages = Messages(
            segment,
            layout,
            island.index,
            bells=Counters(segment, layout.bells, waiting, layout.num_ranks),
            alarms=Counters(segment, layout.alarms, waiting, layout.num_ranks),
            controls=Counters(segment, layout.controls, waiting, layout.num_ranks),
            watch=self.watch,
            timeout=timeout,
            may_reserve=lambda size: size <= open_groups.budget(layout.num_ranks),
            poll_s=options.message_poll_s,
        )
        self.calls = CallQueue()
        open_groups.add(self)

    @property
    def num_reserved(self) -> int:
        """Bytes of shared memory that this rank has reserved."""
        return self.slots.num_reserved + self.messages.num_reserved

    @property
    def is_of_this_process(self) -> bool:
        """Whether this process made the object; False in a forked child."""
        return self._pid == os.getpid()

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Return a flat tensor that the other ranks can read in place; None if there is no room."""
        arena = open_groups.arenas.current() if self._can_lend and self.is_of_this_process else None
        num_bytes = numel * dtype.itemsize
        if arena is None or not LEAST_BYTES <= num_bytes <= open_groups.arena_budget(self._num_ranks):
            return None
        return arena.empty(numel, dtype)

    def give_up(self, error: BaseException, call: str) -> None:
        """Publish the error of this rank, which fails the group on all ranks."""
        text = str(error) if isinstance(error, (dist.DistBackendError, RuntimeError)) else ""
        if not text or self.watch.is_closed:
            rank = self.watch.ranks[self.slots.rank]
            text = f"rank {rank} has left {call}: {type(error).__name__}{f': {error}' if str(error) else ''}"
        self.watch.give_up(text, self._progress)

    def close(self) -> None:
        """End the threads and release the memory; a no-op in a forked child."""
        with self._closing:
            if self._is_closed or not self.is_of_this_process:
                return
            self._is_closed = True
        open_groups.discard(self)
        # First, so that running calls end; then other ranks that wait for this one.
        self.watch.is_closed = True
        self.watch.leave()
        # The threads before the memory that they use.
        self.calls.stop(_END_S)
        self.messages.stop(_END_S)
        self.watch.close()
        self._segment.close()
