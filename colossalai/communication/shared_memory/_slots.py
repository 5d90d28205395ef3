"""Slots in shared memory, the buffers of collectives, which are used in parts.

Each rank has a slot of two halves, to which only it writes. The parts of all calls of a group are numbered
and use the halves alternately; a rank's progress counter contains its part and phase. A rank is BEGUN when it
has written its header (published only in a long wait), WRITTEN when it has written its data, REDUCED when it
has written its section of a sum, and DONE when it does not read this part any more. Before a rank writes to a
half it waits until all ranks are DONE with the last part in that half, two parts ago. So a rank can be one
part ahead of the slowest one, and the senders of a rooted call do not wait for its receivers.
"""

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
    TEXT_SIZE,
    SegmentLayout,
)
from colossalai.communication.shared_memory._segment import (
    LEAST_BYTES,
    Arena,
    NoMemoryError,
    Segment,
    copy_bytes,
)
from colossalai.communication.shared_memory._watch import WaitLimit, Watch
from colossalai.monitor import DisagreementError

BEGUN, WRITTEN, REDUCED, DONE = 0, 1, 2, 3  # phases of a part; each one includes those before
_PHASES = 4
_LATE_S = 1.0  # after a mismatch, wait for the headers of ranks that are late


class Slots:
    """The slots of a group, from the view of one of its ranks.

    Args:
        segment: Segment of the group.
        layout: Layout of the segment.
        rank: Index of this rank in the segment.
        counters: Progress counters of the ranks.
        watch: Watch of the group, which ends waits.
        timeout: Time limit of the waits for other ranks, in seconds.
        budget: Returns the bytes that the slot of this rank may take.
        own: Arena of this rank, from which it lends operands; None: it lends none.
        arenas: Arenas of the other ranks, by index.

    Attributes:
        rank: Index of this rank.
        num_ranks: Number of ranks.
        others: Indices of the other ranks.
        following: The same in cyclic order from this rank on, so that ranks read different slots at a time.
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
        self._most = MOST_ROOM  # the same on all ranks; `budget` is the bound of this rank
        self._budget = budget
        self._reserved = FIRST_ROOM
        self._segment = segment
        self._layout = layout
        self._counters = counters
        self._watch = watch
        self._own = own
        self._arenas = arenas or {}
        self._places = [0] * layout.num_ranks  # offsets of the operands lent in this part, by rank
        self._part = 0
        self._call = Call(0, "barrier")
        self._header = b""
        self._unchecked: dict[int, bytes] = {}  # headers of parts without a wait for all ranks
        self._target = START
        self._wait_limit = WaitLimit(watch, self._missing, describe=self._describe, timeout=timeout)

    # Parts: the steps of every collective.

    def start(self, call: Call, num_bytes: int) -> None:
        """Start a call, and grow the slots up to the size that it can use.

        Args:
            call: The call, the same on all ranks.
            num_bytes: Bytes of a rank's share, the same on all ranks.

        Raises:
            DistBackendError: An earlier call has failed.
        """
        self._watch.check()
        self._call = call
        self._header = call.packed()
        if call.stamp_text:  # before the header: readers of its stamp read the description
            self._segment.write(
                self._layout.stamp_text(self.rank), call.stamp_text[:TEXT_SIZE].ljust(TEXT_SIZE, b"\0")
            )
        self.make_room(num_bytes)

    def make_room(self, num_bytes: int) -> None:
        """Agree on larger slots, if the data does not fit and they can grow; collective then.

        Args:
            num_bytes: Bytes of a rank's share, the same on all ranks.
        """
        if num_bytes > self.room and self.room < self._most:
            self._grow(min(num_bytes, self._most))

    @contextmanager
    def limited(self, timeout: timedelta | None) -> Iterator[None]:
        """Change the time limit of waits within the block; None: no change."""
        with self._wait_limit.limited(None if timeout is None else timeout.total_seconds()):
            yield

    def timeout(self) -> float:
        """Return the present time limit of waits in seconds."""
        return self._wait_limit.timeout

    def begin(self, extent: int = 0, *, is_even: bool = False) -> None:
        """Begin the next part: wait until its half of the slots is free, and write this rank's header.

        Args:
            extent: Bytes of this rank's largest message, in an all-to-all.
            is_even: Whether all its messages have this size.
        """
        self._part += 1
        if extent or is_even:
            self._set_own_fields(OwnFields(self._call.room, extent, is_even))
        self._wait_limit.begin()
        # All ranks have to be DONE with the part that used this half before: it is overwritten now.
        self._wait(self.others, self._value(DONE) - 2 * _PHASES, self._wait_limit.check)
        if self._part - 2 in self._unchecked:
            self._compare(self.others, self._part - 2, self._unchecked.pop(self._part - 2))
        # Read by other ranks after the next `publish`. No rank reads the header of four parts ago any more.
        self._segment.write(self._layout.header(self.rank, self._part), self._header)

    def publish(self, phase: int) -> None:
        """Publish that this rank has reached a phase of the part; earlier writes are visible before it."""
        # The only store to this counter. Readers sleep on it, and are woken.
        self._counters.set(self.rank, self._value(phase))

    def wait(self, phase: int, ranks: Sequence[int] | None = None) -> None:
        """Wait until other ranks have reached a phase of the part; after WRITTEN, compare their headers.

        Args:
            phase: One of WRITTEN, REDUCED and DONE.
            ranks: Indices of the ranks. Default: all others.

        Raises:
            DisagreementError: A rank issues another call.
        """
        awaited = self.others if ranks is None else ranks
        self._wait(awaited, self._value(phase), self._check_begun)
        if phase == WRITTEN:
            # After the counter of the writer, hence its header is complete.
            self._compare(awaited, self._part, self._header)

    def defer_check(self) -> None:
        """Defer the comparison of the headers of this part, which has no wait for all ranks, to `begin`."""
        self._unchecked[self._part] = self._header

    def extent(self, rank: int) -> tuple[int, bool]:
        """Return the size of a rank's largest message, and whether all have this size, from its header."""
        own = self._own_fields(rank)
        return own.extent, own.is_even

    # Operands that are not copied; see [Note: access to lent operands] in _segment.py.

    def lend(self, address: int, num_bytes: int) -> bool:
        """Lend this call's operand to the other ranks, which read it in place, if it is in this rank's arena.

        Args:
            address: Address of the operand in this process; the loan ends with `end_loan`.
            num_bytes: Size of the operand.

        Returns:
            Whether it is lent; otherwise the caller has to `put` it.
        """
        if self._own is None or num_bytes < LEAST_BYTES:
            return False
        place = self._own.place(address, num_bytes)
        if place:
            self._set_own_fields(OwnFields(self._call.room, place=place))
        return place > 0

    def read_loans(self) -> None:
        """Read from the headers which ranks lend their operands; call this after `wait(WRITTEN)` for all."""
        if self._arenas:
            for rank in self.others:
                self._places[rank] = self._own_fields(rank).place

    def end_loan(self) -> None:
        """Wait until all ranks are DONE with the operand, after the last part of a call that lends it."""
        # From here the owner can write to the operand: no rank reads it any more.
        self._wait(self.others, self._value(DONE), self._check_begun)

    def operand(self, rank: int, at: int, count: int, dtype: torch.dtype, *, in_slot: int) -> torch.Tensor:
        """Return elements of another rank's operand, from its slot or its arena.

        Args:
            rank: Index of the rank.
            at: Offset of the elements in the whole operand, in bytes.
            count: Number of elements.
            dtype: Dtype of the elements.
            in_slot: Offset of the elements in the slot, in bytes, if the operand is not lent.
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
        """Return the address of the present half of a rank's slot."""
        return self._segment.address + self._layout.slot(rank, self._part & 1)

    def elements(self, rank: int, start: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return `count` elements of a rank's slot from element `start` on, valid in this part only."""
        at = self._layout.slot(rank, self._part & 1) + start * dtype.itemsize
        return self._segment.tensor(at, count, dtype)

    def put(self, source: int, num_bytes: int, at: int = 0) -> None:
        """Copy bytes of this process into this rank's slot.

        Args:
            source: Source address.
            num_bytes: Number of bytes.
            at: Offset in the slot.
        """
        copy_bytes(self.address(self.rank) + at, source, num_bytes)

    def get(self, target: int, rank: int, num_bytes: int, at: int = 0) -> None:
        """Copy bytes out of a rank's slot; the arguments are as in `put`."""
        copy_bytes(target, self.address(rank) + at, num_bytes)

    def write(self, data: bytes) -> None:
        """Set the first bytes of this rank's slot."""
        self._segment.write(self._layout.slot(self.rank, self._part & 1), data)

    def read(self, rank: int, start: int, length: int) -> bytes:
        """Return a range of bytes of a rank's slot."""
        return self._segment.read(self._layout.slot(rank, self._part & 1) + start, length)

    def parts(self, num_bytes: int, unit: int, share: int = 1) -> list[tuple[int, int]]:
        """Return the offsets and sizes of the parts that fit into the slots; an empty part for no bytes.

        The first part carries the header, so that mismatched calls are detected also without data.

        Args:
            num_bytes: Number of bytes.
            unit: Granularity of the parts, in bytes.
            share: Number of parts that a slot has to hold at once.
        """
        size = max(unit, self.room // share // unit * unit)
        return [(start, min(size, num_bytes - start)) for start in range(0, max(1, num_bytes), size)]

    def reserve(self, room: int) -> None:
        """Reserve `room` bytes of each half of this rank's slot.

        Raises:
            NoMemoryError: The machine has no memory for them.
        """
        for half in range(2):
            self._segment.reserve(self._layout.slot(self.rank, half), room)
        self._reserved = room

    @property
    def num_reserved(self) -> int:
        """Number of reserved bytes of this rank's slot."""
        return 2 * self._reserved

    # Inside.

    def _set_own_fields(self, own: OwnFields) -> None:
        self._header = self._header[:AGREED_SIZE] + own.packed()

    def _own_fields(self, rank: int) -> OwnFields:
        return OwnFields.of(self._segment.read(self._layout.header(rank, self._part), HEADER))

    def _grow(self, wanted: int) -> None:
        """Agree on larger slots: each rank reserves memory and publishes its size; the minimum is used."""
        room = FIRST_ROOM
        while room < wanted:
            room *= 2
        if 2 * room <= self._budget():
            with suppress(NoMemoryError):
                self.reserve(room)
        self._call = self._call._replace(room=self._reserved, is_growing=True)
        self._header = self._call.packed()
        # A part without data, joined by all ranks: the headers contain their sizes.
        self.begin()
        self.publish(WRITTEN)
        self.wait(WRITTEN)
        least = min(self._own_fields(rank).room for rank in range(self.num_ranks))
        if least <= self.room:
            self._most = self.room  # a rank has no memory for more; all ranks have read the same sizes
        self.room = max(self.room, least)
        # After the last read of the other headers. All ranks use the same `room` from the next part on.
        self.publish(DONE)
        self._call = self._call._replace(is_growing=False)
        self._header = self._call.packed()

    def _value(self, phase: int) -> int:
        return (START + self._part * _PHASES + phase) & (2**32 - 1)

    def _wait(self, ranks: Sequence[int], target: int, check: Callable[[], None]) -> None:
        self._target = target
        for rank in ranks:
            self._counters.wait_for(rank, target, check)

    def _check_begun(self) -> None:
        """Compare the headers of all ranks that have begun this part; called between two slices of a wait.

        Two ranks that each expect the other one to be the root would publish nothing and wait for ever. So a
        waiting rank first publishes BEGUN, after which the other ranks can read its header.
        """
        begun = self._value(BEGUN)
        if is_behind(self._counters.value(self.rank), begun):
            self.publish(BEGUN)
        begun_ranks = [rank for rank in self.others if not is_behind(self._counters.value(rank), begun)]
        # The counters before the headers; see [Note: order of data and counters] in `_counters.py`.
        self._counters.fence()
        self._compare(begun_ranks, self._part, self._header)
        self._wait_limit.check()

    def missing(self) -> list[int]:
        """Return the global ranks that this rank waits for now."""
        return self._watch.global_ranks(self._missing())

    def _missing(self) -> set[int]:
        return {rank for rank in self.others if is_behind(self._counters.value(rank), self._target)}

    def _describe(self) -> str:
        return self._call.described(self._watch.where())

    def _compare(self, ranks: Sequence[int], part: int, header: bytes) -> None:
        mine = header[:AGREED_SIZE]
        for rank in ranks:
            if self._segment.read(self._layout.header(rank, part), AGREED_SIZE) != mine:
                headers = {
                    other: self._segment.read(self._layout.header(other, part), HEADER)
                    for other in self._begun_ranks(part)
                }
                by_rank = {self._watch.ranks[index]: text for index, text in headers.items()}
                by_rank[self._watch.ranks[self.rank]] = header
                raise DisagreementError(
                    disagreement(self._watch.where(), dict(sorted(by_rank.items())), self._stamp_text)
                )

    def _stamp_text(self, rank: int) -> str:
        """Return the description of the last stamp of a global rank."""
        text = self._segment.read(self._layout.stamp_text(self._watch.ranks.index(rank)), TEXT_SIZE)
        return text.rstrip(b"\0").decode(errors="replace")

    def _begun_ranks(self, part: int) -> list[int]:
        """Return the other ranks that have begun a part, after a wait for late ones of at most `_LATE_S`."""
        begun, end = (START + part * _PHASES + BEGUN) & (2**32 - 1), self._watch.clock.now() + _LATE_S
        while True:
            # Both before the counters: a rank publishes BEGUN before it gives up or leaves.
            is_last = self._watch.is_broken or self._watch.clock.now() > end
            lost = self._watch.ended_ranks() | self._watch.departed_ranks()
            late = {rank for rank in self.others if is_behind(self._counters.value(rank), begun)}
            if late <= lost or is_last:
                # The caller reads the headers of these ranks.
                self._counters.fence()
                return [rank for rank in self.others if rank not in late]
            self._counters.wait_for_change(min(late - lost), self._counters.value(min(late - lost)), SLICE_S)
