"""The messages follow from the actions: each is sent once, in order, and is what someone needs."""

import pytest
from hypothesis import given, settings

from colossalai.pipeline.schedules._generators import forward_only, one_f_one_b, zb_v
from colossalai.pipeline.schedules._messages import Message, MessageKind, message_needed_by, messages_between
from tests.pipeline.schedules.schedule_strategies import schedules

pytestmark = pytest.mark.unit

ACTIVATION, GRADIENT = MessageKind.ACTIVATION, MessageKind.GRADIENT


def test_the_messages_of_1f1b():
    assert messages_between(one_f_one_b(2, 2)) == {
        (0, 1): (Message(0, 1, ACTIVATION, 1, 0), Message(0, 1, ACTIVATION, 1, 1)),
        (1, 0): (Message(1, 0, GRADIENT, 0, 0), Message(1, 0, GRADIENT, 0, 1)),
    }


def test_a_rank_sends_itself_nothing():
    """The turn of the V is on the last rank: four stages, two of the three borders have messages."""
    between = messages_between(zb_v(2, 1))
    assert between == {
        (0, 1): (Message(0, 1, ACTIVATION, 1, 0), Message(0, 1, GRADIENT, 2, 0)),
        (1, 0): (Message(1, 0, ACTIVATION, 3, 0), Message(1, 0, GRADIENT, 0, 0)),
    }
    assert messages_between(one_f_one_b(1, 3)) == {}


def test_forwards_send_no_gradients():
    between = messages_between(forward_only(zb_v(2, 3)))
    assert {message.kind for messages in between.values() for message in messages} == {ACTIVATION}


@settings(max_examples=100)
@given(schedules())
def test_what_is_sent_is_what_is_needed(schedule):
    sent = [message for messages in messages_between(schedule).values() for message in messages]
    needed = [message_needed_by(action, schedule) for actions in schedule.actions for action in actions]
    assert len(sent) == len(set(sent))
    assert set(sent) == set(needed) - {None}
    assert all(message.destination == schedule.rank_of_stage[message.stage] for message in sent)
