"""A schedule that cannot be run is refused, with the name of what is wrong."""

import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from colossalai.pipeline.schedules._action import Op, Schedule
from colossalai.pipeline.schedules._generators import one_f_one_b, zb_v
from colossalai.pipeline.schedules._validate import ScheduleError, completed_by, needed_by, validate
from tests.pipeline.schedules.schedule_strategies import parse, parsed, schedules, with_row

pytestmark = pytest.mark.unit


def _refused(schedule: Schedule, message: str):
    with pytest.raises(ScheduleError, match=re.escape(message)):
        validate(schedule)


def _of_two_ranks(*rows, num_microbatches=1):
    return parsed(*rows, rank_of_stage=(0, 1), num_microbatches=num_microbatches)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (("0B0", "1F0 1B0"), "the forward (F) is missing for stage 0, microbatch 0 (rank 0)"),
        (("0F0 0B0", "1F0"), "the backward (B, or I and W) is missing for stage 1, microbatch 0 (rank 1)"),
        (("0F0 0B0", "1F0 1I0"), "the weight gradient (W) of an input gradient (I) is missing for stage 1"),
        (("0F0 0B0", "1F0 1W0"), "the input gradient (I) of a weight gradient (W) is missing for stage 1"),
        (("0F0 0B0 0I0", "1F0 1B0"), "the backward is there whole (B) and in parts (I) for stage 0"),
        (("0F0 0B0 0W0", "1F0 1B0"), "the backward is there whole (B) and in parts (W) for stage 0"),
        (("0F0 0F0 0B0", "1F0 1B0"), "0F0 is there 2 times, not once"),
        (("0F0 0B0 1B0", "1F0"), "1B0 (rank 0, position 2) is on the wrong rank: stage 1 is on rank 1"),
        (("0F0 0B0 2F0", "1F0 1B0"), "2F0 (rank 0, position 2) names a stage that is not one of 0 to 1"),
        (("0F0 0F1 0B0", "1F0 1B0"), "0F1 (rank 0, position 1) names a microbatch that is not one of 0 to 0"),
        (("0B0 0F0", "1F0 1B0"), "0B0 comes before 0F0 on rank 0 (positions 0 and 1), but needs it"),
        (("0F0 0B0", "1F0 1W0 1I0"), "1W0 comes before 1I0 on rank 1 (positions 1 and 2), but needs it"),
    ],
)
def test_what_is_wrong_is_named(rows, message):
    _refused(_of_two_ranks(*rows), f"schedule 'by hand': {message}")


def test_a_v_is_in_order_on_its_rank():
    row = [parse(cell) for cell in ("2F0", "1F0", "2I0", "2W0", "1I0", "1W0")]
    _refused(with_row(zb_v(2, 1), 1, row), "2F0 comes before 1F0 on rank 1 (positions 0 and 1)")


def test_a_deadlock_says_who_waits_for_what():
    schedule = _of_two_ranks("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1", num_microbatches=2)
    _refused(
        schedule,
        "schedule 'by hand' deadlocks: rank 0 waits at position 1 (0B0) for 1B0, which is at position 2 "
        "of rank 1; rank 1 waits at position 1 (1F1) for 0F1, which is at position 2 of rank 0",
    )


@pytest.mark.parametrize(
    "rows",
    [
        ("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1", "2F0 2B0 2F1 2B1"),
        ("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1", "2F0 2F1 2B0 2B1"),
    ],
)
def test_a_rank_outside_the_cycle_is_not_named(rows):
    """Rank 2, or 0, waits as well, but nobody waits for it."""
    outside = 2 if rows[0].startswith("0F0 0B0") else 0
    with pytest.raises(ScheduleError, match="rank 1 waits at") as caught:
        validate(parsed(*rows, rank_of_stage=(0, 1, 2), num_microbatches=2))
    assert str(caught.value).count(" waits at ") == 2
    assert f"rank {outside} waits" not in str(caught.value)


def test_a_receiver_keeps_what_comes_early():
    """Stage 1 takes the microbatches in another order than stage 0 sends them: no rank waits for another."""
    validate(_of_two_ranks("0F0 0F1 0B1 0B0", "1F1 1B1 1F0 1B0", num_microbatches=2))


def test_placement():
    schedule = one_f_one_b(2, 1)
    _refused(
        Schedule("x", 1, (0, 2), schedule.actions),
        "places stage 1 on rank 2, but has actions for ranks 0 to 1",
    )
    _refused(
        Schedule("x", 1, (0, 0), schedule.actions), "has no stage on rank 1: use fewer ranks or more stages"
    )
    _refused(Schedule("x", 0, (0, 1), schedule.actions), "has 0 microbatches; it needs at least 1")


@given(schedules(), st.data())
def test_a_dropped_action_is_missed(schedule, data):
    rank = data.draw(st.integers(0, schedule.num_ranks - 1))
    row = list(schedule.actions[rank])
    dropped = row.pop(data.draw(st.integers(0, len(row) - 1)))
    changed = with_row(schedule, rank, row)
    assume(any(action.op is not Op.FORWARD for actions in changed.actions for action in actions))
    message = f"missing for stage {dropped.stage}, microbatch {dropped.microbatch} "
    with pytest.raises(ScheduleError, match=message):
        validate(changed)


@given(schedules(), st.data())
def test_a_doubled_action_is_found(schedule, data):
    rank = data.draw(st.integers(0, schedule.num_ranks - 1))
    row = list(schedule.actions[rank])
    doubled = data.draw(st.sampled_from(row))
    row.insert(data.draw(st.integers(0, len(row))), doubled)
    with pytest.raises(ScheduleError, match=f"{doubled} is there 2 times"):
        validate(with_row(schedule, rank, row))


@given(schedules(), st.data())
def test_an_action_before_what_it_needs_is_found(schedule, data):
    """Swap an action with one of the same rank on which it depends, perhaps by way of other ranks."""
    rank = data.draw(st.integers(0, schedule.num_ranks - 1))
    row = list(schedule.actions[rank])
    late = data.draw(st.integers(0, len(row) - 1))
    needed = _all_needs(schedule, row[late])
    earlier = [place for place in range(late) if needed.intersection(completed_by(row[place]))]
    assume(earlier)
    early = data.draw(st.sampled_from(earlier))
    row[early], row[late] = row[late], row[early]
    with pytest.raises(ScheduleError, match=r"but needs it|deadlocks"):
        validate(with_row(schedule, rank, row))


def _all_needs(schedule, action):
    found, pending = set(), [action]
    while pending:
        for need in needed_by(pending.pop(), schedule.num_stages):
            if need not in found:
                found.add(need)
                pending.append(need)
    return found
