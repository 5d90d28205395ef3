"""The messages of one run of a schedule: who sends what in which order, posted ahead, freed early.

[Note: what the receiver knows]
A receive can be posted only for known shapes. Shapes are a function of three things: what the stages are,
which gradients they require, and the shapes of the microbatch, which all stages see. So the first time that a
stage's output is sent for a new combination of them, its spec goes ahead of it (two messages), and both sides
keep it. Later there is nothing but the payload.

That both sides mean the same combination is checked once in a run: as soon as a stage begins its first
forward, it sends a token of two numbers. The first stands for the schedule and the shapes of the data, and
must be that of the receiver; the second for the stage and all before it, and is part of the key under which
both sides keep the spec. A stage that returns another shape than it has announced is an error on the sender's
side. So no message can be taken for another one.

A gradient has the shape of the activation that it belongs to: its receiver has sent that one.

[Note: when a send is over]
Not every backend can say whether a send has ended without waiting for it. The schedule can: when a message
comes from a rank, everything which that rank needed before it made the message has arrived there. Sends are
waited for (without waiting) and their memory freed then.

Messages: for each boundary between stages of two ranks, in each run 1 token, 1 activation per microbatch and
tensor, and when training 1 gradient per microbatch and tensor that requires one. Without the token if the
shape is fixed.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from colossalai.pipeline.execution._p2p import Arriving, Channel, Expected, Sent
from colossalai.pipeline.execution._payload import PayloadSpec, TensorSpec, digest
from colossalai.pipeline.schedules import (
    Message,
    MessageKind,
    Schedule,
    message_needed_by,
    message_sent_by,
    messages_between,
)

WINDOW = 2
"""Number of messages of each sender that are received ahead of need."""

_TOKEN: Expected = ((2,), torch.int64)
_LENGTH: Expected = ((1,), torch.int64)

SpecKey = tuple[int, int, int]
"""Stage that sends, token of the stage, shapes of the microbatch."""


@dataclass(frozen=True, slots=True)
class Token:
    """What a stage sends to the next one before its first forward of a run; see the note."""

    stage: int


@dataclass
class Routes:
    """What the messages of a schedule are for one pipeline rank; worked out once.

    Attributes:
        rank: The pipeline rank.
        schedule: The schedule.
        pairs: All pairs of ranks that send each other something.
        incoming: For each peer, what it sends to this rank, in order.
        made_at: For each incoming message, the position of the action that makes it in its sender's list.
        needed_at: For each outgoing message, the position of the action that needs it in its receiver's list.
        digest: Stands for the schedule.
    """

    rank: int
    schedule: Schedule
    pairs: tuple[tuple[int, int], ...] = ()
    incoming: dict[int, tuple[Message, ...]] = field(default_factory=dict)
    made_at: dict[Message, int] = field(default_factory=dict)
    needed_at: dict[Message, int] = field(default_factory=dict)
    digest: int = 0

    def __post_init__(self) -> None:
        between = messages_between(self.schedule)
        self.pairs = tuple(sorted(between))
        self.incoming = {
            source: messages for (source, to), messages in sorted(between.items()) if to == self.rank
        }
        for actions in self.schedule.actions:
            for position, action in enumerate(actions):
                made = message_sent_by(action, self.schedule)
                if made is not None and made.destination == self.rank:
                    self.made_at[made] = position
                needed = message_needed_by(action, self.schedule)
                if needed is not None and needed.source == self.rank:
                    self.needed_at[needed] = position
        written = [[str(action) for action in actions] for actions in self.schedule.actions]
        self.digest = digest((written, self.schedule.rank_of_stage))


class Exchange:
    """The messages of this rank in one run.

    Args:
        channel: What carries them.
        routes: What they are.
        specs: What is known of payloads; kept by the caller from run to run.
        data: For each microbatch, a number that stands for its shapes.
        fixed: The spec of every activation, if it is known beforehand.
        training: Whether gradients come back.
    """

    def __init__(
        self,
        channel: Channel,
        routes: Routes,
        *,
        specs: dict[SpecKey, PayloadSpec],
        data: Sequence[int],
        fixed: PayloadSpec | None,
        training: bool,
    ) -> None:
        self.channel, self.routes, self.training = channel, routes, training
        self._specs, self._data, self._fixed = specs, data, fixed
        self._common = digest((routes.digest, training, tuple(data)))
        self._tokens: dict[int, int] = {}  # of stages, those of this rank and those before them
        self._queues = {peer: self._with_tokens(messages) for peer, messages in routes.incoming.items()}
        self._arriving: dict[Message | Token, Arriving] = {}
        self._num_ahead = dict.fromkeys(self._queues, 0)
        self._on_their_way: dict[int, list[tuple[int, Sent]]] = {}
        self._sent_specs: dict[tuple[int, int], PayloadSpec] = {}
        self._received_specs: dict[tuple[int, int], PayloadSpec] = {}
        for peer in self._queues:
            self._post_ahead(peer)

    def begin_stage(self, stage: int, state: object) -> None:
        """Tell the next stage that a stage begins its first forward of the run.

        Args:
            stage: The stage.
            state: What its output depends on besides the data; compared by its `repr`.
        """
        if self._fixed is not None:
            return
        token = digest((self._token_before(stage), state))
        self._tokens[stage] = token
        if stage + 1 < self.routes.schedule.num_stages and self._rank_of(stage + 1) != self.routes.rank:
            values = torch.tensor([self._common, token], device=self.channel.device)
            message = Message(
                self.routes.rank, self._rank_of(stage + 1), MessageKind.ACTIVATION, stage + 1, 0
            )
            self._send([values], message, whole=True)

    def send_activation(
        self, message: Message, spec: PayloadSpec, tensors: Sequence[torch.Tensor]
    ) -> PayloadSpec:
        """Begin to send what a stage returned, taken apart.

        Returns:
            The spec that the receiver goes by.

        Raises:
            ValueError: It is not what the next stage expects; see [Note: what the receiver knows].
        """
        stage = message.stage - 1
        if self._fixed is not None:
            spec = _checked_fixed(spec, self._fixed, stage)
        else:
            key = (stage, self._tokens[stage], self._data[message.microbatch])
            known = self._specs.get(key)
            if known is None:
                encoded = spec.encode().to(self.channel.device)
                self._send(
                    [torch.tensor([len(encoded)], device=encoded.device), encoded], message, whole=True
                )
                self._specs[key] = spec
            elif known != spec:
                raise ValueError(
                    f"stage {stage} returned {spec} where it returned {known} before, for data of the same "
                    "shapes: what a stage returns must follow from the shapes of the data "
                    "(pad it to a fixed size)"
                )
        if self.training:
            self._sent_specs[stage, message.microbatch] = spec
        self._send(tensors, message)
        if message.destination in self._queues:
            self._post_ahead(message.destination)  # the shape of the gradient is known now
        return spec

    def send_gradients(self, message: Message, gradients: Sequence[torch.Tensor | None]) -> None:
        """Begin to send the gradients of what was received, of the tensors that require one; None is zero."""
        specs = _with_gradient(self._received_specs.pop((message.stage, message.microbatch)))
        tensors = [
            torch.zeros(spec.shape, dtype=spec.dtype, device=self.channel.device)
            if gradient is None
            else gradient
            for spec, gradient in zip(specs, gradients, strict=True)
        ]
        self._send(tensors, message)

    def receive(self, message: Message) -> tuple[PayloadSpec, list[torch.Tensor]]:
        """Return what came with a message, as soon as it has: the spec of the activation, and tensors."""
        peer = message.source
        while message not in self._arriving:
            if not self._post_next(peer):
                self._learn_next(peer)
        tensors = self._arriving.pop(message).wait()
        self._num_ahead[peer] -= 1
        self._let_go(peer, self.routes.made_at[message])
        self._post_ahead(peer)
        spec = self._spec_of(message)
        assert spec is not None, "it has come"
        if message.kind is MessageKind.GRADIENT:
            del self._sent_specs[message.stage, message.microbatch]
        elif self.training:
            self._received_specs[message.stage - 1, message.microbatch] = spec
        return spec, tensors

    def finish(self) -> None:
        """Return when everything has been sent."""
        for peer in self._on_their_way:
            self._let_go(peer, self._end_of(peer))

    def _send(self, tensors: Sequence[torch.Tensor], message: Message, *, whole: bool = False) -> None:
        sent = self.channel.send(tensors, message.destination, partial(self._blame, message), whole=whole)
        position = self.routes.needed_at.get(message, self._end_of(message.destination))
        self._on_their_way.setdefault(message.destination, []).append((position, sent))

    def _let_go(self, peer: int, position: int) -> None:
        """Free what a rank has needed up to a position of its list."""
        kept = []
        for needed_at, sent in self._on_their_way.get(peer, ()):
            if needed_at <= position:
                sent.wait()
            else:
                kept.append((needed_at, sent))
        self._on_their_way[peer] = kept

    def _post_ahead(self, peer: int) -> None:
        while self._queues[peer] and self._num_ahead[peer] < WINDOW and self._post_next(peer):
            pass

    def _post_next(self, peer: int) -> bool:
        """Begin to receive the next message of a rank, if its shapes are known."""
        item = self._queues[peer][0]
        if isinstance(item, Token):
            shapes: list[Expected] = [_TOKEN]
            message = Message(peer, self.routes.rank, MessageKind.ACTIVATION, item.stage + 1, 0)
        else:
            spec, message = self._spec_of(item), item
            if spec is None:
                return False
            wanted = _with_gradient(spec) if item.kind is MessageKind.GRADIENT else spec.tensors
            shapes = [(tensor.shape, tensor.dtype) for tensor in wanted]
        self._queues[peer].popleft()
        self._arriving[item] = self.channel.receive(
            shapes, peer, partial(self._blame, message), whole=isinstance(item, Token)
        )
        self._num_ahead[peer] += 1
        return True

    def _learn_next(self, peer: int) -> None:
        """Find out the shapes of the next message of a rank, an activation."""
        message = self._queues[peer][0]
        assert isinstance(message, Message), "a token has a known shape"
        assert message.kind is MessageKind.ACTIVATION, f"the activation of {message} has not been sent"
        stage = message.stage - 1
        key = (stage, self._token_of(stage), self._data[message.microbatch])
        if key not in self._specs:
            blame = partial(self._blame, message)
            (length,) = self.channel.receive([_LENGTH], peer, blame, whole=True).wait()
            (encoded,) = self.channel.receive([((int(length),), torch.uint8)], peer, blame, whole=True).wait()
            self._specs[key] = PayloadSpec.decode(encoded)

    def _spec_of(self, message: Message) -> PayloadSpec | None:
        """Return the spec of an activation, or of the one that a gradient belongs to, if it is known."""
        if message.kind is MessageKind.GRADIENT:
            return self._sent_specs.get((message.stage, message.microbatch))
        if self._fixed is not None:
            return self._fixed
        stage = message.stage - 1
        if stage not in self._tokens:
            return None
        return self._specs.get((stage, self._tokens[stage], self._data[message.microbatch]))

    def _token_before(self, stage: int) -> int:
        return self._common if stage == 0 else self._token_of(stage - 1)

    def _token_of(self, stage: int) -> int:
        if stage not in self._tokens:
            peer, item = self._rank_of(stage), Token(stage)
            while item not in self._arriving:
                if not self._post_next(peer):
                    self._learn_next(peer)
            (values,) = self._arriving.pop(item).wait()
            self._num_ahead[peer] -= 1
            common, self._tokens[stage] = values.tolist()
            if common != self._common:
                raise ValueError(
                    f"{self._name(stage)} and {self._name(stage + 1)} run different schedules, or their "
                    "microbatches differ in number or shapes: all stages must be given the same data"
                )
            self._post_ahead(peer)
        return self._tokens[stage]

    def _with_tokens(self, messages: Sequence[Message]) -> deque[Message | Token]:
        """Put a token before the first activation of every stage."""
        queue: deque[Message | Token] = deque()
        seen: set[int] = set()
        for message in messages:
            if self._fixed is None and message.kind is MessageKind.ACTIVATION and message.stage not in seen:
                seen.add(message.stage)
                queue.append(Token(message.stage - 1))
            queue.append(message)
        return queue

    def _end_of(self, peer: int) -> int:
        return len(self.routes.schedule.actions[peer])

    def _rank_of(self, stage: int) -> int:
        return self.routes.schedule.rank_of_stage[stage]

    def _name(self, stage: int) -> str:
        return f"stage {stage} (rank {self.channel.axis.ranks[self._rank_of(stage)]})"

    def _blame(self, message: Message) -> str:
        """Say what a message was, with a place for what became of the peer."""
        what = f"{message.kind} of microbatch {message.microbatch}"
        other = message.stage - 1 if message.kind is MessageKind.ACTIVATION else message.stage + 1
        if message.destination == self.routes.rank:
            return f"{self._name(other)} {{}} while {self._name(message.stage)} waited for the {what}"
        return f"{self._name(message.stage)} {{}} while {self._name(other)} sent it the {what}"


def _with_gradient(spec: PayloadSpec) -> list[TensorSpec]:
    return [tensor for tensor in spec.tensors if tensor.requires_grad]


def _checked_fixed(spec: PayloadSpec, fixed: PayloadSpec, stage: int) -> PayloadSpec:
    """Return the spec that was fixed beforehand, if an output fits it."""
    found = [(tensor.shape, tensor.dtype) for tensor in spec.tensors]
    if spec.structure != fixed.structure or found != [
        (tensor.shape, tensor.dtype) for tensor in fixed.tensors
    ]:
        raise ValueError(
            f"stage {stage} returned {spec}, but tensor_shape says {fixed}: correct TENSOR_SHAPE, or leave "
            "it out (as you must where the last microbatch is smaller, or a stage returns not only tensors)"
        )
    return fixed
