"""The trace: next needs, what is recorded, and the states of an iteration that follows it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colossalai.zero.gemini.planning._trace import (
    LEGAL_MOVES,
    Trace,
    TraceFollower,
    TraceMismatch,
    TraceRecorder,
    TraceState,
)

pytestmark = pytest.mark.unit

iterations = st.lists(st.integers(0, 3), min_size=1, max_size=6)


def merged(uses: list[int]) -> tuple[int, ...]:
    """Return the uses without those of the chunk that was used just before."""
    return tuple(use for i, use in enumerate(uses) if i == 0 or uses[i - 1] != use)


def run_iteration(follower: TraceFollower, uses: list[int]) -> list[TraceMismatch]:
    """Tell a follower one iteration; return what it said."""
    said = [follower.use(chunk) for chunk in uses]
    said.append(follower.end_iteration())
    return [departure for departure in said if departure is not None]


@given(uses=iterations, held=st.lists(st.frozensets(st.integers(0, 4), max_size=2), min_size=6, max_size=6))
def test_the_next_need_is_found_around_the_end(uses: list[int], held: list[frozenset[int]]) -> None:
    trace = Trace(tuple(uses), (0,) * len(uses), tuple(held[: len(uses)]))
    needed = [{use} | beside for use, beside in zip(uses, held, strict=False)]
    expected = {}
    for after in range(len(uses)):
        for chunk in needed[after]:
            later = [m for m in range(after + 1, after + 1 + len(uses)) if chunk in needed[m % len(uses)]]
            expected[chunk, after] = later[0]
    assert trace.next_needs == expected


def test_chunks_come_in_the_order_of_their_first_need() -> None:
    trace = Trace((2, 4, 2, 1), (0,) * 4, (frozenset(), frozenset({5, 3}), frozenset(), frozenset()))
    assert list(trace.moments.items()) == [(2, (0, 2)), (4, (1,)), (3, (1,)), (5, (1,)), (1, (3,))]


def test_a_recorder_merges_uses_and_keeps_the_most_bytes_of_a_period() -> None:
    recorder = TraceRecorder()
    recorder.sample(7)  # before the first use: the period that the last use of an iteration begins
    for chunk, held, samples in [(4, (), (1, 3)), (4, (2, 4), (2,)), (1, (4,), (5, 4)), (4, (), (6,))]:
        recorder.use(chunk, held)
        for sample in samples:
            recorder.sample(sample)
    beside = (frozenset({2}), frozenset({4}), frozenset())
    assert recorder.finish() == Trace((4, 1, 4), (3, 5, 7), beside)


def test_a_trace_covers_those_of_all_ranks() -> None:
    one = Trace((0, 1), (5, 1), (frozenset(), frozenset({0})))
    other = Trace((0, 1), (2, 3), (frozenset({2}), frozenset()))
    assert one.covering(other) == Trace((0, 1), (5, 3), (frozenset({2}), frozenset({0})))
    assert one.covering(one) == one
    with pytest.raises(AssertionError, match="same uses"):
        one.covering(Trace((1, 0), (0, 0)))


def test_an_iteration_is_recorded_and_then_followed() -> None:
    follower = TraceFollower()
    assert follower.trace is None
    follower.use(0)
    follower.sample(8)
    follower.use(0)
    assert follower.moment == 0
    follower.use(1)
    assert follower.trace is None
    assert follower.end_iteration() is None
    assert follower.trace == Trace((0, 1), (8, 0), (frozenset(), frozenset()))
    for _ in range(2):  # the use that begins an iteration is new, whatever ended the last one
        assert run_iteration(follower, [0, 1, 1]) == []
        assert follower.moment == -1
    assert follower.end_iteration() is None  # nothing was used: no iteration
    assert follower.state is TraceState.FOLLOWING


@pytest.mark.parametrize(
    ("uses", "departure", "words"),
    [
        ([0, 2, 1, 0], TraceMismatch(1, 1, 2), "use 1 .* chunk 2 was used, and recorded was chunk 1"),
        ([0, 1, 0, 1], TraceMismatch(3, None, 1), "chunk 1 was used, and recorded was the end"),
        ([0, 1], TraceMismatch(2, 0, None), "the iteration ended, and recorded was chunk 0"),
    ],
)
def test_a_departure_is_told_once_where_it_happens(
    uses: list[int], departure: TraceMismatch, words: str
) -> None:
    follower = TraceFollower()
    run_iteration(follower, [0, 1, 0])
    assert run_iteration(follower, uses) == [departure]
    assert follower.trace is None
    with pytest.raises(ValueError, match=words):
        raise ValueError(str(departure))
    assert run_iteration(follower, [3, 2]) == []  # recorded as a whole, even if the last one ended early
    assert follower.trace is not None
    assert follower.trace.uses == (3, 2)


def test_the_iteration_that_departs_stays_off_the_trace() -> None:
    follower = TraceFollower()
    run_iteration(follower, [0, 1, 2])
    follower.use(0)
    assert follower.trace is not None
    follower.use(2)
    assert follower.trace is None
    follower.use(1)
    follower.use(2)
    assert follower.trace is None
    follower.end_iteration()
    assert follower.trace is None
    assert run_iteration(follower, [0, 1, 2]) == []  # the old trace comes back: it is recorded all the same
    assert run_iteration(follower, [0, 1, 2]) == []
    assert follower.trace is not None


@given(st.lists(iterations, max_size=8))
def test_a_follower_keeps_its_word_over_any_iterations(rounds: list[list[int]]) -> None:
    """Against a plain model: what the last whole recorded iteration was, and whether this one is like it."""
    follower = TraceFollower()
    recorded: tuple[int, ...] | None = None
    for uses in rounds:
        state = follower.state
        assert (state is TraceState.FOLLOWING) == (recorded is not None)
        said = run_iteration(follower, uses)
        moves = (state, follower.state)
        if recorded is None:
            assert said == []
            recorded = merged(uses)
        elif merged(uses) == recorded:
            assert (said, moves) == ([], (TraceState.FOLLOWING, TraceState.FOLLOWING))
        else:
            assert len(said) == 1
            assert (said[0].expected, said[0].found) == at(said[0].moment, recorded, merged(uses))
            assert recorded[: said[0].moment] == merged(uses)[: said[0].moment]
            recorded = None


def at(moment: int, *rows: tuple[int, ...]) -> tuple[int | None, ...]:
    return tuple(row[moment] if moment < len(row) else None for row in rows)


def test_every_illegal_move_is_refused_and_every_legal_one_made() -> None:
    for begin in TraceState:
        for end in TraceState:
            follower = TraceFollower()
            follower._state = begin
            if (begin, end) in LEGAL_MOVES:
                follower._move(end)
                assert follower.state is end
            else:
                with pytest.raises(AssertionError, match=f"{begin.name} cannot become {end.name}"):
                    follower._move(end)
