"""Messages of a schedule, derived from its actions and the placement of the stages.

A forward sends its output to the next stage, a backward (or its first half, the input gradient) sends the
gradient of its input to the stage before. Neighbouring stages on one rank pass values on without a message.
Between two ranks the messages keep the order in which the sender computes them.
"""

from dataclasses import dataclass
from enum import StrEnum

from colossalai.pipeline.schedules._action import Action, Op, Schedule


class MessageKind(StrEnum):
    """Content of a message."""

    ACTIVATION = "activation"
    GRADIENT = "gradient"
    TOKEN = "token"  # digest of a stage and its data; see [Note: specs before payloads]


@dataclass(frozen=True, slots=True)
class Message:
    """One message between two pipeline ranks.

    Attributes:
        source: The sending rank.
        destination: The receiving rank.
        kind: Content: an activation is sent to the next stage, a gradient to the stage before.
        stage: The receiving stage.
        microbatch: The microbatch.
    """

    source: int
    destination: int
    kind: MessageKind
    stage: int
    microbatch: int


def message_sent_by(action: Action, schedule: Schedule) -> Message | None:
    """Return the message that sends the result of an action; None if it stays on the rank."""
    if action.op is Op.FORWARD and action.stage + 1 < schedule.num_stages:
        return _message(MessageKind.ACTIVATION, action.stage, action.stage + 1, action, schedule)
    if action.op in (Op.BACKWARD, Op.INPUT_GRAD) and action.stage > 0:
        return _message(MessageKind.GRADIENT, action.stage, action.stage - 1, action, schedule)
    return None


def message_needed_by(action: Action, schedule: Schedule) -> Message | None:
    """Return the message that must arrive before an action; None if it needs none."""
    if action.op is Op.FORWARD and action.stage > 0:
        return _message(MessageKind.ACTIVATION, action.stage - 1, action.stage, action, schedule)
    if action.op in (Op.BACKWARD, Op.INPUT_GRAD) and action.stage + 1 < schedule.num_stages:
        return _message(MessageKind.GRADIENT, action.stage + 1, action.stage, action, schedule)
    return None


def messages_between(schedule: Schedule) -> dict[tuple[int, int], tuple[Message, ...]]:
    """Return the messages of every pair (source, destination) of ranks, in sending order.

    A pair that exchanges nothing is not in the dictionary.
    """
    found: dict[tuple[int, int], list[Message]] = {}
    for actions in schedule.actions:
        for action in actions:
            message = message_sent_by(action, schedule)
            if message is not None:
                found.setdefault((message.source, message.destination), []).append(message)
    return {pair: tuple(messages) for pair, messages in found.items()}


def _message(kind: MessageKind, giver: int, taker: int, action: Action, schedule: Schedule) -> Message | None:
    source, destination = schedule.rank_of_stage[giver], schedule.rank_of_stage[taker]
    if source == destination:
        return None
    return Message(source, destination, kind, taker, action.microbatch)
