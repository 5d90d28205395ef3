"""What ends a wait for other ranks: one that has died, one that has given up, or the time limit.

A rank that fails in a call writes why into the segment, for the others to say the same: they cannot go on
without it, and the group is over for all of them. The processes of the others are watched by descriptors of
the kernel (pidfd), which become readable when a process ends, however it ends; so nobody waits out a time
limit for a rank that is gone. A rank that is merely late, or stopped, is waited for until the limit.

Whoever waits may wait for a rank that lives and is itself kept by a dead one, in another group. So a wait
that lasts ends also when a rank of any group of this process has died: ended without leaving it.
"""

import os
import select
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch.distributed as dist

from colossalai.communication.shared_memory._counters import LINE, SLICE_S, Counters
from colossalai.communication.shared_memory._layout import WORDS, SegmentLayout
from colossalai.communication.shared_memory._segment import Segment
from colossalai.monitor import late_ranks, lost_ranks

# Of a wait, until it is ended by a death outside of its group: those within it may tell first.
_ELSEWHERE_S = 1.0


class ProcessEnds:
    """Descriptors of other processes, one for each however many groups watch it; it ends with the last.

    Attributes:
        watches: Of the groups of this process.
    """

    def __init__(self) -> None:
        self.watches: weakref.WeakSet[Watch] = weakref.WeakSet()
        self._open: dict[int, tuple[int, int]] = {}  # by pid: descriptor and number of groups

    def died(self) -> set[int]:
        """Return the global ranks whose processes have ended without leaving a group of this process."""
        return {watch.ranks[index] for watch in list(self.watches) for index in watch.gone() - watch.left()}

    def open(self, pid: int) -> int | None:
        """Return a descriptor that becomes readable when a process ends; None where there is none.

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
        """Give back what `open` has returned."""
        descriptor, count = self._open.pop(pid)
        if count > 1:
            self._open[pid] = (descriptor, count - 1)
        else:
            os.close(descriptor)


class Watch:
    """What this rank looks at while it waits in a group.

    Args:
        segment: Of the group.
        layout: Of the segment.
        rank: This rank's index in the segment.
        ranks: The global ranks, by index.
        pids: Of the processes of the others, by index.
        ends: The descriptors of this process.
        where: What is the group called in messages?

    Attributes:
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
    ) -> None:
        self.ranks = tuple(ranks)
        self.where = where
        self.is_closed = False
        self._segment = segment
        self._layout = layout
        self._rank = rank
        self._broken = layout.broken // 4
        self._pids = dict(pids)
        self._ends = ends
        self._poll = select.poll()
        self._polling = threading.Lock()  # threads that wait look at the same time, which a poll refuses
        self._index_of: dict[int, int] = {}
        self._gone: set[int] = set()  # those that were before they could be watched
        for index, pid in pids.items():
            try:
                descriptor = ends.open(pid)
            except ProcessLookupError:
                self._gone.add(index)
                continue
            if descriptor is not None:
                self._index_of[descriptor] = index
                self._poll.register(descriptor, select.POLLIN)
        ends.watches.add(self)

    def close(self) -> None:
        """Give the descriptors back."""
        self._ends.watches.discard(self)
        watched, self._index_of, self._poll = self._index_of, {}, select.poll()
        for index in watched.values():
            self._ends.close(self._pids[index])

    @property
    def is_broken(self) -> bool:
        """Whether some rank has given up."""
        return self._segment.words[self._broken] != 0

    def check(self) -> None:
        """Raise what some rank has given up with, or that the group has been destroyed.

        Raises:
            DistBackendError: Some rank has; the message is its own.
        """
        if self.is_closed:
            raise dist.DistBackendError(f"the group was destroyed while a call {self.where()} was under way")
        if self.is_broken:
            raise dist.DistBackendError(self._words())

    def gone(self) -> set[int]:
        """Return the indices of the ranks whose processes have ended."""
        index_of = self._index_of
        with self._polling:
            ended = {descriptor for descriptor, _ in self._poll.poll(0)}
        return self._gone | {index_of[descriptor] for descriptor in ended if descriptor in index_of}

    def died_anywhere(self) -> set[int]:
        """Return the global ranks that have died, of all groups of this process."""
        return self._ends.died()

    def left(self) -> set[int]:
        """Return the indices of the ranks that have destroyed the group."""
        ranks = range(self._layout.num_ranks)
        return {index for index in ranks if self._segment.words[self._left(index)]}

    def leave(self) -> None:
        """Say that this rank destroys the group: whoever waits for it waits in vain."""
        self._segment.words[self._left(self._rank)] = 1

    def give_up(self, words: str, counters: Counters) -> None:
        """Tell the others that this rank cannot go on, unless one has told already; and wake them."""
        if not self.is_broken:
            text = words.encode()[: WORDS - 1]
            self._segment.write(self._layout.words(self._rank), text.ljust(WORDS, b"\0"))
            self._segment.words[self._broken] = 1
        for index in range(self._layout.num_ranks):
            counters.wake(index)

    def global_ranks(self, indices: Iterable[int]) -> list[int]:
        """Return the global ranks of some of this group."""
        return sorted(self.ranks[index] for index in indices)

    def _left(self, index: int) -> int:
        """Return the place of the word that a rank sets when it leaves, beside its counter."""
        return (self._layout.progress + LINE * index) // 4 + 1

    def _words(self) -> str:
        for _ in range(2):
            for index in range(self._layout.num_ranks):
                text = self._segment.read(self._layout.words(index), WORDS).rstrip(b"\0")
                if text:
                    return text.decode(errors="replace")
            time.sleep(SLICE_S)  # the mark may be seen before the words on some processors
        return f"a rank {self.where()} has given up"


class Patience:
    """One wait of one thread for other ranks, with its time limit.

    Args:
        watch: Of the group.
        missing: Which ranks are waited for and have not come?
        doing: Names the call.
        timeout: Seconds until it is an error.
        is_for_any: Whether one of those that are missing suffices.

    Attributes:
        timeout: Seconds until it is an error, at the moment.
        is_over: Whether it has ended by its time limit.
    """

    def __init__(
        self,
        watch: Watch,
        missing: Callable[[], set[int]],
        *,
        doing: Callable[[], str],
        timeout: float,
        is_for_any: bool = False,
    ) -> None:
        self._watch = watch
        self._missing = missing
        self._doing = doing
        self.timeout = timeout
        self._is_for_any = is_for_any
        self._deadline = 0.0
        self._next = 0.0
        self.is_over = False

    def begin(self) -> None:
        """Set the time limit anew, for the next wait."""
        self._next = 0.0
        self._deadline = 0.0

    @contextmanager
    def limited(self, timeout: float | None) -> Iterator[None]:
        """Within the block, the time limit is another one; None: as it is."""
        kept = self.timeout
        self.timeout = kept if timeout is None else timeout
        try:
            yield
        finally:
            self.timeout = kept

    def look(self) -> None:
        """Return if the wait may go on.

        Raises:
            DistBackendError: A rank that is waited for has ended, or has given up; or the time is over.
        """
        self._watch.check()
        now = time.monotonic()
        if now < self._next:
            return
        if not self._deadline:
            self._deadline = now + self.timeout
        self._next = now + SLICE_S
        self._look_for_losses(now - self._deadline + self.timeout)
        if now > self._deadline and (late := self._missing()):
            self.is_over = True
            raise dist.DistBackendError(
                late_ranks(self._watch.global_ranks(late), self._doing(), self.timeout)
            )

    def _look_for_losses(self, waited: float) -> None:
        """Raise if a rank will not come any more; who is missing is looked up after who has gone."""
        gone, left = self._watch.gone(), self._watch.left()
        died = set(self._watch.global_ranks(gone - left))
        if waited > _ELSEWHERE_S:
            died |= self._watch.died_anywhere()
        missing = self._missing() if gone or left or died else set()
        if not missing:
            return
        lost = (gone | left) & missing
        if self._is_for_any and lost != missing:
            lost &= gone - left
        ranks, have_ended = set(self._watch.global_ranks(lost)), bool(lost & (gone - left))
        if not ranks and waited > _ELSEWHERE_S:
            ranks, have_ended = died, True
        if ranks:
            self._watch.check()  # the error of a rank that has given up says more
            raise dist.DistBackendError(lost_ranks(ranks, self._doing(), have_ended=have_ended))
