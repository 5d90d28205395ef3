"""Eviction plans: bytes against brute force and least recently used, and the budget in every period."""

from collections.abc import Callable, Iterator
from itertools import chain, combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colossalai.zero.gemini.planning._eviction import (
    EXACT_CHUNKS,
    DoesNotFit,
    EvictionPlan,
    IntervalRing,
    _greedy_intervals,
    plan_evictions,
)
from colossalai.zero.gemini.planning._trace import Trace

pytestmark = pytest.mark.unit

Case = tuple[Trace, list[int], int]


@st.composite
def cases(draw: Callable, *, num_chunks: int, num_moments: int, one_size: bool = False) -> Case:
    """Draw a trace in which every use fits, sizes, and a budget that leaves some room."""
    chunk = st.integers(0, num_chunks - 1)
    uses = draw(st.lists(chunk, min_size=1, max_size=num_moments))
    uses = [use for i, use in enumerate(uses) if i == 0 or uses[i - 1] != use]
    size = st.integers(1, 9)
    sizes = [draw(size)] * num_chunks if one_size else [draw(size) for _ in range(num_chunks)]
    other = [draw(st.integers(0, 6)) for _ in uses]
    held = [draw(st.frozensets(chunk, max_size=1)) - {use} for use in uses]
    trace = Trace(tuple(uses), tuple(other), tuple(held))
    least = max(other[m] + sum(sizes[c] for c in trace.needed[m]) for m in range(len(trace)))
    return trace, sizes, least + draw(st.integers(0, sum(sizes)))


def gpt_trace(
    num_blocks: int, *, per_block: int = 1, microbatches: int = 1, recompute: bool = False
) -> Trace:
    """Return the uses of embedding and tied head (chunk 0) and of blocks, forwards and back."""
    blocks = [[1 + per_block * b + c for c in range(per_block)] for b in range(num_blocks)]
    uses = []
    for _ in range(microbatches):
        uses += [0, *chain(*blocks), 0]
        for block in reversed(blocks):
            uses += [*(block if recompute else ()), *reversed(block)]
        uses.append(0)
    uses = [use for i, use in enumerate(uses) if i == 0 or uses[i - 1] != use]
    grows = [min(m, len(uses) - m) % 5 for m in range(len(uses))]
    return Trace(tuple(uses), tuple(grows))


def planned(trace: Trace, sizes: list[int], budget: int | None) -> EvictionPlan:
    plan = plan_evictions(trace, sizes, budget)
    assert isinstance(plan, EvictionPlan)
    return plan


def total(chunks: object, sizes: list[int]) -> int:
    return sum(sizes[chunk] for chunk in chunks)  # type: ignore[attr-defined]


def fewest_bytes_by_sets(
    trace: Trace, sizes: list[int], budget: int, written: frozenset[int] = frozenset()
) -> int:
    """Try every way to go from set to set of present chunks, from each set around the ring to itself.

    Those that are written go before the first moment.
    """
    chunks = range(len(sizes))
    sets = [frozenset(some) for k in range(len(sizes) + 1) for some in combinations(chunks, k)]
    allowed = [
        [s for s in sets if needed <= s and total(s, sizes) + other <= budget]
        for needed, other in zip(trace.needed, trace.other_bytes, strict=True)
    ]
    fewest = []
    for start in allowed[-1]:  # present in the last period of the iteration before
        cost = {start - written: 0}
        for here in allowed:
            cost = {s: min(cost[before] + total(s - before, sizes) for before in cost) for s in here}
        fewest.append(cost[start])
    return min(fewest)


def fewest_bytes_by_intervals(trace: Trace, sizes: list[int], budget: int) -> int:
    """Try every subset of [a chunk remains from one need until its next], and count who is fetched."""
    n = len(trace)
    intervals = [
        (chunk, [m % n for m in range(begin + 1, end)])
        for chunk in range(len(sizes))
        for moments in [[m for m in range(n) if chunk in trace.needed[m]]]
        for begin, end in pairwise([*moments, *(m + n for m in moments[:1])])
    ]
    least = [trace.other_bytes[m] + total(trace.needed[m], sizes) for m in range(n)]
    most_saved = 0

    def choose(index: int, used: list[int], saved: int) -> None:
        nonlocal most_saved
        if index == len(intervals):
            most_saved = max(most_saved, saved)
            return
        choose(index + 1, used, saved)
        chunk, periods = intervals[index]
        with_it = [bytes_ + sizes[chunk] * (m in periods) for m, bytes_ in enumerate(used)]
        if max(with_it) <= budget:
            choose(index + 1, with_it, saved + sizes[chunk])

    choose(0, least, 0)
    return sum(total(needed, sizes) for needed in trace.needed) - most_saved


def bytes_of_lru(trace: Trace, sizes: list[int], budget: int) -> int:
    """Run three iterations with the least recently used dropped when room is needed; count the last."""
    present: list[int] = []  # least recently used first
    moved = 0
    for _ in range(3):
        moved = 0
        for needed, other in zip(trace.needed, trace.other_bytes, strict=True):
            moved += total(needed - set(present), sizes)
            present = [chunk for chunk in present if chunk not in needed]
            while total(present, sizes) + total(needed, sizes) + other > budget:
                present.pop(0)
            present += sorted(needed)
    return moved


def replay(trace: Trace, sizes: list[int], plan: EvictionPlan, budget: int) -> Iterator[int]:
    """Do what the plan says, from an empty tier, and check it at every step; yield the bytes moved."""
    present: set[int] = set()
    under_way: set[int] = set()
    for lap in range(3):
        moved = 0
        for period, needed, other in zip(plan.periods, trace.needed, trace.other_bytes, strict=True):
            present |= under_way
            assert under_way <= period.present
            present &= period.present
            missing = needed - present  # in the first lap also what should have stayed from the one before
            assert lap == 0 or missing == set(period.fetch)
            present |= missing
            assert needed <= present <= period.present
            assert lap == 0 or present == period.present
            under_way = set(period.ahead)
            assert not under_way & present
            assert total(present | under_way, sizes) + other <= budget
            moved += total(missing | under_way, sizes)
        yield moved


@settings(max_examples=60)
@given(cases(num_chunks=4, num_moments=6))
def test_the_bytes_are_the_fewest_of_all_ways_through_sets(case: Case) -> None:
    assert planned(*case).moved_bytes == fewest_bytes_by_sets(*case)


@settings(max_examples=150)
@given(cases(num_chunks=EXACT_CHUNKS, num_moments=9))
def test_the_bytes_are_the_fewest_for_eight_chunks(case: Case) -> None:
    plan = planned(*case)
    assert plan.moved_bytes == fewest_bytes_by_intervals(*case)


@settings(max_examples=100)
@given(st.one_of(cases(num_chunks=5, num_moments=24), cases(num_chunks=14, num_moments=40)))
def test_the_budget_holds_in_every_period_and_iterations_repeat(case: Case) -> None:
    trace, sizes, budget = case
    plan = planned(trace, sizes, budget)
    _, second, third = replay(trace, sizes, plan, budget)
    assert second == third == plan.moved_bytes


@settings(max_examples=150)
@given(st.one_of(cases(num_chunks=14, num_moments=50), cases(num_chunks=12, num_moments=50, one_size=True)))
def test_least_recently_used_never_moves_fewer_bytes(case: Case) -> None:
    assert planned(*case).moved_bytes <= bytes_of_lru(*case)


@settings(max_examples=60)
@given(
    num_blocks=st.integers(1, 12),
    per_block=st.integers(1, 3),
    microbatches=st.integers(1, 2),
    recompute=st.booleans(),
    data=st.data(),
)
@pytest.mark.long
def test_a_gpt_moves_no_more_than_least_recently_used(
    num_blocks: int, per_block: int, microbatches: int, recompute: bool, data: st.DataObject
) -> None:
    trace = gpt_trace(num_blocks, per_block=per_block, microbatches=microbatches, recompute=recompute)
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=40, max_size=40))
    budget = max(sizes) + 4 + data.draw(st.integers(0, sum(sizes)))
    plan = planned(trace, sizes, budget)
    assert plan.moved_bytes <= bytes_of_lru(trace, sizes, budget)
    assert list(replay(trace, sizes, plan, budget))[1:] == [plan.moved_bytes] * 2


@pytest.mark.parametrize("num_blocks", [3, 6])
@pytest.mark.parametrize("room", [0, 7, 13, 40])
def test_a_gpt_of_few_chunks_moves_the_fewest_bytes(num_blocks: int, room: int) -> None:
    trace = gpt_trace(num_blocks)
    sizes = [9, *(5 + chunk % 3 for chunk in range(num_blocks))]
    assert planned(trace, sizes, 13 + room).moved_bytes == fewest_bytes_by_intervals(trace, sizes, 13 + room)


@pytest.mark.parametrize("room", range(25))
def test_a_chain_of_equal_chunks_keeps_those_around_both_turns(room: int) -> None:
    """There and back through 26 chunks: `room` of them are saved at the far end, and as many at the near."""
    uses = (*range(26), *range(24, -1, -1))
    trace = Trace(uses, (3,) * len(uses))
    assert planned(trace, [2] * 26, 3 + 2 + 2 * room).moved_bytes == 2 * (50 - 2 * room)


def test_other_memory_decides_who_goes_where_recency_would_be_wrong() -> None:
    """Chunk 1 is used more recently than 2 when a peak comes, and needed later."""
    trace = Trace((2, 1, 0, 2, 3, 1), (0, 0, 1, 0, 0, 0))
    sizes = [1, 1, 1, 1]
    assert planned(trace, sizes, 3).moved_bytes == fewest_bytes_by_sets(trace, sizes, 3) == 2
    assert bytes_of_lru(trace, sizes, 3) == 4


def test_the_best_of_several_starts_is_taken() -> None:
    case = Trace((1, 2, 0, 2), (0, 1, 0, 2)), [7, 8, 6], 18
    assert planned(*case).moved_bytes == fewest_bytes_by_sets(*case) == 13


@pytest.mark.parametrize(
    ("case", "moved"),
    [
        # Dropping the chunk needed latest is best here; short stays first would move 18 bytes.
        (
            (
                Trace((6, 1, 2, 0, 8, 3, 7, 5, 4, 0), (0, 0, 0, 0, 1, 0, 2, 2, 0, 0)),
                [2, 4, 5, 3, 2, 7, 5, 6, 4],
                29,
            ),
            14,
        ),
        # The least recently used chunk is the better victim here: it saves 5 bytes.
        (
            (
                Trace(
                    (3, 5, 7, 2, 9, 1, 4, 9, 0, 9, 1, 9, 8, 3, 5, 7, 6, 3),
                    (0, 0, 0, 0, 0, 1, 1, 2, 1, 2, 0, 2, 0, 0, 1, 2, 2, 0),
                ),
                [7, 7, 4, 3, 2, 2, 3, 8, 6, 3],
                16,
            ),
            50,
        ),
        # What stays from one iteration to the next counts, which the first lap does not show: 1 byte.
        (
            (
                Trace((0, 9, 4, 6, 8, 5, 2, 3, 4, 7, 0), (0, 0, 0, 2, 0, 0, 2, 0, 0, 2, 0)),
                [8, 1, 2, 2, 8, 7, 1, 9, 7, 6],
                29,
            ),
            32,
        ),
    ],
)
def test_each_greedy_choice_has_cases_where_it_is_better(case: Case, moved: int) -> None:
    assert len(case[0].moments) > EXACT_CHUNKS
    assert planned(*case).moved_bytes == moved <= bytes_of_lru(*case)


def test_a_plan_is_the_same_in_every_iteration() -> None:
    """Of three chunks in turn, room for two: an alternating plan would move three in two iterations."""
    assert planned(Trace((0, 1, 2), (0, 0, 0)), [1, 1, 1], 2).moved_bytes == 2


def test_a_plan_is_a_function_of_its_arguments() -> None:
    trace = gpt_trace(6, per_block=2, recompute=True)
    plans = {planned(Trace(trace.uses, trace.other_bytes), [4] * 13, 30) for _ in range(3)}
    assert len(plans) == 1


def test_what_fits_is_never_moved() -> None:
    trace = gpt_trace(12)
    for budget in (None, 4 + 13 * 5):
        plan = planned(trace, [5] * 13, budget)
        assert plan.moved_bytes == 0
        assert all(not (period.fetch or period.ahead) for period in plan.periods)
        assert {period.present for period in plan.periods} == {frozenset(range(13))}
    assert planned(Trace((), ()), [5], 1).periods == ()
    assert planned(Trace((0,), (3,)), [5], 8).moved_bytes == 0


def test_a_fetch_starts_a_period_ahead_where_both_periods_have_room() -> None:
    trace = Trace((0, 1, 2, 3, 4), (0, 0, 3, 0, 3))
    plan = planned(trace, [4] * 5, 8)  # none can stay: beside moments 2 and 4 there is room for one byte
    assert [period.present for period in plan.periods] == [{use} for use in trace.uses]
    assert [period.ahead for period in plan.periods] == [(1,), (2,), (), (4,), ()]
    assert [period.fetch for period in plan.periods] == [(0,), (), (), (3,), ()]


def test_arguments_of_one_call_are_present_together() -> None:
    trace = Trace((0, 1, 2), (0, 0, 0), (frozenset(), frozenset({0}), frozenset()))
    plan = planned(trace, [3, 3, 3], 6)
    assert plan.periods[1].present == {0, 1}
    assert plan_evictions(trace, [3, 3, 3], 5) == DoesNotFit(1, 1, needed_bytes=6, allowed_bytes=5)


def test_a_use_that_does_not_fit_is_named_with_the_number_that_would_do() -> None:
    trace = Trace((0, 1, 2), (5, 7, 1))
    lacks = plan_evictions(trace, [4, 3, 8], 8)
    assert lacks == DoesNotFit(chunk=1, moment=1, needed_bytes=10, allowed_bytes=8)
    assert isinstance(plan_evictions(trace, [4, 3, 8], 10), EvictionPlan)


LATEST, OLDEST = (lambda _, next_need: -next_need), (lambda last_need, _: last_need)


def kept(uses: tuple[int, ...], sizes: list[int], budget: int, order: Callable[[int, int], int]) -> set[int]:
    """Return the chunks that a greedy iteration keeps from one use to another in it."""
    trace = Trace(uses, (0,) * len(uses))
    ring = IntervalRing(trace, sizes, tuple(budget - sizes[use] for use in uses), frozenset(uses))
    return {interval.chunk for interval in _greedy_intervals(ring, order)}


def test_greedy_evictions_by_next_and_by_last_need() -> None:
    uses, sizes = (0, 1, 2, 3, 2, 1, 0), [4, 2, 3, 1]
    assert kept(uses, sizes, 10, LATEST) == kept(uses, sizes, 10, OLDEST) == {0, 1, 2}
    assert kept(uses, sizes, 9, LATEST) == {1, 2}  # 0 is needed last, and was used first
    assert kept(uses, sizes, 6, LATEST) == {1, 2}
    assert kept(uses, sizes, 5, LATEST) == {2}
    turns = (0, 1, 2, 0, 1, 2)
    assert kept(turns, [1] * 3, 2, LATEST) == {0, 2}  # 1 is evicted at the use of 2, and 0 at that of 1
    assert kept(turns, [1] * 3, 2, OLDEST) == set()
    assert kept((5, 4, 3, 4, 5), [1] * 6, 2, lambda *_: 0) == {5}  # ties by number


@settings(max_examples=100)
@given(cases(num_chunks=14, num_moments=40), st.sampled_from([LATEST, OLDEST]))
def test_greedy_evictions_free_the_bytes(case: Case, order: Callable[[int, int], int]) -> None:
    trace, sizes, budget = case
    room = [budget - total(trace.needed[m], sizes) - trace.other_bytes[m] for m in range(len(trace))]
    ring = IntervalRing(trace, sizes, tuple(room))
    intervals = _greedy_intervals(ring, order)
    assert intervals <= set(ring.intervals)
    for moment in range(len(trace)):
        beside = [each for each in intervals if moment in ring.between(each)]
        assert total([each.chunk for each in beside], sizes) <= room[moment]
    everything = IntervalRing(trace, sizes, (sum(sizes),) * len(trace))
    assert _greedy_intervals(everything, order) == set(everything.intervals)  # none is evicted in vain


@settings(max_examples=60)
@given(cases(num_chunks=4, num_moments=6), st.frozensets(st.integers(0, 3)))
def test_what_the_optimizer_writes_is_fetched_in_every_iteration(case: Case, written: frozenset[int]) -> None:
    trace, sizes, budget = case
    plan = plan_evictions(trace, sizes, budget, out_of_date=written)
    assert isinstance(plan, EvictionPlan)
    assert plan.moved_bytes == fewest_bytes_by_sets(trace, sizes, budget, written)
    assert not set(plan.periods[-1].ahead) & written
    moved = sum(total((*period.fetch, *period.ahead), sizes) for period in plan.periods)
    assert moved == plan.moved_bytes
    fetched = {chunk for period in plan.periods for chunk in (*period.fetch, *period.ahead)}
    assert written & trace.moments.keys() <= fetched
    for period, needed in zip(plan.periods, trace.needed, strict=True):
        assert needed <= period.present


@settings(max_examples=60)
@given(cases(num_chunks=14, num_moments=40), st.frozensets(st.integers(0, 13)))
def test_a_plan_of_many_chunks_fetches_what_was_written(case: Case, written: frozenset[int]) -> None:
    trace, sizes, budget = case
    plan = plan_evictions(trace, sizes, budget, out_of_date=written)
    assert isinstance(plan, EvictionPlan)
    present: set[int] = set(plan.periods[-1].present) - written | set(plan.periods[-1].ahead)
    for period, needed, other in zip(plan.periods, trace.needed, trace.other_bytes, strict=True):
        present = (present & period.present) | set(period.fetch)
        assert needed <= present == period.present
        assert total(present, sizes) + total(period.ahead, sizes) + other <= budget
        present |= set(period.ahead)
