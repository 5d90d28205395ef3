"""Messages between the ranks of a pipeline: point-to-point transfers, and what a receiver must know first.

`Channel` moves tensors of known shapes between two ranks and names whoever is gone. Over it, `Exchange`
carries out the SEND, RECV and WAIT steps of one run of a lowered schedule. For each boundary between stages
of two ranks a run sends one token, one activation per microbatch and tensor, and when training one gradient
per microbatch and tensor that requires one; no token where the shape is fixed beforehand.

[Note: groups of a pipeline]
Two groups hold all ranks of the pipeline axis: one for messages to a higher rank, one for messages to a lower
one. Where a backend keeps the messages of a communicator in order (NCCL has one for each pair in each group),
a receive that was posted early then never holds up a send.

A backend may make the connection of a pair when it is first used, and both have to come for that; so each
pair uses its two directions once, in the same order on all ranks, before there is any schedule.

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
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from colossalai.communication import all_gather
from colossalai.context import Axis
from colossalai.logging import get_dist_logger
from colossalai.pipeline.execution._payload import PayloadSpec, TensorSpec, digest
from colossalai.pipeline.schedules import Message, MessageKind, ScheduleStep

Expected = tuple[tuple[int, ...], torch.dtype]
SpecKey = tuple[int, int, int]
"""Stage that sends, token of the stage, shapes of the microbatch."""

_TOKEN: Expected = ((2,), torch.int64)
_LENGTH: Expected = ((1,), torch.int64)


@dataclass(frozen=True, slots=True)
class Sent:
    """Tensors in flight to another rank; they must stay as they are until `wait` has returned."""

    tensors: tuple[torch.Tensor, ...]
    works: tuple[dist.Work, ...]
    blame: Callable[[], str]

    def wait(self) -> None:
        """Return when the tensors can be changed or freed."""
        _wait_for([self])


@dataclass(frozen=True, slots=True)
class Arriving:
    """Tensors in flight from another rank, and how to make whole ones of the parts that are sent."""

    tensors: tuple[torch.Tensor, ...]
    works: tuple[dist.Work, ...]
    blame: Callable[[], str]
    shapes: tuple[tuple[int, ...], ...]
    axis: Axis | None

    def wait(self) -> list[torch.Tensor]:
        """Return the tensors when they have arrived."""
        _wait_for([self])
        return self.whole()

    def whole(self) -> list[torch.Tensor]:
        """Return the tensors, which have arrived."""
        axis = self.axis
        if axis is None:
            return list(self.tensors)
        # All ranks of the scatter axis have received their parts, and gather them in the same order.
        return [
            all_gather(tensor, 0, axis).view(shape) if _is_cut(shape, axis) else tensor
            for tensor, shape in zip(self.tensors, self.shapes, strict=True)
        ]


class Channel:
    """The messages of this rank along the pipeline axis.

    A message is one operation of the backend for each tensor, without packing or copying; a tensor without
    elements is not sent.

    Args:
        axis: The pipeline axis.
        device: Where tensors are received.
        scatter_axis: The tensor axis along which everything that is sent is the same, so that each rank
            sends its part of a tensor only, and the receivers gather it.
    """

    def __init__(self, axis: Axis, *, device: torch.device, scatter_axis: Axis | None = None) -> None:
        self.axis = axis
        self.rank = axis.rank
        self.device = device
        self.scatter_axis = scatter_axis if scatter_axis is not None and scatter_axis.size > 1 else None
        self._connected: set[tuple[int, int]] = set()
        self._to_higher: dist.ProcessGroup | None = None
        self._to_lower: dist.ProcessGroup | None = None
        if axis.size > 1:
            self._to_higher = axis.group
            self._to_lower = axis.mesh.group_of(axis.ranks[::-1])

    def connect(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Use connections for the first time, in the same order on all ranks.

        Args:
            pairs: Of pipeline ranks (source, destination); all of them, the same on every rank.
        """
        unordered = {(min(pair), max(pair)) for pair in pairs}
        for low, high in sorted(unordered - self._connected):
            self._greet(low, high)
            self._greet(high, low)
        self._connected |= unordered

    def send(
        self, tensors: Iterable[torch.Tensor], peer: int, blame: Callable[[], str], *, whole: bool = False
    ) -> Sent:
        """Begin to send tensors to a pipeline rank; `whole` ones are not cut along the scatter axis."""
        axis = None if whole else self.scatter_axis
        parts = []
        for tensor in tensors:
            part = tensor.detach().contiguous()
            if axis is not None and _is_cut(tuple(tensor.shape), axis):
                part = part.view(-1).chunk(axis.size)[axis.rank]
            parts.append(part)
        works = self._start(self._group(self.rank, peer).send, parts, peer, blame)
        return Sent(tuple(parts), works, blame)

    def receive(
        self, specs: Iterable[Expected], peer: int, blame: Callable[[], str], *, whole: bool = False
    ) -> Arriving:
        """Begin to receive tensors of known shapes and types from a pipeline rank; see `send`."""
        axis = None if whole else self.scatter_axis
        shapes, places = [], []
        for shape, dtype in specs:
            shapes.append(shape)
            if axis is not None and _is_cut(shape, axis):
                shape = (math.prod(shape) // axis.size,)
            places.append(torch.empty(shape, dtype=dtype, device=self.device))
        works = self._start(self._group(peer, self.rank).recv, places, peer, blame)
        return Arriving(tuple(places), works, blame, tuple(shapes), axis)

    def _start(
        self,
        operation: Callable[[list[torch.Tensor], int, int], dist.Work],
        tensors: Iterable[torch.Tensor],
        peer: int,
        blame: Callable[[], str],
    ) -> tuple[dist.Work, ...]:
        works = []
        try:
            for tensor in tensors:
                if tensor.numel():  # the peer knows the shape, and posts nothing for an empty one, either
                    works.append(operation([tensor], peer, 0))
        except RuntimeError as error:
            raise _peer_error(error, blame) from error
        return tuple(works)

    def _greet(self, source: int, destination: int) -> None:
        if self.rank not in (source, destination):
            return
        token = torch.zeros(1, device=self.device)
        if self.rank == source:
            self.send([token], destination, lambda: self._who(destination), whole=True).wait()
        else:
            self.receive([((1,), token.dtype)], source, lambda: self._who(source), whole=True).wait()

    def _who(self, peer: int) -> str:
        return (
            f"pipeline rank {peer} (rank {self.axis.ranks[peer]}) {{}} while pipeline rank {self.rank} "
            f"(rank {self.axis.mesh.rank}) connected to it"
        )

    def _group(self, source: int, destination: int) -> dist.ProcessGroup:
        # See [Note: groups of a pipeline].
        group = self._to_higher if source < destination else self._to_lower
        assert group is not None, "a pipeline of one rank sends nothing"
        return group


class Exchange:
    """The messages of this rank in one run.

    Args:
        channel: What carries them.
        rank_of_stage: For each stage, the pipeline rank that holds it.
        common: Stands for the schedule and for what it is run on; must be the same on all ranks.
        specs: What is known of payloads; kept by the caller from run to run.
        data: For each microbatch, a number that stands for its shapes.
        fixed: The spec of every activation, if it is known beforehand.
        training: Whether gradients come back.

    Attributes:
        activations: For each stage and microbatch, the spec and the tensors that have come for it and have
            not been taken yet; also those that another stage of this rank has handed over.
        gradients: The same of gradients; None is zero.
    """

    def __init__(
        self,
        channel: Channel,
        *,
        rank_of_stage: Sequence[int],
        common: int,
        specs: dict[SpecKey, PayloadSpec],
        data: Sequence[int],
        fixed: PayloadSpec | None,
        training: bool,
    ) -> None:
        self.channel = channel
        self.activations: dict[tuple[int, int], tuple[PayloadSpec, list[torch.Tensor]]] = {}
        self.gradients: dict[tuple[int, int], Sequence[torch.Tensor | None]] = {}
        self._rank_of_stage, self._common, self._training = rank_of_stage, common, training
        self._specs, self._data, self._fixed = specs, data, fixed
        self._tokens: dict[int, int] = {-1: common}  # of stages, those of this rank and those before them
        self._unposted: dict[int, deque[Message]] = {}  # by sender: those whose shape is not known yet
        self._arriving: dict[Message, Arriving] = {}
        self._on_their_way: dict[Message, list[Sent]] = {}
        self._sent_specs: dict[tuple[int, int], PayloadSpec] = {}
        self._received_specs: dict[tuple[int, int], PayloadSpec] = {}

    def begin_stage(self, stage: int, state: object, message: Message | None) -> None:
        """Work out the token of a stage before its first forward of the run, and tell the next stage.

        Args:
            stage: The stage.
            state: What its output depends on besides the data; compared by its `repr`.
            message: By which the next stage learns of it; None if that is on this rank.
        """
        token = self._tokens[stage] = digest((self._tokens[stage - 1], state))
        if message is not None:
            self._send([torch.tensor([self._common, token], device=self.channel.device)], message, whole=True)

    def send_activation(
        self, message: Message, spec: PayloadSpec, tensors: Sequence[torch.Tensor]
    ) -> PayloadSpec:
        """Begin to send what a stage returned, taken apart.

        Returns:
            The spec that the receiver goes by.

        Raises:
            ValueError: `spec` is not what the next stage expects; see [Note: what the receiver knows].
        """
        stage = message.stage - 1
        if self._fixed is not None:
            spec = _checked_fixed(spec, self._fixed, stage)
        else:
            key = (stage, self._tokens[stage], self._data[message.microbatch])
            known = self._specs.get(key)
            if known is None:
                encoded = spec.encode().to(self.channel.device)
                length = torch.tensor([len(encoded)], device=encoded.device)
                self._send([length, encoded], message, whole=True)
                self._specs[key] = spec
            elif known != spec:
                raise ValueError(
                    f"stage {stage} returned {spec} where it returned {known} before, for data of the same "
                    "shapes: what a stage returns must follow from the shapes of the data "
                    "(pad it to a fixed size)"
                )
        if self._training:
            self._sent_specs[stage, message.microbatch] = spec
        self._send(tensors, message)
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

    def post(self, step: ScheduleStep) -> None:
        """Begin to receive a message, and those of its sender before it, as far as their shapes are known."""
        message = step.message
        assert message is not None, "a message is received"
        unposted = self._unposted.setdefault(message.source, deque())
        unposted.append(message)
        self._post_known(unposted)

    def wait(self, step: ScheduleStep) -> None:
        """Wait for a message, keep what came with it, and free the sends that are over by then.

        Raises:
            ValueError: The stage before runs another schedule, or on other data.
        """
        message = step.message
        assert message is not None, "a message is received"
        unposted = self._unposted[message.source]
        while message not in self._arriving:  # of shapes seen for the first time: they come ahead of it
            self._learn(unposted[0])
            self._post_known(unposted)
        arriving = self._arriving.pop(message)
        transfers: list[Sent | Arriving] = [arriving]
        for each in step.over:  # these have arrived, too: see [Note: when a send is over]
            transfers += self._on_their_way.pop(each)
        _wait_for(transfers)  # here this rank waits for its peer
        tensors = list(arriving.tensors) if arriving.axis is None else arriving.whole()
        if message.kind is MessageKind.TOKEN:
            self._take_token(message, *tensors)
            return
        if message.kind is MessageKind.GRADIENT:
            del self._sent_specs[message.stage, message.microbatch]
            self.gradients[message.stage, message.microbatch] = tensors
            return
        spec = self._spec_of(message)
        assert spec is not None, "it has come"
        self.activations[message.stage, message.microbatch] = (spec, tensors)
        if self._training:
            self._received_specs[message.stage - 1, message.microbatch] = spec

    def finish(self) -> None:
        """Return when everything has been sent; the memory of the sends is free then."""
        for messages in self._on_their_way.values():
            _wait_for(messages)
        self._on_their_way.clear()

    def _send(self, tensors: Sequence[torch.Tensor], message: Message, *, whole: bool = False) -> None:
        sent = self.channel.send(tensors, message.destination, partial(self._blame, message), whole=whole)
        self._on_their_way.setdefault(message, []).append(sent)

    def _post_known(self, unposted: deque[Message]) -> None:
        """Begin to receive the next messages of a rank, in order, up to the first of unknown shapes.

        The sender sends in this order: a receive that was posted out of order would take another message.
        """
        while unposted:
            message = unposted[0]
            if message.kind is MessageKind.TOKEN:
                shapes: list[Expected] = [_TOKEN]
            else:
                spec = self._spec_of(message)
                if spec is None:
                    return
                shapes = []
                for tensor in spec.tensors:
                    if tensor.requires_grad or message.kind is not MessageKind.GRADIENT:
                        shapes.append((tensor.shape, tensor.dtype))
            unposted.popleft()
            self._arriving[message] = self.channel.receive(
                shapes, message.source, partial(self._blame, message), whole=message.kind is MessageKind.TOKEN
            )

    def _learn(self, message: Message) -> None:
        """Receive the spec that goes ahead of an activation of new shapes."""
        assert message.kind is MessageKind.ACTIVATION, f"nothing goes ahead of {message}"
        peer, blame = message.source, partial(self._blame, message)
        # The sender has begun both sends before that of the activation, so these waits end.
        (length,) = self.channel.receive([_LENGTH], peer, blame, whole=True).wait()
        (encoded,) = self.channel.receive([((int(length),), torch.uint8)], peer, blame, whole=True).wait()
        stage = message.stage - 1
        self._specs[stage, self._tokens[stage], self._data[message.microbatch]] = PayloadSpec.decode(encoded)

    def _spec_of(self, message: Message) -> PayloadSpec | None:
        """Return the spec of an activation, or of the one that a gradient belongs to, if it is known."""
        if message.kind is MessageKind.GRADIENT:
            return self._sent_specs.get((message.stage, message.microbatch))
        if self._fixed is not None:
            return self._fixed
        stage = message.stage - 1
        return self._specs.get((stage, self._tokens[stage], self._data[message.microbatch]))

    def _take_token(self, message: Message, values: torch.Tensor) -> None:
        stage = message.stage - 1
        common, self._tokens[stage] = values.tolist()
        if common != self._common:
            raise ValueError(
                f"{self._name(stage)} and {self._name(stage + 1)} run different schedules, or their "
                "microbatches differ in number or shapes: all stages must be given the same data"
            )

    def _name(self, stage: int) -> str:
        return f"stage {stage} (rank {self.channel.axis.ranks[self._rank_of_stage[stage]]})"

    def _blame(self, message: Message) -> str:
        """Say what a message was, with a place for what became of the peer."""
        is_gradient = message.kind is MessageKind.GRADIENT
        kind = MessageKind.GRADIENT if is_gradient else MessageKind.ACTIVATION  # a token announces those
        what = f"{kind} of microbatch {message.microbatch}"
        other = message.stage + 1 if is_gradient else message.stage - 1
        if message.destination == self.channel.rank:
            return f"{self._name(other)} {{}} while {self._name(message.stage)} waited for the {what}"
        return f"{self._name(message.stage)} {{}} while {self._name(other)} sent it the {what}"


def _wait_for(transfers: Iterable[Sent | Arriving]) -> None:
    """Return when all of them have ended, one after the other."""
    for transfer in transfers:
        try:
            for work in transfer.works:
                work.wait()
        except RuntimeError as error:
            raise _peer_error(error, transfer.blame) from error


def _peer_error(error: RuntimeError, blame: Callable[[], str]) -> RuntimeError:
    """Return an error that names the peer; `blame` has a place for what has become of it."""
    words = str(error).lower()
    is_late = "timed out" in words or "not come to" in words  # gloo's, and those of shared memory
    return RuntimeError(blame().format("did not answer in time" if is_late else "is gone"))


def _is_cut(shape: tuple[int, ...], axis: Axis) -> bool:
    """Whether each rank of a tensor axis sends its part of a tensor only."""
    if not shape:
        return False
    if math.prod(shape) % axis.size == 0:
        return True
    get_dist_logger().log_once(
        f"scatter_gather_tensors: a tensor of shape {shape} cannot be cut into {axis.size} equal parts; "
        "it is sent whole by every tensor-parallel rank"
    )
    return False


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
