"""Slots in shared memory, through which collectives pass their data in parts.

Each rank has a slot of two halves; only it writes there. A part of a call uses one half on all ranks, the
next part the other one, over all calls of a group: parts are numbered, and a rank's progress counter says in
which part and phase it is. It is BEGUN when its header lies there (only who waits long says that), WRITTEN
when the rank's data do, REDUCED when its section of a sum does, DONE when it reads nothing of this part any
more. Before a rank writes to a half it waits until all are DONE with the part that used it before, two parts
ago. So a rank may be one part ahead of the slowest one, and a rooted call costs its root no wait.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch

from colossalai.communication.shared_memory._calls import (
    AGREED_SIZE,
    Call,
    OwnFields,
    disagreement,
)
from colossalai.communication.shared_memory._counters import SLICE_S, Counters, is_behind
from colossalai.communication.shared_memory._layout import (
    FIRST_ROOM,
    HEADER,
    MOST_ROOM,
    START,
    WORDS,
    SegmentLayout,
)
from colossalai.communication.shared_memory._segment import (
    LEAST_BYTES,
    Arena,
    NoMemoryError,
    Segment,
    copy_bytes,
)
from colossalai.communication.shared_memory._watch import Patience, Watch
from colossalai.monitor import DisagreementError

BEGUN, WRITTEN, REDUCED, DONE = 0, 1, 2, 3  # phases of a part; each one includes those before
_PHASES = 4
_LATE_S = 1.0  # for ranks that have not come to a call of which two others do not agree


class Slots:
    """The slots of a group, seen by one of its ranks.

    Args:
        segment: Of the group.
        layout: Of the segment.
        rank: This rank's index in it.
        counters: The ranks' progress.
        watch: What ends a wait.
        timeout: Seconds that another rank may take.
        budget: How many bytes may the slot of this rank take?
        own: The arena of this rank, from which it may lend operands; None: it lends none.
        arenas: Those of the others, by index.

    Attributes:
        rank: This rank's index.
        num_ranks: How many there are.
        others: The indices of the others.
        following: The same, from this one on: not all read the same slot at once.
        room: Bytes of a half that all ranks have reserved.
    """

    def __init__(
        self,
        segment: Segment,
        layout: SegmentLayout,
        rank: int,
        *,
        counters: Counters,
        watch: Watch,
        timeout: float,
        budget: Callable[[], int],
        own: Arena | None = None,
        arenas: Mapping[int, Segment] | None = None,
    ) -> None:
        self.rank = rank
        self.num_ranks = layout.num_ranks
        self.others = tuple(other for other in range(layout.num_ranks) if other != rank)
        self.following = (*range(rank + 1, layout.num_ranks), *range(rank))
        self.room = FIRST_ROOM
        self._most = MOST_ROOM  # the same on all ranks; what this one may take is `budget`
        self._budget = budget
        self._reserved = FIRST_ROOM
        self._segment = segment
        self._layout = layout
        self._counters = counters
        self._watch = watch
        self._own = own
        self._arenas = arenas or {}
        self._places = [0] * layout.num_ranks  # of what is lent in this part, in the arenas of the ranks
        self._part = 0
        self._call = Call(0, "barrier")
        self._header = b""
        self._unchecked: dict[int, bytes] = {}  # headers of parts in which not all looked at all
        self._target = START
        self._patience = Patience(watch, self._missing, doing=self._doing, timeout=timeout)

    # Parts: what every collective goes through.

    def start(self, call: Call, num_bytes: int) -> None:
        """Start a call, with slots that are as large as it can use.

        Args:
            call: The same on all ranks.
            num_bytes: How much each rank gives or gets; the same on all ranks.

        Raises:
            DistBackendError: An earlier call has failed.
        """
        self._watch.check()
        self._call = call
        self._header = call.packed()
        if call.words:  # before the header: whoever reads its stamp may ask what it means
            self._segment.write(self._layout.meaning(self.rank), call.words[:WORDS].ljust(WORDS, b"\0"))
        self.make_room(num_bytes)

    def make_room(self, num_bytes: int) -> None:
        """Agree on larger slots, if more is to pass than they hold and they may grow.

        Args:
            num_bytes: How much a rank gives or gets; the same on all ranks.
        """
        if num_bytes > self.room and self.room < self._most:
            self._grow(min(num_bytes, self._most))

    @contextmanager
    def limited(self, timeout: timedelta | None) -> Iterator[None]:
        """Within the block, another rank may take so long; None: as long as ever."""
        with self._patience.limited(None if timeout is None else timeout.total_seconds()):
            yield

    def timeout(self) -> float:
        """Return how many seconds another rank may take at the moment."""
        return self._patience.timeout

    def begin(self, extent: int = 0, *, is_even: bool = False) -> None:
        """Begin the next part: wait for its half of the slots, and write this rank's header.

        Args:
            extent: Of an all-to-all: the bytes of this rank's largest message.
            is_even: Whether its others are as large.
        """
        self._part += 1
        if extent or is_even:
            self._set_own_fields(OwnFields(self._call.room, extent, is_even))
        self._patience.begin()
        self._wait(self.others, self._value(DONE) - 2 * _PHASES, self._patience.look)
        if self._part - 2 in self._unchecked:
            self._compare(self.others, self._part - 2, self._unchecked.pop(self._part - 2))
        self._segment.write(self._layout.header(self.rank, self._part), self._header)

    def publish(self, phase: int) -> None:
        """Say that this rank has come to a phase of the part."""
        self._counters.set(self.rank, self._value(phase))

    def wait(self, phase: int, ranks: Sequence[int] | None = None) -> None:
        """Wait until other ranks have come to a phase of the part, and make sure that they are at this call.

        Args:
            phase: One of WRITTEN, REDUCED and DONE.
            ranks: Which ones; default: all.

        Raises:
            DisagreementError: A rank is at another call.
        """
        awaited = self.others if ranks is None else ranks
        self._wait(awaited, self._value(phase), self._look)
        if phase == WRITTEN:
            self._compare(awaited, self._part, self._header)

    def look_later(self) -> None:
        """Have the headers of this part compared when all are done with it: nobody waits for all now."""
        self._unchecked[self._part] = self._header

    def extent(self, rank: int) -> tuple[int, bool]:
        """Return the largest message of a rank, and whether its others are as large, from its header."""
        own = self._own_fields(rank)
        return own.extent, own.is_even

    # Operands that are not copied; see [Note: who writes while others read] in _segment.py.

    def lend(self, address: int, num_bytes: int) -> bool:
        """Let the others read this call's operand where it lies, if it lies in the arena of this rank.

        Args:
            address: Of the operand in this process; it is the caller's again after `end_loan`.
            num_bytes: How large it is.

        Returns:
            Whether they will; else it has to be `put`.
        """
        if self._own is None or num_bytes < LEAST_BYTES:
            return False
        place = self._own.place(address, num_bytes)
        if place:
            self._set_own_fields(OwnFields(self._call.room, place=place))
        return place > 0

    def look_for_loans(self) -> None:
        """See which ranks lend their operands in this part; after `wait(WRITTEN)` for all."""
        if self._arenas:
            for rank in self.others:
                self._places[rank] = self._own_fields(rank).place

    def end_loan(self) -> None:
        """Wait until nobody reads the operand any more; after the last part of a call that lends it."""
        self._wait(self.others, self._value(DONE), self._look)

    def operand(self, rank: int, at: int, count: int, dtype: torch.dtype, *, in_slot: int) -> torch.Tensor:
        """Return elements of another rank's operand, from its slot or where it lends them.

        Args:
            rank: The rank.
            at: Where they begin in the whole operand, in bytes.
            count: How many there are.
            dtype: Of the elements.
            in_slot: Where they begin in the slot, in bytes, if they are there.
        """
        if place := self._places[rank]:
            return self._arenas[rank].tensor(place + at, count, dtype)
        return self._segment.tensor(self._layout.slot(rank, self._part & 1) + in_slot, count, dtype)

    def get_operand(self, target: int, rank: int, num_bytes: int, *, at: int, in_slot: int) -> None:
        """Copy bytes out of another rank's operand; the arguments are as in `get` and `operand`."""
        if place := self._places[rank]:
            copy_bytes(target, self._arenas[rank].address + place + at, num_bytes)
        else:
            self.get(target, rank, num_bytes, in_slot)

    # The memory of the present part.

    def address(self, rank: int) -> int:
        """Return where the half of a rank's slot begins."""
        return self._segment.address + self._layout.slot(rank, self._part & 1)

    def elements(self, rank: int, start: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return what lies in a rank's slot from element `start` on as a flat tensor, for this part only."""
        at = self._layout.slot(rank, self._part & 1) + start * dtype.itemsize
        return self._segment.tensor(at, count, dtype)

    def put(self, source: int, num_bytes: int, at: int = 0) -> None:
        """Copy bytes of this process into this rank's slot.

        Args:
            source: Their address.
            num_bytes: How many.
            at: Where in the slot.
        """
        copy_bytes(self.address(self.rank) + at, source, num_bytes)

    def get(self, target: int, rank: int, num_bytes: int, at: int = 0) -> None:
        """Copy bytes out of a rank's slot; the arguments are as in `put`."""
        copy_bytes(target, self.address(rank) + at, num_bytes)

    def write(self, data: bytes) -> None:
        """Set the first bytes of this rank's slot."""
        self._segment.write(self._layout.slot(self.rank, self._part & 1), data)

    def read(self, rank: int, start: int, length: int) -> bytes:
        """Return some bytes of a rank's slot."""
        return self._segment.read(self._layout.slot(rank, self._part & 1) + start, length)

    def parts(self, num_bytes: int, unit: int, share: int = 1) -> Iterator[tuple[int, int]]:
        """Cut bytes into parts that fit into the slots.

        Args:
            num_bytes: How many; no part at all comes of none.
            unit: Bytes that are not cut.
            share: How many such parts a slot has to hold.

        Yields:
            Where each part begins, and its bytes.
        """
        size = max(unit, self.room // share // unit * unit)
        for start in range(0, num_bytes, size):
            yield start, min(size, num_bytes - start)

    def reserve(self, room: int) -> None:
        """Reserve so many bytes of each half of this rank's slot.

        Raises:
            NoMemoryError: The machine has no memory for them.
        """
        for half in range(2):
            self._segment.reserve(self._layout.slot(self.rank, half), room)
        self._reserved = room

    @property
    def num_reserved(self) -> int:
        """Bytes of this rank's slot that take memory."""
        return 2 * self._reserved

    # Inside.

    def _set_own_fields(self, own: OwnFields) -> None:
        self._header = self._header[:AGREED_SIZE] + own.packed()

    def _own_fields(self, rank: int) -> OwnFields:
        return OwnFields.of(self._segment.read(self._layout.header(rank, self._part), HEADER))

    def _grow(self, wanted: int) -> None:
        """Agree on larger slots: each rank reserves what it can, and all take what the least one has."""
        room = FIRST_ROOM
        while room < wanted:
            room *= 2
        if 2 * room <= self._budget():
            with suppress(NoMemoryError):
                self.reserve(room)
        self._call = self._call._replace(room=self._reserved, is_growing=True)
        self._header = self._call.packed()
        self.begin()
        self.publish(WRITTEN)
        self.wait(WRITTEN)
        least = min(self._own_fields(rank).room for rank in range(self.num_ranks))
        if least <= self.room:
            self._most = self.room  # some rank has no memory for more; all have seen the same
        self.room = max(self.room, least)
        self.publish(DONE)
        self._call = self._call._replace(is_growing=False)
        self._header = self._call.packed()

    def _value(self, phase: int) -> int:
        return (START + self._part * _PHASES + phase) & (2**32 - 1)

    def _wait(self, ranks: Sequence[int], target: int, look: Callable[[], None]) -> None:
        self._target = target
        for rank in ranks:
            self._counters.wait_for(rank, target, look)

    def _look(self) -> None:
        """Between two slices of a wait: compare the headers of all that have come to this part.

        Two ranks that each take the other for the root have nothing to say to one another, and would wait in
        vain; so who has to wait says first that its header is there.
        """
        begun = self._value(BEGUN)
        if is_behind(self._counters.value(self.rank), begun):
            self.publish(BEGUN)
        come = [rank for rank in self.others if not is_behind(self._counters.value(rank), begun)]
        self._counters.fence()
        self._compare(come, self._part, self._header)
        self._patience.look()

    def missing(self) -> list[int]:
        """Return the global ranks for which this one waits now."""
        return self._watch.global_ranks(self._missing())

    def _missing(self) -> set[int]:
        return {rank for rank in self.others if is_behind(self._counters.value(rank), self._target)}

    def _doing(self) -> str:
        return self._call.described(self._watch.where())

    def _compare(self, ranks: Sequence[int], part: int, header: bytes) -> None:
        mine = header[:AGREED_SIZE]
        for rank in ranks:
            if self._segment.read(self._layout.header(rank, part), AGREED_SIZE) != mine:
                headers = {
                    other: self._segment.read(self._layout.header(other, part), HEADER)
                    for other in self._come_in_time(part)
                }
                by_rank = {self._watch.ranks[index]: said for index, said in headers.items()}
                by_rank[self._watch.ranks[self.rank]] = header
                raise DisagreementError(
                    disagreement(self._watch.where(), dict(sorted(by_rank.items())), self._meaning)
                )

    def _meaning(self, rank: int) -> str:
        """Return what the stamp of a global rank's call means, of the last one that has had any."""
        text = self._segment.read(self._layout.meaning(self._watch.ranks.index(rank)), WORDS)
        return text.rstrip(b"\0").decode(errors="replace")

    def _come_in_time(self, part: int) -> list[int]:
        """Return who else has come to a part, after a moment for the late: who is alone shows by the rest."""
        begun, end = (START + part * _PHASES + BEGUN) & (2**32 - 1), time.monotonic() + _LATE_S
        while True:
            late = {rank for rank in self.others if is_behind(self._counters.value(rank), begun)}
            lost = self._watch.gone() | self._watch.left()
            if late <= lost or self._watch.is_broken or time.monotonic() > end:
                self._counters.fence()
                return [rank for rank in self.others if rank not in late]
            self._counters.wait_for_change(min(late - lost), self._counters.value(min(late - lost)), SLICE_S)
