"""Every schedule is valid at every size, and the orders are those of the papers."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colossalai.pipeline.schedules._action import Op
from colossalai.pipeline.schedules._generators import (
    SCHEDULES,
    forward_only,
    gpipe,
    make_schedule,
    one_f_one_b,
)
from colossalai.pipeline.schedules._simulate import peak_live_microbatches
from colossalai.pipeline.schedules._validate import validate
from tests.pipeline.schedules.schedule_strategies import schedules, sizes

pytestmark = pytest.mark.unit


def _rows(schedule):
    return [" ".join(map(str, actions)) for actions in schedule.actions]


@settings(max_examples=300)
@given(schedules())
def test_a_schedule_is_valid(schedule):
    validate(schedule)


@settings(max_examples=150)
@given(schedules())
def test_the_forwards_alone_are_valid(schedule):
    forwards = forward_only(schedule)
    validate(forwards)
    assert {action.op for row in forwards.actions for action in row} == {Op.FORWARD}


def test_the_plain_orders():
    assert _rows(gpipe(2, 3)) == ["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2"]
    assert _rows(one_f_one_b(2, 3)) == ["0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"]


def test_the_interleaved_order():
    """Rank 0 of two, with two chunks: 2 (p-1) + (v-1) p = 4 forwards first, then by turns."""
    schedule = make_schedule("interleaved", 2, 4, 2)
    assert schedule.rank_of_stage == (0, 1, 0, 1)
    assert _rows(schedule) == [
        "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
        "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
    ]


def test_the_zb_h1_order():
    """The first rank waits for nobody's W; the last one puts off its own until p are live."""
    assert _rows(make_schedule("zb-h1", 2, 4)) == [
        "0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3",
        "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1F3 1I3 1W2 1W3",
    ]


def test_the_zb_v_order():
    schedule = make_schedule("zb-v", 2, 4)
    assert schedule.rank_of_stage == (0, 1, 1, 0)
    assert _rows(schedule) == [
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0B0 3F2 3I2 3W2 0B1 3F3 3I3 0I2 3W3 0I3 0W2 0W3",
        "1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 1I2 2I3 1I3 2W2 1W2 2W3 1W3",
    ]


@pytest.mark.parametrize("num_microbatches", [1, 3])
@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-h1"])
def test_one_rank_and_chunk_trains_microbatch_by_microbatch(name, num_microbatches):
    (row,) = _rows(make_schedule(name, 1, num_microbatches, 1))
    assert row == " ".join(f"0F{number} 0B{number}" for number in range(num_microbatches))


@given(sizes)
def test_one_chunk_is_1f1b(size):
    num_ranks, num_microbatches, _ = size
    schedule = make_schedule("interleaved", num_ranks, num_microbatches, 1)
    assert schedule.actions == one_f_one_b(num_ranks, num_microbatches).actions


@given(sizes)
def test_live_microbatches_are_bounded(size):
    num_ranks, num_microbatches, num_chunks = size
    ranks = range(num_ranks)

    def peaks(name, chunks=None):
        return peak_live_microbatches(make_schedule(name, num_ranks, num_microbatches, chunks))

    assert peaks("gpipe") == (num_microbatches,) * num_ranks
    assert peaks("1f1b") == tuple(min(num_microbatches, num_ranks - rank) for rank in ranks)
    for name in ("zb-h1", "zb-v"):
        assert max(peaks(name)) <= max(peaks("1f1b"))
    if num_microbatches % num_ranks == 0 and num_microbatches > num_ranks and num_chunks > 1:
        assert peaks("interleaved", num_chunks)[0] == num_ranks + (num_ranks - 1) / num_chunks


@given(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 5), st.integers(1, 9))
def test_a_schedule_is_the_same_every_time(name, num_ranks, num_microbatches):
    first, second = (make_schedule(name, num_ranks, num_microbatches) for _ in range(2))
    assert first == second
    assert first.name == name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("2f2b", 2, 2), "there is no schedule '2f2b': choose one of gpipe, 1f1b, interleaved, zb-h1, zb-v"),
        (("1f1b", 2, 2, 2), "schedule '1f1b' has 1 chunk on a rank, not 2: give num_chunks=1 or none"),
        (("zb-v", 2, 2, 3), "schedule 'zb-v' has 2 chunks on a rank, not 3: give num_chunks=2 or none"),
        (("gpipe", 0, 2), "num_ranks is 0; it must be at least 1"),
        (("1f1b", 2, 0), "num_microbatches is 0; it must be at least 1"),
        (("zb-h1", 2, 0), "num_microbatches is 0; it must be at least 1"),
        (("zb-v", 2, -1), "num_microbatches is -1; it must be at least 1"),
        (("interleaved", 2, 2, 0), "num_chunks is 0; it must be at least 1"),
    ],
)
def test_a_mistake_is_said(arguments, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        make_schedule(*arguments)
