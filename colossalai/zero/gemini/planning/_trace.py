"""The trace of an iteration: the order in which chunks are used, and the memory of other data.

An iteration is one step with all its microbatches, forward and backward. It is a row of uses; the time from
one use until the next is a period. The first iteration is recorded; the following ones are compared with the
record, use by use, so that its plan is executed only while the iteration is the same.

Nothing here reads a clock or communicates. Uses are equal on all ranks, and so are the follower's results;
bytes are not (batches differ). Decisions that lead to a collective need a trace that covers those of all
ranks.
"""

import enum
import operator
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property


@dataclass(frozen=True)
class Trace:
    """The uses of one iteration, as a value. A moment is the index of a use, and of its period.

    The iteration is assumed to repeat: the first moment follows the last one.

    Attributes:
        uses: The number of the chunk that is used, for each moment.
        other_bytes: The most bytes of the compute tier that were not chunks, for each period.
        held: Further chunks that could not be evicted, for each period: other arguments of the same call, or
            referenced memory. Empty if that was not recorded.
    """

    uses: tuple[int, ...]
    other_bytes: tuple[int, ...]
    held: tuple[frozenset[int], ...] = ()

    def __post_init__(self) -> None:
        assert len(self.other_bytes) == len(self.uses), "one number of other bytes for each use"
        assert len(self.held) in (0, len(self.uses)), "one set of held chunks for each use, or none"

    def __len__(self) -> int:
        return len(self.uses)

    @cached_property
    def needed(self) -> tuple[frozenset[int], ...]:
        """The chunks that are present in each period whatever the plan: the used one and the held ones."""
        held = self.held or (frozenset(),) * len(self)
        return tuple(beside | {use} for use, beside in zip(self.uses, held, strict=True))

    @cached_property
    def moments(self) -> dict[int, tuple[int, ...]]:
        """The moments at which each chunk is needed, by chunk in the order of first use."""
        moments: dict[int, list[int]] = {}
        for moment, (use, needed) in enumerate(zip(self.uses, self.needed, strict=True)):
            for chunk in (use, *sorted(needed - {use})):
                moments.setdefault(chunk, []).append(moment)
        return {chunk: tuple(its) for chunk, its in moments.items()}

    def next_need(self, chunk: int, after: int) -> int | None:
        """Return the first moment after `after` at which a chunk is needed; None if it is never needed.

        A need of the next iteration counts on: moment `len(trace)` is the first of that one. O(log n).
        """
        moments = self.moments.get(chunk)
        if moments is None:
            return None
        position = bisect_right(moments, after)
        return moments[position] if position < len(moments) else len(self) + moments[0]

    def covering(self, other: "Trace") -> "Trace":
        """Return a trace of the same uses with the larger bytes of both, and the chunks held in either."""
        assert other.uses == self.uses, "only traces of the same uses can be covered by one"
        most = tuple(map(max, self.other_bytes, other.other_bytes))
        held = tuple(a | b for a, b in zip(self.needed, other.needed, strict=True))
        return Trace(self.uses, most, tuple(a - {use} for a, use in zip(held, self.uses, strict=True)))


class TraceRecorder:
    """Makes a trace of the uses and bytes of one iteration."""

    def __init__(self) -> None:
        self._uses: list[int] = []
        self._other_bytes: list[int] = []
        self._held: list[frozenset[int]] = []
        self._before_first = 0

    def __len__(self) -> int:
        return len(self._uses)

    def use(self, chunk: int, held: Iterable[int] = ()) -> None:
        """Note that a chunk is used, which begins a period. Several times in a row is one use.

        Args:
            chunk: Its number.
            held: Other chunks that may not be dropped now.
        """
        beside = frozenset(held) - {chunk}
        if self._uses and self._uses[-1] == chunk:
            self._held[-1] |= beside
            return
        self._uses.append(chunk)
        self._other_bytes.append(0)
        self._held.append(beside)

    def sample(self, other_bytes: int) -> None:
        """Note how many bytes of the compute tier are not chunks at this moment."""
        if self._uses:
            self._other_bytes[-1] = max(self._other_bytes[-1], other_bytes)
        else:
            self._before_first = max(self._before_first, other_bytes)

    def finish(self) -> Trace:
        """Return the trace.

        Samples before the first use belong to the last period, which ends with the first use.
        """
        if self._uses:
            self._other_bytes[-1] = max(self._other_bytes[-1], self._before_first)
        return Trace(tuple(self._uses), tuple(self._other_bytes), tuple(self._held))


class Pursuit(enum.Enum):
    """Relation of an iteration to the trace."""

    RECORDING = enum.auto()  # there is no trace to follow: this iteration becomes one
    FOLLOWING = enum.auto()  # every use so far was the trace's
    DEPARTED = enum.auto()  # a use differed: the rest of this iteration is of no use


LEGAL_MOVES = frozenset(
    {
        (Pursuit.RECORDING, Pursuit.FOLLOWING),  # at the end of an iteration
        (Pursuit.FOLLOWING, Pursuit.DEPARTED),  # at a use
        (Pursuit.FOLLOWING, Pursuit.RECORDING),  # at the end of an iteration that was too short
        (Pursuit.DEPARTED, Pursuit.RECORDING),  # at the end of an iteration
    }
)


@dataclass(frozen=True)
class Departure:
    """The point at which an iteration left the trace.

    Attributes:
        moment: The index of the use.
        expected: The chunk that the trace has there; None where it is over.
        found: The chunk that was used instead; None if the iteration ended.
    """

    moment: int
    expected: int | None
    found: int | None

    def __str__(self) -> str:
        expected = "the end of the iteration" if self.expected is None else f"chunk {self.expected}"
        found = "the iteration ended" if self.found is None else f"chunk {self.found} was used"
        return f"use {self.moment} of the iteration: {found}, and recorded was {expected}"


class TraceFollower:
    """Records an iteration, compares the following ones with it, and records again when one differs.

    An iteration that differs leaves the trace at that use. The next one is recorded as a whole, and the one
    after that follows the new trace. An equal iteration with more other bytes leads to a trace that covers
    both.
    """

    def __init__(self) -> None:
        self._pursuit = Pursuit.RECORDING
        self._trace: Trace | None = None
        self._recorder = TraceRecorder()

    @property
    def pursuit(self) -> Pursuit:
        """Relation of the iteration to the trace."""
        return self._pursuit

    @property
    def is_recording(self) -> bool:
        """Whether this iteration becomes the trace."""
        return self._pursuit is Pursuit.RECORDING

    @property
    def trace(self) -> Trace | None:
        """The trace, if the iteration is on it."""
        return self._trace if self._pursuit is Pursuit.FOLLOWING else None

    @property
    def moment(self) -> int:
        """The index of the last use of this iteration; -1 before the first."""
        return len(self._recorder) - 1

    def use(self, chunk: int, held: Iterable[int] = ()) -> Departure | None:
        """Take note of a use; return where the trace was left, if it was at this use."""
        self._recorder.use(chunk, held)
        if self._pursuit is not Pursuit.FOLLOWING:
            return None
        expected = self._expected_at(self.moment)
        if chunk == expected:
            return None
        self._move(Pursuit.DEPARTED)
        return Departure(self.moment, expected, chunk)

    def sample(self, other_bytes: int) -> None:
        """Take note of the bytes that are not chunks at this moment."""
        self._recorder.sample(other_bytes)

    def end_iteration(self) -> Departure | None:
        """End the iteration; return the departure if the trace has further uses.

        Without a use it does not count as an iteration.
        """
        if self.moment < 0:
            return None
        length = self.moment + 1
        recorded, self._recorder = self._recorder.finish(), TraceRecorder()
        if self._pursuit is Pursuit.RECORDING:
            self._trace = recorded
            self._move(Pursuit.FOLLOWING)
        elif self._pursuit is Pursuit.DEPARTED:
            self._move(Pursuit.RECORDING)
        elif (expected := self._expected_at(length)) is not None:
            self._move(Pursuit.RECORDING)
            return Departure(length, expected, None)
        elif self._trace is not None and any(map(operator.gt, recorded.other_bytes, self._trace.other_bytes)):
            self._trace = self._trace.covering(replace(recorded, held=()))
        return None

    def _expected_at(self, moment: int) -> int | None:
        assert self._trace is not None, "a trace is followed"
        return self._trace.uses[moment] if moment < len(self._trace) else None

    def _move(self, pursuit: Pursuit) -> None:
        move = (self._pursuit, pursuit)
        assert move in LEGAL_MOVES, f"{self._pursuit.name} cannot become {pursuit.name}"
        self._pursuit = pursuit
