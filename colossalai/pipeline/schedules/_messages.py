"""Which messages a schedule sends: they follow from its actions and from which rank holds which stage.

A forward sends its output to the next stage, a backward (or its first half, the input gradient) sends the
gradient of its input to the stage before. Neighbouring stages of one rank pass values on without a message.
Between two ranks the messages keep the order in which the sender computes them.
"""

from dataclasses import dataclass
from enum import StrEnum

from colossalai.pipeline.schedules._action import Action, Op, Schedule


class MessageKind(StrEnum):
    """What a message carries."""

    ACTIVATION = "activation"
    GRADIENT = "gradient"
    TOKEN = "token"  # what a stage is about to send; see [Note: what the receiver knows]


@dataclass(frozen=True, slots=True)
class Message:
    """One message between two pipeline ranks.

    Attributes:
        source: The rank that sends it.
        destination: The rank that receives it.
        kind: An activation goes to the next stage, a gradient to the stage before.
        stage: The stage that receives it.
        microbatch: The microbatch that it belongs to.
    """

    source: int
    destination: int
    kind: MessageKind
    stage: int
    microbatch: int


def message_sent_by(action: Action, schedule: Schedule) -> Message | None:
    """Return the message that follows an action; None if its result stays on the rank."""
    if action.op is Op.FORWARD and action.stage + 1 < schedule.num_stages:
        return _message(MessageKind.ACTIVATION, action.stage, action.stage + 1, action, schedule)
    if action.op in (Op.BACKWARD, Op.INPUT_GRAD) and action.stage > 0:
        return _message(MessageKind.GRADIENT, action.stage, action.stage - 1, action, schedule)
    return None


def message_needed_by(action: Action, schedule: Schedule) -> Message | None:
    """Return the message that must have come before an action; None if it needs none."""
    if action.op is Op.FORWARD and action.stage > 0:
        return _message(MessageKind.ACTIVATION, action.stage - 1, action.stage, action, schedule)
    if action.op in (Op.BACKWARD, Op.INPUT_GRAD) and action.stage + 1 < schedule.num_stages:
        return _message(MessageKind.GRADIENT, action.stage + 1, action.stage, action, schedule)
    return None


def messages_between(schedule: Schedule) -> dict[tuple[int, int], tuple[Message, ...]]:
    """Return the messages of every pair (source, destination) of ranks, in the order in which they are sent.

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
