"""A lowered schedule is all that a rank does: messages meet in order, sends end, nobody waits in vain."""

from collections import Counter, deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colossalai.pipeline.schedules._action import Op
from colossalai.pipeline.schedules._generators import forward_only, gpipe, make_schedule, one_f_one_b, zb_v
from colossalai.pipeline.schedules._lowered import WINDOW, StepKind, lower
from colossalai.pipeline.schedules._messages import MessageKind, message_needed_by, messages_between
from tests.pipeline.schedules.schedule_strategies import schedules

pytestmark = pytest.mark.unit

RECV, WAIT = StepKind.RECV, StepKind.WAIT
SENDS = (StepKind.SEND_F, StepKind.SEND_B, StepKind.TOKEN)


def written(schedule, rank, **options):
    return " ".join(str(step) for step in lower(schedule, rank, **options))


def test_the_steps_of_1f1b():
    assert written(one_f_one_b(2, 3), 0) == (
        "0TOKEN>1 0F0 0SEND_F0>1 0RECV_B0<1 0F1 0SEND_F1>1 0RECV_B1<1 "
        "0WAIT_B0<1 0B0 0F2 0SEND_F2>1 0RECV_B2<1 0WAIT_B1<1 0B1 0CLOSE 0WAIT_B2<1 0B2"
    )
    assert written(one_f_one_b(2, 3), 1) == (
        "1RECV_T0<0 1WAIT_T0<0 1RECV_F0<0 1RECV_F1<0 1WAIT_F0<0 1RECV_F2<0 1F0 1B0 1SEND_B0>0 "
        "1WAIT_F1<0 1F1 1B1 1SEND_B1>0 1WAIT_F2<0 1F2 1CLOSE 1B2 1SEND_B2>0"
    )


def test_known_shapes_need_no_token_and_neighbours_on_a_rank_no_message():
    assert written(forward_only(zb_v(2, 1)), 1, has_tokens=False) == (
        "1RECV_F0<0 1WAIT_F0<0 1F0 1HAND_F0 2F0 2SEND_F0>0"
    )
    assert written(one_f_one_b(1, 1), 0) == "0F0 0CLOSE 0B0"


def test_the_last_addition_to_the_gradients_of_each_stage_is_announced():
    steps = lower(zb_v(2, 4), 0)
    closed = [steps[place + 1].action for place, step in enumerate(steps) if step.kind is StepKind.CLOSE]
    assert sorted(action.stage for action in closed) == [0, 3]
    for action in closed:
        later = steps[steps.index(next(s for s in steps if s.action == action and s.kind == action.op)) + 1 :]
        assert not any(
            step.kind in (Op.BACKWARD, Op.WEIGHT_GRAD) and step.action.stage == action.stage for step in later
        )


def run_against_each_other(lists):
    """Run the lists of all ranks over ordered links, as the backends do; check what each step relies on."""
    sent = {pair: deque() for pair in {(a, b) for a in range(len(lists)) for b in range(len(lists))}}
    arrived, posted, sending, heads = set(), set(), [set() for _ in lists], [0] * len(lists)
    ahead = [Counter() for _ in lists]
    received = {pair: [] for pair in sent}
    moved = True
    while moved:
        moved = False
        for rank, steps in enumerate(lists):
            while heads[rank] < len(steps):
                step = steps[heads[rank]]
                message = step.message
                if step.kind in SENDS and message is not None:
                    sent[rank, message.destination].append(message)
                    arrived.add(message)
                    sending[rank].add(message)
                elif step.kind is RECV:
                    received[message.source, rank].append(message)
                    posted.add(message)
                    ahead[rank][message.source] += 1
                elif step.kind is WAIT:
                    assert message in posted
                    if message not in arrived:
                        break
                    ahead[rank][message.source] -= 1
                    for over in step.over:
                        assert over in posted, "the peer had posted it"
                        sending[rank].remove(over)
                heads[rank] += 1
                moved = True
    assert heads == [len(steps) for steps in lists], "the ranks wait for each other"
    assert all(list(queue) == received[pair] for pair, queue in sent.items()), "both sides have one order"
    return ahead


@settings(max_examples=60)
@given(schedules(), st.booleans(), st.booleans())
def test_any_schedule_ends_with_messages_in_one_order(schedule, is_evaluation, has_tokens):
    schedule = forward_only(schedule) if is_evaluation else schedule
    lists = [lower(schedule, rank, has_tokens=has_tokens) for rank in range(schedule.num_ranks)]
    ahead = run_against_each_other(lists)
    assert all(count == 0 for counts in ahead for count in counts.values())
    payload = {pair: [] for pair in messages_between(schedule)}
    for rank, steps in enumerate(lists):
        computed = tuple(step.action for step in steps if step.kind in set(Op))
        assert computed == schedule.actions[rank]
        for step in steps:
            if step.kind in SENDS and step.message is not None and step.message.kind is not MessageKind.TOKEN:
                payload[rank, step.message.destination].append(step.message)
    assert {pair: tuple(messages) for pair, messages in payload.items()} == messages_between(schedule)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-v"])
def test_receives_are_posted_ahead_and_as_few_as_said(name):
    schedule = make_schedule(name, 4, 8)
    for rank in range(4):
        ahead, most = Counter(), 0
        for step in lower(schedule, rank):
            if step.kind in (RECV, WAIT):
                ahead[step.message.source] += 1 if step.kind is RECV else -1
                most = max(most, *ahead.values())
        assert most == WINDOW


def test_sends_are_over_when_the_schedule_says_so():
    """The gradient of a microbatch tells that its activation has arrived, and those before it."""
    over = [step.over for step in lower(one_f_one_b(2, 3), 0) if step.kind is WAIT]
    assert [[(m.kind, m.microbatch) for m in messages] for messages in over] == [
        [(MessageKind.TOKEN, 0), (MessageKind.ACTIVATION, 0)],
        [(MessageKind.ACTIVATION, 1)],
        [(MessageKind.ACTIVATION, 2)],
    ]
    flat = [m for step in lower(gpipe(2, 4), 0) for m in step.over]
    assert len(flat) == len(set(flat)) == 1 + 4


def test_what_is_needed_has_come():
    schedule = zb_v(3, 5)
    waited = set()
    for step in lower(schedule, 1):
        if step.kind is WAIT:
            waited.add(step.message)
        elif step.kind in set(Op):
            needed = message_needed_by(step.action, schedule)
            assert needed is None or needed in waited
