"""The trace of an iteration: the order in which chunks are used, and the other memory at each use.

An iteration is one step with all its microbatches, forward and backward. It is a sequence of uses; the time
from one use until the next is a period. The first iteration is recorded; the next ones are compared with the
record, use by use, and its plan is followed only while they match.

This file reads no clock and communicates with no rank. Uses are equal on all ranks, and so are the results of
the follower; bytes differ, as batches do. Decisions about collectives need a trace that covers those of all
ranks.
"""

import enum
import operator
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise


@dataclass(frozen=True)
class Trace:
    """The uses of one iteration. A moment is the index of a use, and of the period that it begins.

    The iteration repeats: the first moment follows the last.

    Attributes:
        uses: The number of the chunk that is used, for each moment.
        other_bytes: The most bytes of other memory on the compute tier, for each period.
        held: The chunks that could not be evicted in addition to the used one, for each period: further
            arguments of the same call, or referenced memory. Empty if that was not recorded.
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

    @cached_property
    def next_needs(self) -> dict[tuple[int, int], int]:
        """The next moment at which a chunk is needed, by the chunk and a moment of need.

        Needs of the next iteration continue the count: moment `len(trace)` is its first.
        """
        return {
            (chunk, moment): following
            for chunk, moments in self.moments.items()
            for moment, following in pairwise((*moments, len(self) + moments[0]))
        }

    def covering(self, other: "Trace") -> "Trace":
        """Return a trace of the same uses with the larger bytes of both, and the held chunks of either."""
        assert other.uses == self.uses, "only traces of the same uses can be covered by one"
        most = tuple(map(max, self.other_bytes, other.other_bytes))
        held = tuple(a | b for a, b in zip(self.needed, other.needed, strict=True))
        return Trace(self.uses, most, tuple(a - {use} for a, use in zip(held, self.uses, strict=True)))


class TraceRecorder:
    """Records the trace of one iteration."""

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
            held: Other chunks that cannot be evicted now.
        """
        beside = frozenset(held) - {chunk}
        if self._uses and self._uses[-1] == chunk:
            self._held[-1] |= beside
            return
        self._uses.append(chunk)
        self._other_bytes.append(0)
        self._held.append(beside)

    def sample(self, other_bytes: int) -> None:
        """Record the bytes of other memory on the compute tier at this moment."""
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


class TraceState(enum.Enum):
    """State of an iteration relative to the trace."""

    RECORDING = enum.auto()  # there is no trace to follow: this iteration becomes one
    FOLLOWING = enum.auto()  # every use so far matches the trace
    MISMATCHED = enum.auto()  # a use differs: the rest of this iteration is ignored


LEGAL_MOVES = frozenset(
    {
        (TraceState.RECORDING, TraceState.FOLLOWING),  # at the end of an iteration
        (TraceState.FOLLOWING, TraceState.MISMATCHED),  # at a use
        (TraceState.FOLLOWING, TraceState.RECORDING),  # at the end of an iteration that was too short
        (TraceState.MISMATCHED, TraceState.RECORDING),  # at the end of an iteration
    }
)


@dataclass(frozen=True)
class TraceMismatch:
    """The first difference between an iteration and the trace.

    Attributes:
        moment: The index of the use.
        expected: The chunk of the trace at that use. None: the trace has ended.
        found: The chunk used instead. None: the iteration has ended.
    """

    moment: int
    expected: int | None
    found: int | None

    def __str__(self) -> str:
        expected = "the end of the iteration" if self.expected is None else f"chunk {self.expected}"
        found = "the iteration ended" if self.found is None else f"chunk {self.found} was used"
        return f"use {self.moment} of the iteration: {found}, and recorded was {expected}"


class TraceFollower:
    """Records an iteration, compares the next ones with it, and records again after a mismatch.

    An iteration with a mismatch has no trace from that use on. The next one is recorded as a whole, and the
    one after that follows the new trace. A matching iteration with more other bytes extends the trace.
    """

    def __init__(self) -> None:
        self._state = TraceState.RECORDING
        self._trace: Trace | None = None
        self._recorder = TraceRecorder()

    @property
    def state(self) -> TraceState:
        """State of this iteration relative to the trace."""
        return self._state

    @property
    def is_recording(self) -> bool:
        """Whether this iteration becomes the trace."""
        return self._state is TraceState.RECORDING

    @property
    def trace(self) -> Trace | None:
        """The trace, if this iteration matches it so far."""
        return self._trace if self._state is TraceState.FOLLOWING else None

    @property
    def moment(self) -> int:
        """The index of the last use of this iteration; -1 before the first."""
        return len(self._recorder) - 1

    def use(self, chunk: int, held: Iterable[int] = ()) -> TraceMismatch | None:
        """Record a use; return the mismatch, if it is the first one of the iteration."""
        self._recorder.use(chunk, held)
        if self._state is not TraceState.FOLLOWING:
            return None
        expected = self._expected_at(self.moment)
        if chunk == expected:
            return None
        self._move(TraceState.MISMATCHED)
        return TraceMismatch(self.moment, expected, chunk)

    def sample(self, other_bytes: int) -> None:
        """Record the bytes of other memory at this moment."""
        self._recorder.sample(other_bytes)

    def end_iteration(self) -> TraceMismatch | None:
        """End the iteration; return the mismatch, if the trace continues.

        Without a use, nothing is recorded.
        """
        if self.moment < 0:
            return None
        length = self.moment + 1
        recorded, self._recorder = self._recorder.finish(), TraceRecorder()
        if self._state is TraceState.RECORDING:
            self._trace = recorded
            self._move(TraceState.FOLLOWING)
        elif self._state is TraceState.MISMATCHED:
            self._move(TraceState.RECORDING)
        elif (expected := self._expected_at(length)) is not None:
            self._move(TraceState.RECORDING)
            return TraceMismatch(length, expected, None)
        elif self._trace is not None and any(map(operator.gt, recorded.other_bytes, self._trace.other_bytes)):
            self._trace = self._trace.covering(replace(recorded, held=()))
        return None

    def _expected_at(self, moment: int) -> int | None:
        assert self._trace is not None, "a trace is followed"
        return self._trace.uses[moment] if moment < len(self._trace) else None

    def _move(self, state: TraceState) -> None:
        move = (self._state, state)
        assert move in LEGAL_MOVES, f"{self._state.name} cannot become {state.name}"
        self._state = state
