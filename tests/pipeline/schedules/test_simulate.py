"""Simulated bubbles are those of the papers, and a timeline keeps to what its schedule says."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colossalai.pipeline.schedules._generators import forward_only, make_schedule
from colossalai.pipeline.schedules._simulate import Costs, Replay, simulate
from colossalai.pipeline.schedules._validate import ScheduleError, completed_by, needed_by
from tests.pipeline.schedules.schedule_strategies import parsed, schedules

pytestmark = pytest.mark.unit

RANKS = [1, 2, 3, 4, 8]
FACTORS = [1, 2, 5]
COSTS = Costs(forward=1.0, backward=2.0)


@settings(max_examples=30)
@given(schedules(), st.integers(0, 10**6))
def test_a_replay_says_the_step_times_of_many_costs(schedule, seed):
    replay, draw = Replay(schedule), random.Random(seed)
    for _ in range(3):
        each = [[draw.uniform(0.5, 2.0) for _ in range(schedule.num_stages)] for _ in range(2)]
        costs = Costs(*each, p2p=draw.uniform(0.0, 0.5))
        assert replay.step_time(costs) == simulate(schedule, costs).step_time
        assert replay.run(costs) == simulate(schedule, costs)


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 8, 13, 32])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("costs", [COSTS, Costs(1.5, 1.25)])
def test_gpipe_and_1f1b(name, num_ranks, num_microbatches, costs):
    timeline = simulate(make_schedule(name, num_ranks, num_microbatches), costs)
    assert timeline.bubble_fraction == pytest.approx((num_ranks - 1) / num_microbatches, abs=1e-12)
    ideal = num_microbatches * (costs.forward + costs.backward)
    assert timeline.step_time == pytest.approx(ideal * (1 + timeline.bubble_fraction))
    assert timeline.idle_fraction == pytest.approx(1 - ideal / timeline.step_time, abs=1e-12)


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("num_chunks", [1, 2, 3, 4])
@pytest.mark.parametrize("num_more", [0, 1, 2, 5])
@pytest.mark.parametrize("factor", FACTORS)
def test_interleaved(num_ranks, num_chunks, factor, num_more):
    """Also where the ranks do not divide the microbatches."""
    num_microbatches = factor * num_ranks + num_more
    timeline = simulate(make_schedule("interleaved", num_ranks, num_microbatches, num_chunks), COSTS)
    wanted = (num_ranks - 1) / (num_chunks * num_microbatches)
    assert timeline.bubble_fraction == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("num_more", [0, 1, 5])
@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize(
    ("forward", "input_grad", "weight_grad"), [(1, 1, 1), (1, 1.5, 1), (1.25, 1.5, 0.5), (2, 1, 0)]
)
def test_zb_h1(num_ranks, num_more, factor, forward, input_grad, weight_grad):
    num_microbatches = factor * num_ranks + num_more
    costs = Costs(forward, input_grad + weight_grad, weight_grad=weight_grad)
    timeline = simulate(make_schedule("zb-h1", num_ranks, num_microbatches), costs)
    bubble = timeline.step_time - num_microbatches * (forward + input_grad + weight_grad)
    assert bubble == pytest.approx((num_ranks - 1) * (forward + input_grad - weight_grad), abs=1e-9)


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("num_more", [0, 1, 3, 6, 7, 8, 25])
def test_zb_v(num_ranks, num_more):
    """The last rank starts p - 1 forwards late; nothing else is lost, with 2p - 1 microbatches nowhere."""
    num_microbatches = num_ranks + num_more
    timeline = simulate(make_schedule("zb-v", num_ranks, num_microbatches), COSTS)
    assert timeline.step_time == 6 * num_microbatches + num_ranks - 1
    if num_microbatches >= 2 * num_ranks - 1:
        assert timeline.stall_times == (0.0,) * num_ranks


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_who_idles_less(num_ranks):
    """At one cost of a rank's share, and as few microbatches as fill the ranks."""
    halves = Costs(0.5, 1.0)
    bubbles = [
        simulate(make_schedule(name, num_ranks, 2 * num_ranks), costs).bubble_fraction
        for name, costs in [("1f1b", COSTS), ("interleaved", halves), ("zb-h1", COSTS), ("zb-v", halves)]
    ]
    assert bubbles == sorted(set(bubbles), reverse=True)


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("num_microbatches", [1, 5, 16])
def test_evaluation(num_ranks, num_microbatches):
    """Forwards alone fill the pipeline once; the V goes through the ranks twice."""
    for name, wanted in [("1f1b", num_ranks - 1), ("zb-v", 2 * (num_ranks - 1))]:
        schedule = forward_only(make_schedule(name, num_ranks, num_microbatches))
        timeline = simulate(schedule, COSTS)
        per_rank = num_microbatches * len(schedule.stages_of(0))
        assert timeline.step_time == per_rank + wanted
        assert timeline.peak_live_microbatches == (0.0,) * num_ranks


@settings(max_examples=100)
@given(schedules(), st.floats(0, 2), st.data())
def test_a_timeline_keeps_to_its_schedule(schedule, p2p, data):
    """Nothing overlaps on a rank, or starts before it can; and something is why it does not start earlier."""
    stages = st.lists(st.floats(0.1, 3.0), min_size=schedule.num_stages, max_size=schedule.num_stages)
    costs = Costs(data.draw(stages), data.draw(stages), p2p)
    timeline = simulate(schedule, costs)
    ends = {
        done: span.end for spans in timeline.spans for span in spans for done in completed_by(span.action)
    }
    for rank, spans in enumerate(timeline.spans):
        assert [span.action for span in spans] == list(schedule.actions[rank])
        free = 0.0
        for span in spans:
            arrivals = [
                ends[need] + (p2p if schedule.rank_of_stage[need.stage] != rank else 0.0)
                for need in needed_by(span.action, schedule.num_stages)
            ]
            assert span.start == max([free, *arrivals])
            assert span.end == span.start + costs.of(span.action)
            free = span.end


def test_costs_of_stages_and_messages():
    """Two ranks, one microbatch: both forwards, both backwards, and a message each way."""
    schedule = make_schedule("1f1b", 2, 1)
    timeline = simulate(schedule, Costs((1.0, 2.0), (3.0, 5.0), p2p=0.25))
    assert timeline.step_time == 1 + 0.25 + 2 + 5 + 0.25 + 3
    assert timeline.busy_times == (4.0, 7.0)
    assert timeline.bubble_fraction == pytest.approx((2 * 11.5 - 11) / 11)
    assert timeline.stall_times == (7.5, 0.0)
    assert timeline.num_messages == (1, 1)


def test_messages_between_neighbours_on_a_rank_are_free():
    timeline = simulate(make_schedule("zb-v", 2, 1), Costs(1.0, 2.0, p2p=10.0))
    assert timeline.num_messages == (2, 2)
    assert timeline.step_time == 4 + 4 + 4 * 10.0 + 1  # forwards, input gradients, messages, the last W


def test_a_backward_is_split_in_halves_unless_told():
    schedule = parsed("0F0 0I0 0W0", rank_of_stage=(0,), num_microbatches=1)
    assert [span.end for span in simulate(schedule, Costs(1, 3)).spans[0]] == [1, 2.5, 4]
    assert [span.end for span in simulate(schedule, Costs(1, 3, weight_grad=1)).spans[0]] == [1, 3, 4]


def test_live_microbatches_are_counted_to_the_weight_gradient():
    row = "0F0 0I0 0F1 0I1 0F2 0W0 0I2 0W1 0W2"
    schedule = parsed(row, rank_of_stage=(0,), num_microbatches=3)
    assert simulate(schedule, COSTS).peak_live_microbatches == (3.0,)


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        (Costs((1.0,), 2.0), "forward has 1 costs, but there are 2 stages: give one for each"),
        (Costs(1.0, 2.0, p2p=-1.0), "p2p is -1.0"),
        (Costs(-1.0, 2.0), "forward takes -1.0 on stage 0"),
        (Costs(1.0, 2.0, weight_grad=(1.0, 2.5)), "input_grad takes -0.5 on stage 1: .* part of backward"),
    ],
)
def test_costs_that_do_not_fit(costs, message):
    with pytest.raises(ValueError, match=message):
        simulate(make_schedule("1f1b", 2, 1), costs)


def test_a_bad_schedule_is_not_simulated():
    with pytest.raises(ScheduleError, match="missing"):
        simulate(parsed("0F0", "1B0", rank_of_stage=(0, 1), num_microbatches=1), COSTS)
