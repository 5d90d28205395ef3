"""Ends of a wait for other ranks: a dead rank, a rank that has given up, or the time limit.

A rank that fails in a call writes its error into the segment, and the other ranks raise the same error: they
cannot continue without it, and the group has failed for all of them. The processes of the other ranks are
watched through pidfd descriptors, which become readable when a process ends in any way; so a wait for a dead
rank ends before the time limit. A wait for a late or stopped rank lasts until the limit.

A rank can also wait for a live rank that itself waits for a dead one, in another group. So a long wait also
ends when a rank of any group of this process has died, that is, has ended without leaving the group.
"""

import os
import select
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch.distributed as dist

from colossalai._clock import Clock
from colossalai.communication.shared_memory._counters import LINE, SLICE_S, Counters
from colossalai.communication.shared_memory._layout import TEXT_SIZE, SegmentLayout
from colossalai.communication.shared_memory._segment import Segment
from colossalai.monitor import late_ranks, lost_ranks

# Duration of a wait before it ends for a death outside of its group: errors within the group come first.
_OTHER_GROUPS_S = 1.0


@dataclass(frozen=True, kw_only=True)
class WaitOptions:
    """Options of the waits of a group; the `pg_options` of torch for this backend.

    Attributes:
        clock: Clock of the time limits.
        message_poll_s: Seconds between two polls of the message thread without an alarm.
    """

    clock: Clock = field(default_factory=Clock)
    message_poll_s: float = 5.0


class ProcessEnds:
    """Descriptors of other processes, one per process, counted by the groups that watch it.

    Attributes:
        watches: Watches of the groups of this process.
    """

    def __init__(self) -> None:
        self.watches: weakref.WeakSet[Watch] = weakref.WeakSet()
        self._open: dict[int, tuple[int, int]] = {}  # by pid: descriptor and number of groups

    def dead_ranks(self) -> set[int]:
        """Return the global ranks whose processes have ended without leaving a group of this process."""
        return {
            watch.ranks[index]
            for watch in list(self.watches)
            for index in watch.ended_ranks() - watch.departed_ranks()
        }

    def open(self, pid: int) -> int | None:
        """Return a descriptor that becomes readable when a process ends; None if the system has none.

        Raises:
            ProcessLookupError: The process has ended.
        """
        descriptor, count = self._open.get(pid, (-1, 0))
        if not count:
            try:
                descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                raise
            except (AttributeError, OSError):
                return None
        self._open[pid] = (descriptor, count + 1)
        return descriptor

    def close(self, pid: int) -> None:
        """Release a descriptor of `open`."""
        descriptor, count = self._open.pop(pid)
        if count > 1:
            self._open[pid] = (descriptor, count - 1)
        else:
            os.close(descriptor)


class Watch:
    """Checks of the other ranks of a group during a wait.

    Args:
        segment: Segment of the group.
        layout: Layout of the segment.
        rank: Index of this rank in the segment.
        ranks: Global ranks, by index.
        pids: Process ids of the other ranks, by index.
        ends: Process descriptors of this process.
        where: Returns the name of the group for messages.
        clock: Clock of the waits.

    Attributes:
        clock: See above.
        is_closed: Whether the group has been destroyed in this process.
    """

    def __init__(
        self,
        segment: Segment,
        layout: SegmentLayout,
        rank: int,
        *,
        ranks: Sequence[int],
        pids: Mapping[int, int],
        ends: ProcessEnds,
        where: Callable[[], str],
        clock: Clock,
    ) -> None:
        self.ranks = tuple(ranks)
        self.where = where
        self.clock = clock
        self.is_closed = False
        self._segment = segment
        self._layout = layout
        self._rank = rank
        self._broken = layout.broken // 4
        self._pids = dict(pids)
        self._ends = ends
        self._poll = select.poll()
        self._polling = threading.Lock()  # a poll object refuses concurrent calls of waiting threads
        self._index_of: dict[int, int] = {}
        self._ended_before: set[int] = set()  # ranks that had ended before the watch began
        for index, pid in pids.items():
            try:
                descriptor = ends.open(pid)
            except ProcessLookupError:
                self._ended_before.add(index)
                continue
            if descriptor is not None:
                self._index_of[descriptor] = index
                self._poll.register(descriptor, select.POLLIN)
        ends.watches.add(self)

    def close(self) -> None:
        """Release the descriptors."""
        self._ends.watches.discard(self)
        watched, self._index_of, self._poll = self._index_of, {}, select.poll()
        for index in watched.values():
            self._ends.close(self._pids[index])

    @property
    def is_broken(self) -> bool:
        """Whether some rank has given up."""
        return self._segment.words[self._broken] != 0

    def check(self) -> None:
        """Raise if some rank has given up, or if the group has been destroyed.

        Raises:
            DistBackendError: A rank has given up (with its message), or the group has been destroyed.
        """
        if self.is_closed:
            raise dist.DistBackendError(f"the group was destroyed while a call {self.where()} was under way")
        if self.is_broken:
            raise dist.DistBackendError(self._error_text())

    def ended_ranks(self) -> set[int]:
        """Return the indices of the ranks whose processes have ended."""
        index_of = self._index_of
        with self._polling:
            ended = {descriptor for descriptor, _ in self._poll.poll(0)}
        return self._ended_before | {index_of[descriptor] for descriptor in ended if descriptor in index_of}

    def all_dead_ranks(self) -> set[int]:
        """Return the global ranks that have died, of all groups of this process."""
        return self._ends.dead_ranks()

    def departed_ranks(self) -> set[int]:
        """Return the indices of the ranks that have destroyed the group."""
        ranks = range(self._layout.num_ranks)
        return {index for index in ranks if self._segment.words[self._departure_word(index)]}

    def leave(self) -> None:
        """Publish that this rank destroys the group: waits for it then fail."""
        self._segment.words[self._departure_word(self._rank)] = 1

    def give_up(self, words: str, counters: Counters) -> None:
        """Publish the error of this rank, unless another rank has given up before; wake all ranks."""
        if not self.is_broken:
            text = words.encode()[: TEXT_SIZE - 1]
            self._segment.write(self._layout.error_text(self._rank), text.ljust(TEXT_SIZE, b"\0"))
            # After the text: a rank that sees the mark reads the text.
            self._segment.words[self._broken] = 1
        for index in range(self._layout.num_ranks):
            # Waiting ranks sleep on different words; each then finds the mark in `check`.
            counters.wake(index)

    def global_ranks(self, indices: Iterable[int]) -> list[int]:
        """Return the global ranks of some indices, sorted."""
        return sorted(self.ranks[index] for index in indices)

    def _departure_word(self, index: int) -> int:
        """Return the index of the word that a rank sets when it leaves, next to its counter."""
        return (self._layout.progress + LINE * index) // 4 + 1

    def _error_text(self) -> str:
        for _ in range(2):
            for index in range(self._layout.num_ranks):
                text = self._segment.read(self._layout.error_text(index), TEXT_SIZE).rstrip(b"\0")
                if text:
                    return text.decode(errors="replace")
            self.clock.sleep(SLICE_S)  # some processors show the mark before the words
        return f"a rank {self.where()} has given up"


class WaitLimit:
    """Wait of one thread for other ranks, with a time limit.

    Args:
        watch: Watch of the group.
        missing: Returns the indices of the ranks that are still awaited.
        describe: Returns the name of the call.
        timeout: Time limit in seconds.
        is_for_any: Whether any one of the awaited ranks suffices.

    Attributes:
        timeout: Present time limit in seconds.
        is_over: Whether the wait has exceeded its time limit.
    """

    def __init__(
        self,
        watch: Watch,
        missing: Callable[[], set[int]],
        *,
        describe: Callable[[], str],
        timeout: float,
        is_for_any: bool = False,
    ) -> None:
        self._watch = watch
        self._missing = missing
        self._describe = describe
        self.timeout = timeout
        self._is_for_any = is_for_any
        self._deadline = 0.0
        self._next = 0.0
        self.is_over = False

    def begin(self) -> None:
        """Restart the time limit for the next wait."""
        self._next = 0.0
        self._deadline = 0.0

    @contextmanager
    def limited(self, timeout: float | None) -> Iterator[None]:
        """Change the time limit within the block; None: no change."""
        kept = self.timeout
        self.timeout = kept if timeout is None else timeout
        try:
            yield
        finally:
            self.timeout = kept

    def check(self) -> None:
        """Check whether the wait can continue.

        Raises:
            DistBackendError: An awaited rank has ended, a rank has given up, or the time limit is over.
        """
        self._watch.check()
        now = self._watch.clock.now()
        if now < self._next:
            return
        if not self._deadline:
            self._deadline = now + self.timeout
        self._next = now + SLICE_S
        self._check_losses(now - self._deadline + self.timeout)
        if now > self._deadline and (late := self._missing()):
            self.is_over = True
            raise dist.DistBackendError(
                late_ranks(self._watch.global_ranks(late), self._describe(), self.timeout)
            )

    def _check_losses(self, waited: float) -> None:
        """Raise if an awaited rank is lost; the ended ranks are read first, then the missing ones."""
        ended_ranks, departed_ranks = self._watch.ended_ranks(), self._watch.departed_ranks()
        dead_ranks = set(self._watch.global_ranks(ended_ranks - departed_ranks))
        if waited > _OTHER_GROUPS_S:
            dead_ranks |= self._watch.all_dead_ranks()
        missing = self._missing() if ended_ranks or departed_ranks or dead_ranks else set()
        if not missing:
            return
        lost = (ended_ranks | departed_ranks) & missing
        if self._is_for_any and lost != missing:
            lost &= ended_ranks - departed_ranks
        ranks, have_ended = set(self._watch.global_ranks(lost)), bool(lost & (ended_ranks - departed_ranks))
        if not ranks and waited > _OTHER_GROUPS_S:
            ranks, have_ended = dead_ranks, True
        if ranks:
            self._watch.check()  # the error of a rank that has given up is more precise
            raise dist.DistBackendError(lost_ranks(ranks, self._describe(), have_ended=have_ended))
