"""Lowering of a schedule to the flat list of steps of a rank, sends and receives among them.

A schedule lists computations. All other steps of a rank follow from it and from the placement of the stages,
for any model: the start of each message, the receives to post ahead, the point at which the memory of a send
is free, the last backward of a stage. They are computed here once for a number of microbatches, and the
executor is a loop over the result. Steps are printed with their stage first: `0F1` computes, `0SEND_F1>1`
begins to send its output to rank 1, `1RECV_F1<0` posts the receive on rank 1, `1WAIT_F1<0` waits for it.

[Note: completion of a send]
Not every backend can test whether a send has ended without waiting for it. The schedule shows it: when a
message from a rank arrives, all messages that the rank needed before it sent this one have arrived there. So
a WAIT lists the sends that are complete by then; waiting for them does not block, and frees their memory.
"""

from collections import Counter, deque
from dataclasses import dataclass
from enum import StrEnum

from colossalai.pipeline.schedules._action import Action, Op, Schedule
from colossalai.pipeline.schedules._messages import (
    Message,
    MessageKind,
    message_needed_by,
    message_sent_by,
    messages_between,
)

WINDOW = 2
"""Number of messages of each sender that are received ahead of need."""


class StepKind(StrEnum):
    """Kind of a step; the first four are the computations of `Op`."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRAD = "I"
    WEIGHT_GRAD = "W"
    TOKEN = "TOKEN"  # a stage begins its first forward, and sends the next one a digest of its output's spec
    RECV = "RECV"  # a receive is posted
    WAIT = "WAIT"  # a posted message arrives, and the sends that its sender needed for it are complete
    SEND_F = "SEND_F"  # an output is sent to the next stage
    SEND_B = "SEND_B"  # the gradient of an input is sent to the stage before
    HAND_F = "HAND_F"  # the same without a message, for a next stage on this rank
    HAND_B = "HAND_B"
    CLOSE = "CLOSE"  # the next backward is the last that adds to the gradients of a stage


@dataclass(frozen=True, slots=True)
class ScheduleStep:
    """One step of a rank.

    Attributes:
        kind: Kind of the step.
        action: The computation itself, or the maker of the sent value, or the user of the received one.
        message: The message to send, receive or wait for; None for a computation, and for a TOKEN to a stage
            on this rank.
        over: For a WAIT, the sends of this rank that are complete by then; see [Note: completion of a send].
    """

    kind: StepKind
    action: Action
    message: Message | None = None
    over: tuple[Message, ...] = ()

    def __str__(self) -> str:
        message = self.message
        if self.kind in _COMPUTATIONS:
            return str(self.action)
        if self.kind in (StepKind.RECV, StepKind.WAIT):
            assert message is not None, "a receive has a message"
            return f"{message.stage}{self.kind}_{_LETTERS[message.kind]}{message.microbatch}<{message.source}"
        number = "" if self.kind in (StepKind.TOKEN, StepKind.CLOSE) else self.action.microbatch
        receiver = "" if message is None else f">{message.destination}"
        return f"{self.action.stage}{self.kind}{number}{receiver}"


_COMPUTATIONS = frozenset(StepKind(op) for op in Op)
_LETTERS = {MessageKind.ACTIVATION: "F", MessageKind.GRADIENT: "B", MessageKind.TOKEN: "T"}


def lower(schedule: Schedule, rank: int, *, has_tokens: bool = True) -> tuple[ScheduleStep, ...]:
    """Return the steps of a pipeline rank, in order.

    Messages between two ranks keep the order of the sender's list on both sides. A receive is posted as soon
    as fewer than `WINDOW` of its sender's messages are ahead of need, and its shape can be known: a gradient
    when its activation has been sent, an activation when its stage's token has arrived.

    Args:
        schedule: A valid schedule.
        rank: The pipeline rank.
        has_tokens: Whether stages announce their outputs with tokens; not needed if all outputs have one
            shape that is known beforehand.
    """
    return tuple(_Lowering(schedule, rank, has_tokens=has_tokens).steps)


class _Lowering:
    """Builder of the list of steps of a rank."""

    def __init__(self, schedule: Schedule, rank: int, *, has_tokens: bool) -> None:
        self.steps: list[ScheduleStep] = []
        self._schedule, self._rank, self._has_tokens = schedule, rank, has_tokens
        self._incoming = {
            source: deque(self._with_tokens(messages))
            for (source, destination), messages in sorted(messages_between(schedule).items())
            if destination == rank
        }
        self._num_ahead: Counter[int] = Counter()
        self._posted: set[Message] = set()
        self._known: set[tuple[MessageKind, int, int]] = set()  # messages whose shape this rank can know
        self._in_flight: dict[int, list[Message]] = {}
        self._made_at: dict[Message, int] = {}  # positions of incoming messages in the lists of their senders
        self._needed_at: dict[Message, int] = {}  # positions of outgoing messages in those of their receivers
        self._find_positions()
        actions = schedule.actions[rank]
        for peer in self._incoming:
            self._post_ahead(peer, actions[0])
        closing = {action.stage: action for action in actions if action.op in (Op.BACKWARD, Op.WEIGHT_GRAD)}
        for action in actions:
            if closing.get(action.stage) == action:
                self.steps.append(ScheduleStep(StepKind.CLOSE, action))
            self._lower(action)

    def _lower(self, action: Action) -> None:
        """Add a computation, with its waits before it and its sends after it."""
        if action.op is Op.FORWARD:
            self._begin_stage(action)
        needed = message_needed_by(action, self._schedule)
        if needed is not None:
            self._wait(needed, action)
        self.steps.append(ScheduleStep(StepKind(action.op), action))
        sent = message_sent_by(action, self._schedule)
        is_forward = action.op is Op.FORWARD
        if sent is not None:
            self.steps.append(ScheduleStep(StepKind.SEND_F if is_forward else StepKind.SEND_B, action, sent))
            self._in_flight.setdefault(sent.destination, []).append(sent)
            if is_forward:  # a gradient has the shape of its activation
                self._known.add((MessageKind.GRADIENT, action.stage, action.microbatch))
                self._post_ahead(sent.destination, action)
        elif is_forward and action.stage + 1 < self._schedule.num_stages:
            self.steps.append(ScheduleStep(StepKind.HAND_F, action))
        elif action.op in (Op.BACKWARD, Op.INPUT_GRAD) and action.stage > 0:
            self.steps.append(ScheduleStep(StepKind.HAND_B, action))

    def _begin_stage(self, action: Action) -> None:
        """Before the first forward of a stage: wait for the token of the stage before, send its own."""
        stage, holders = action.stage, self._schedule.rank_of_stage
        if not self._has_tokens or (MessageKind.TOKEN, stage, 0) in self._known:
            return
        self._known.add((MessageKind.TOKEN, stage, 0))
        if stage > 0 and holders[stage - 1] != self._rank:
            self._wait(_token(holders[stage - 1], self._rank, stage), action)
        if stage + 1 < self._schedule.num_stages:
            is_told = holders[stage + 1] != self._rank
            message = _token(self._rank, holders[stage + 1], stage + 1) if is_told else None
            self.steps.append(ScheduleStep(StepKind.TOKEN, action, message))
            if message is not None:
                self._in_flight.setdefault(message.destination, []).append(message)

    def _wait(self, message: Message, action: Action) -> None:
        peer = message.source
        while message not in self._posted:
            self._post(peer, action)
        over: tuple[Message, ...] = ()
        if message.kind is not MessageKind.TOKEN:
            sent = self._in_flight.pop(peer, [])
            over = tuple(each for each in sent if self._needed_at[each] <= self._made_at[message])
            self._in_flight[peer] = [each for each in sent if each not in over]
        self.steps.append(ScheduleStep(StepKind.WAIT, action, message, over))
        self._num_ahead[peer] -= 1
        if message.kind is MessageKind.TOKEN:
            self._known.add((MessageKind.ACTIVATION, message.stage, 0))
        self._post_ahead(peer, action)

    def _post_ahead(self, peer: int, action: Action) -> None:
        """Post receives up to the window; the rank posts none for a peer that only receives from it."""
        queue = self._incoming.get(peer)
        while queue and self._num_ahead[peer] < WINDOW and self._has_known_shape(queue[0]):
            self._post(peer, action)

    def _post(self, peer: int, action: Action) -> None:
        message = self._incoming[peer].popleft()
        self._posted.add(message)
        self._num_ahead[peer] += 1
        self.steps.append(ScheduleStep(StepKind.RECV, action, message))

    def _has_known_shape(self, message: Message) -> bool:
        if message.kind is MessageKind.GRADIENT:
            return (message.kind, message.stage, message.microbatch) in self._known
        is_announced = message.kind is MessageKind.ACTIVATION and self._has_tokens
        return not is_announced or (message.kind, message.stage, 0) in self._known

    def _with_tokens(self, messages: tuple[Message, ...]) -> list[Message]:
        """Put a token before the first activation of every stage."""
        found: list[Message] = []
        announced: set[int] = set()
        for message in messages:
            if self._has_tokens and message.kind is MessageKind.ACTIVATION and message.stage not in announced:
                announced.add(message.stage)
                found.append(_token(message.source, message.destination, message.stage))
            found.append(message)
        return found

    def _find_positions(self) -> None:
        for actions in self._schedule.actions:
            for position, action in enumerate(actions):
                made = message_sent_by(action, self._schedule)
                if made is not None and made.destination == self._rank:
                    self._made_at[made] = position
                needed = message_needed_by(action, self._schedule)
                if needed is not None and needed.source == self._rank:
                    self._needed_at[needed] = position
                    if needed.kind is MessageKind.ACTIVATION:  # the token is received before the first one
                        token = _token(needed.source, needed.destination, needed.stage)
                        self._needed_at.setdefault(token, position)


def _token(source: int, destination: int, stage: int) -> Message:
    """Return the message that announces the output of a stage to the next one."""
    return Message(source, destination, MessageKind.TOKEN, stage, 0)
