"""Scheduler: under any schedule each token reads its own sequence, and every request gets its answer."""

from dataclasses import replace

import pytest
from hypothesis import given, settings

from colossalai.inference import Request
from colossalai.inference.scheduling import BlockPool, RunningSequence, Scheduler
from tests.inference.scheduling.schedules import Arrival, Player, Schedule, schedules
from tests.tiers import soaked

pytestmark = pytest.mark.unit


@given(schedules())
@settings(max_examples=50)
def test_any_schedule(plan):
    Player(plan).play()


@pytest.mark.long
@pytest.mark.soak
@given(schedules())
@settings(max_examples=soaked(10_000))
def test_any_of_many_schedules(plan):
    Player(plan).play()


def arrival(prompt, **more):
    settings = {"tick": 0, "max_tokens": 6, "n": 1, "priority": 0, "abort": None, "wants_scores": False}
    return Arrival(prompt=tuple(prompt), **settings | more)


def plan(*arrivals, **more):
    """Return a schedule with room for everything, but for what is given."""
    settings = {
        "block_size": 4,
        "num_blocks": 60,
        "max_running": 8,
        "max_tokens": 32,
        "num_microbatches": 1,
        "keeps_prefixes": True,
        "longest_draft": 0,
        "changes": (),
        "seed": 0,
    }
    return Schedule(arrivals=arrivals, **settings | more)


def played(*arrivals, **more):
    player = Player(plan(*arrivals, **more))
    player.play()
    return player


@pytest.mark.parametrize("num_microbatches", [1, 2, 4])
def test_preempted_ones_finish_with_the_same_tokens(num_microbatches):
    arrivals = [arrival([number] * 7, max_tokens=20) for number in range(4)]
    small = played(*arrivals, num_blocks=9, num_microbatches=num_microbatches)
    assert small.scheduler.num_preemptions > 0
    large = played(*arrivals, num_microbatches=num_microbatches)
    assert large.scheduler.num_preemptions == 0
    assert small.answers == large.answers


def test_a_prompt_shares_the_blocks_that_the_same_step_fills():
    player = played(arrival(range(9)), arrival([*range(8), 3, 3]), arrival([*range(4), 9, 9]))
    assert player.num_hits == 8 + 4
    assert played(arrival(range(9)), arrival(range(9)), keeps_prefixes=False).num_hits == 0


def test_a_prompt_of_full_blocks_leaves_its_last_token_to_be_computed():
    assert played(arrival(range(8)), arrival(range(8), tick=20)).num_hits == 4


def test_what_has_been_answered_is_found_by_who_asks_on():
    first = played(arrival(range(8)))
    answer = first.answers[0, 0]
    # All but the last token of the answer have been computed: 8 + 5, three blocks.
    assert played(arrival(range(8)), arrival([*range(8), *answer, 1], tick=20)).num_hits == 12


@pytest.mark.parametrize(("length", "num_copies"), [(8, 0), (9, 2)])
def test_answers_to_one_prompt_copy_the_block_that_they_share_when_they_part(length, num_copies):
    assert played(arrival(range(length), n=3)).num_copies == num_copies


def test_what_was_guessed_right_is_found_by_who_asks_on():
    for seed in range(20):
        settings = {"longest_draft": 4, "seed": seed}
        answer = played(arrival(range(8), max_tokens=14), **settings).answers[0, 0]
        both = arrival(range(8), max_tokens=14), arrival([*range(8), *answer, 1], tick=30)
        # Of 8 + 14 tokens all but the last have been computed: five blocks.
        assert played(*both, **settings).num_hits == 20


def test_a_block_is_not_found_before_its_last_token_is_computed():
    aborted = arrival(range(9), abort=1)
    assert played(aborted, arrival(range(9), tick=1), max_running=3, max_tokens=3).num_hits == 0
    aborted = arrival(range(9), abort=2)
    assert played(aborted, arrival(range(9), tick=2), max_running=3, max_tokens=3).num_hits == 4


def test_weights_that_change_void_what_was_found_before():
    twice = arrival(range(9)), arrival(range(9), tick=20)
    assert played(*twice).num_hits == 8
    for all_begin_again in (False, True):
        assert played(*twice, changes=((15, all_begin_again),)).num_hits == 0


def test_who_begins_again_is_found_by_who_comes_later():
    twice = arrival(range(9)), arrival(range(9), tick=20)
    assert played(*twice, changes=((2, True),)).num_hits == 8
    # Half of it is of older weights, so that nobody may find it.
    assert played(*twice, changes=((2, False),)).num_hits == 0


def test_who_is_preempted_while_its_token_is_drawn_waits_for_it():
    pool = BlockPool(8, 1)
    scheduler = Scheduler(pool, max_running=4, max_tokens=8, num_microbatches=2)
    old, young = (
        RunningSequence(
            Request(request_id=name, prompt_token_ids=(1,)), index=0, order=(0, order, 0), root=name.encode()
        )
        for order, name in enumerate(("old", "young"))
    )
    scheduler.add(old)
    scheduler.add(young)
    for chunk in scheduler.schedule().chunks:
        scheduler.advance(chunk, [[2]])
    first, second = scheduler.schedule(), scheduler.schedule()
    assert [chunk.sequence for chunk in (*first.chunks, *second.chunks)] == [old, young]
    others = [pool.allocate() for _ in range(pool.num_available)]
    scheduler.advance(first.chunks[0], [[3]])
    assert [chunk.sequence for chunk in scheduler.schedule().chunks] == [old]
    assert scheduler.waiting == [young]
    pool.release(others)
    assert scheduler.schedule() is None
    scheduler.advance(second.chunks[0], [[3]])
    (chunk,) = scheduler.schedule().chunks
    assert (chunk.sequence, chunk.start, chunk.token_ids) == (young, 1, (2, 3))


def test_nobody_is_let_in_who_would_throw_another_out_at_once():
    player = played(arrival([1] * 8), arrival([2] * 8), num_blocks=4)
    assert player.scheduler.num_preemptions == 0


def test_what_has_been_guessed_wrong_is_computed_again():
    greatest = [
        played(arrival([number], max_tokens=40), longest_draft=4, seed=number).num_steps
        for number in range(8)
    ]
    assert max(greatest) < 40, "no guess has saved a step"
    assert played(arrival([0], max_tokens=40)).num_steps == 40


def test_who_is_answered_gets_a_token_in_each_step_while_a_long_prompt_is_read():
    answered = [arrival([number], max_tokens=30) for number in range(7)]
    player = Player(plan(*answered, arrival(range(100), tick=2), max_tokens=10))
    player.arrive(0, player.plan.arrivals[0])
    for number in range(1, 7):
        player.arrive(number, player.plan.arrivals[number])
    player.fill()
    player.collect()
    player.arrive(7, player.plan.arrivals[7])
    for _ in range(10):
        player.fill()
        (step, _), *_ = player.under_way
        assert [chunk.num_draws for chunk in step.chunks[:7]] == [1] * 7
        assert len(step.chunks) == 8
        player.collect()


@pytest.mark.parametrize(("num_answered", "sizes"), [(8, [2, 2, 2, 2]), (5, [2, 2, 1])])
def test_steps_under_way_share_out_who_is_answered(num_answered, sizes):
    each = arrival([1], max_tokens=30)
    player = Player(plan(*[each] * num_answered, num_microbatches=4, keeps_prefixes=False))
    for number in range(num_answered):
        player.arrive(number, each)
    for _ in range(6):
        player.fill()
        player.collect()
    player.fill()
    assert sorted((len(step.chunks) for step, _ in player.under_way), reverse=True) == sizes


def test_priorities_go_before_arrival():
    urgent = replace(arrival([1] * 4), priority=0)
    player = Player(plan(*(replace(urgent, priority=1),) * 3, urgent, max_running=1))
    for number, each in enumerate(player.plan.arrivals):
        player.arrive(number, each)
    player.fill()
    assert player.scheduler.running[0].request.request_id == "3"


def test_a_budget_below_one_token_for_each_is_refused():
    with pytest.raises(ValueError, match=r"max_tokens_per_step=3 is less than max_running=4"):
        Scheduler(BlockPool(4, 4), max_running=4, max_tokens=3)
