"""Messages between the ranks of a pipeline: point-to-point transfers, and the exchange of their shapes.

`Channel` moves tensors of known shapes between two ranks; its errors name the lost peer. Over it, `Exchange`
carries out the SEND, RECV and WAIT steps of one run of a lowered schedule. For each boundary between stages
of two ranks a run sends one token, one activation per microbatch and tensor, and when training one gradient
per microbatch and tensor that requires one; with a fixed shape it sends no token.

[Note: groups of a pipeline]
Two groups hold all ranks of the pipeline axis: one for messages to a higher rank, one for messages to a lower
one. Some backends keep the messages of a communicator in order (NCCL has one for each pair in each group);
with two groups, a receive that was posted early never holds up a send.

A backend may connect a pair at its first message, which needs both ranks; so each pair uses its two
directions once, in the same order on all ranks, before any schedule runs.

[Note: specs before payloads]
A receive can be posted only for known shapes. Shapes are a function of three things: the stages, the
gradients they require, and the shapes of the microbatch, which all stages see. So the first time that a
stage's output is sent for a new combination of them, its spec is sent first (two messages), and both sides
keep it. Later runs send the payload alone.

Both sides check once in a run that they use the same combination: at the start of its first forward, a stage
sends a token of two numbers. The first is a digest of the schedule and the shapes of the data, and must equal
the receiver's; the second is a digest of the stage and all earlier ones, and is part of the key under which
both sides keep the spec. A stage whose output differs in shape from its spec raises an error on the sender's
side. So no message can be taken for another one.

A gradient has the shape of its activation, which the gradient's receiver has sent.
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
"""Sending stage, token of that stage, shapes of the microbatch."""

_TOKEN: Expected = ((2,), torch.int64)
_LENGTH: Expected = ((1,), torch.int64)


@dataclass(frozen=True, slots=True)
class PendingSend:
    """Tensors in flight to another rank; they must not change until `wait` has returned."""

    tensors: tuple[torch.Tensor, ...]
    works: tuple[dist.Work, ...]
    blame: Callable[[], str]

    def wait(self) -> None:
        """Return when the tensors can be changed or freed."""
        _wait_for([self])


@dataclass(frozen=True, slots=True)
class PendingReceive:
    """Tensors in flight from another rank, and the shapes and axis for gathering them."""

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
        """Return the tensors, gathered over the scatter axis; they must have arrived."""
        axis = self.axis
        if axis is None:
            return list(self.tensors)
        # All ranks of the scatter axis have received their parts; each all-gathers its part, in this order.
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
        device: Device of the received tensors.
        scatter_axis: The tensor axis along which all sent tensors are the same, so that each rank sends only
            its part of a tensor, and the receivers gather it.
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
            pairs: All pairs of pipeline ranks (source, destination), the same on every rank.
        """
        unordered = {(min(pair), max(pair)) for pair in pairs}
        for low, high in sorted(unordered - self._connected):
            self._connect_pair(low, high)
            self._connect_pair(high, low)
        self._connected |= unordered

    def send(
        self, tensors: Iterable[torch.Tensor], peer: int, blame: Callable[[], str], *, whole: bool = False
    ) -> PendingSend:
        """Begin to send tensors to a pipeline rank; with `whole` they are not cut along the scatter axis."""
        axis = None if whole else self.scatter_axis
        parts = []
        for tensor in tensors:
            part = tensor.detach().contiguous()
            if axis is not None and _is_cut(tuple(tensor.shape), axis):
                part = part.view(-1).chunk(axis.size)[axis.rank]
            parts.append(part)
        works = self._start(self._group(self.rank, peer).send, parts, peer, blame)
        return PendingSend(tuple(parts), works, blame)

    def receive(
        self, specs: Iterable[Expected], peer: int, blame: Callable[[], str], *, whole: bool = False
    ) -> PendingReceive:
        """Begin to receive tensors of known shapes and dtypes from a pipeline rank; see `send`."""
        axis = None if whole else self.scatter_axis
        shapes, places = [], []
        for shape, dtype in specs:
            shapes.append(shape)
            if axis is not None and _is_cut(shape, axis):
                shape = (math.prod(shape) // axis.size,)
            places.append(torch.empty(shape, dtype=dtype, device=self.device))
        works = self._start(self._group(peer, self.rank).recv, places, peer, blame)
        return PendingReceive(tuple(places), works, blame, tuple(shapes), axis)

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
                if tensor.numel():  # neither rank posts an empty tensor
                    works.append(operation([tensor], peer, 0))
        except RuntimeError as error:
            raise _peer_error(error, blame) from error
        return tuple(works)

    def _connect_pair(self, source: int, destination: int) -> None:
        if self.rank not in (source, destination):
            return
        token = torch.zeros(1, device=self.device)
        if self.rank == source:
            # The first message of a pair connects it; both ends wait, so that pairs connect one by one.
            self.send([token], destination, lambda: self._describe_peer(destination), whole=True).wait()
        else:
            self.receive(
                [((1,), token.dtype)], source, lambda: self._describe_peer(source), whole=True
            ).wait()

    def _describe_peer(self, peer: int) -> str:
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
        channel: The channel of this rank.
        rank_of_stage: For each stage, its pipeline rank.
        common: Digest of the schedule and its data; must be the same on all ranks.
        specs: Known specs of payloads; the caller keeps them from run to run.
        data: For each microbatch, a digest of its shapes.
        fixed: The spec of every activation, if it is known beforehand.
        training: Whether gradients are sent back.

    Attributes:
        activations: For each stage and microbatch, the spec and the tensors that have arrived and have not
            been used yet; also the activations from another stage of this rank.
        gradients: The same for gradients; None is zero.
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
        self._tokens: dict[int, int] = {-1: common}  # of the stages of this rank and of those before them
        self._unposted: dict[int, deque[Message]] = {}  # by sender: messages of unknown shapes, in order
        self._receives: dict[Message, PendingReceive] = {}
        self._in_flight: dict[Message, list[PendingSend]] = {}
        self._sent_specs: dict[tuple[int, int], PayloadSpec] = {}
        self._received_specs: dict[tuple[int, int], PayloadSpec] = {}

    def begin_stage(self, stage: int, state: object, message: Message | None) -> None:
        """Compute the token of a stage before its first forward of the run, and send it to the next stage.

        Args:
            stage: The stage.
            state: All else but the data that the output depends on; compared by its `repr`.
            message: The message that carries the token; None if the next stage is on this rank.
        """
        token = self._tokens[stage] = digest((self._tokens[stage - 1], state))
        if message is not None:
            self._send([torch.tensor([self._common, token], device=self.channel.device)], message, whole=True)

    def send_activation(
        self, message: Message, spec: PayloadSpec, tensors: Sequence[torch.Tensor]
    ) -> PayloadSpec:
        """Begin to send the output of a stage.

        Returns:
            The spec that the receiver uses.

        Raises:
            ValueError: `spec` differs from the spec at the receiver; see [Note: specs before payloads].
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
                    "shapes: the output of a stage must follow from the shapes of the data "
                    "(pad it to a fixed size)"
                )
        if self._training:
            self._sent_specs[stage, message.microbatch] = spec
        self._send(tensors, message)
        return spec

    def send_gradients(self, message: Message, gradients: Sequence[torch.Tensor | None]) -> None:
        """Begin to send the gradients of the received tensors that require one; None is zero."""
        specs = _with_gradient(self._received_specs.pop((message.stage, message.microbatch)))
        tensors = [
            torch.zeros(spec.shape, dtype=spec.dtype, device=self.channel.device)
            if gradient is None
            else gradient
            for spec, gradient in zip(specs, gradients, strict=True)
        ]
        self._send(tensors, message)

    def post(self, step: ScheduleStep) -> None:
        """Begin to receive a message and the earlier ones of its sender, as far as their shapes are known."""
        message = step.message
        assert message is not None, "a message is received"
        unposted = self._unposted.setdefault(message.source, deque())
        unposted.append(message)
        self._post_known(unposted)

    def wait(self, step: ScheduleStep) -> None:
        """Wait for a message, keep its tensors, and free the sends that are complete by then.

        Raises:
            ValueError: The stage before runs another schedule, or on other data.
        """
        message = step.message
        assert message is not None, "a message is received"
        unposted = self._unposted[message.source]
        while message not in self._receives:  # new shapes: the spec of the first unposted message comes next
            self._receive_spec(unposted[0])
            self._post_known(unposted)
        arriving = self._receives.pop(message)
        transfers: list[PendingSend | PendingReceive] = [arriving]
        for each in step.over:  # sends that are complete, too: see [Note: completion of a send]
            transfers += self._in_flight.pop(each)
        _wait_for(transfers)  # blocks until the peer has sent the message
        tensors = list(arriving.tensors) if arriving.axis is None else arriving.whole()
        if message.kind is MessageKind.TOKEN:
            self._accept_token(message, *tensors)
            return
        if message.kind is MessageKind.GRADIENT:
            del self._sent_specs[message.stage, message.microbatch]
            self.gradients[message.stage, message.microbatch] = tensors
            return
        spec = self._spec_of(message)
        assert spec is not None, "the message was posted with its spec"
        self.activations[message.stage, message.microbatch] = (spec, tensors)
        if self._training:
            self._received_specs[message.stage - 1, message.microbatch] = spec

    def finish(self) -> None:
        """Wait for the remaining sends, and free their tensors."""
        for messages in self._in_flight.values():
            _wait_for(messages)
        self._in_flight.clear()

    def _send(self, tensors: Sequence[torch.Tensor], message: Message, *, whole: bool = False) -> None:
        sent = self.channel.send(tensors, message.destination, partial(self._blame, message), whole=whole)
        self._in_flight.setdefault(message, []).append(sent)

    def _post_known(self, unposted: deque[Message]) -> None:
        """Begin to receive the next messages of a rank, in order, up to the first of unknown shapes.

        The sender sends in this order: a receive that is posted out of order would match another message.
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
            self._receives[message] = self.channel.receive(
                shapes, message.source, partial(self._blame, message), whole=message.kind is MessageKind.TOKEN
            )

    def _receive_spec(self, message: Message) -> None:
        """Receive the spec that is sent before an activation of new shapes."""
        assert message.kind is MessageKind.ACTIVATION, f"nothing goes ahead of {message}"
        peer, blame = message.source, partial(self._blame, message)
        # The sender has begun both sends before the activation's, so these waits end.
        (length,) = self.channel.receive([_LENGTH], peer, blame, whole=True).wait()
        (encoded,) = self.channel.receive([((int(length),), torch.uint8)], peer, blame, whole=True).wait()
        stage = message.stage - 1
        self._specs[stage, self._tokens[stage], self._data[message.microbatch]] = PayloadSpec.decode(encoded)

    def _spec_of(self, message: Message) -> PayloadSpec | None:
        """Return the spec of an activation, or of a gradient's activation; None if it is unknown."""
        if message.kind is MessageKind.GRADIENT:
            return self._sent_specs.get((message.stage, message.microbatch))
        if self._fixed is not None:
            return self._fixed
        stage = message.stage - 1
        return self._specs.get((stage, self._tokens[stage], self._data[message.microbatch]))

    def _accept_token(self, message: Message, values: torch.Tensor) -> None:
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
        """Return a description of a message, with a placeholder for the state of the peer."""
        is_gradient = message.kind is MessageKind.GRADIENT
        kind = MessageKind.GRADIENT if is_gradient else MessageKind.ACTIVATION  # a token precedes those
        what = f"{kind} of microbatch {message.microbatch}"
        other = message.stage + 1 if is_gradient else message.stage - 1
        if message.destination == self.channel.rank:
            return f"{self._name(other)} {{}} while {self._name(message.stage)} waited for the {what}"
        return f"{self._name(message.stage)} {{}} while {self._name(other)} sent it the {what}"


def _wait_for(transfers: Iterable[PendingSend | PendingReceive]) -> None:
    """Wait for transfers, one after the other."""
    for transfer in transfers:
        try:
            for work in transfer.works:
                # A send, too: its memory can be written again after it.
                work.wait()
        except RuntimeError as error:
            raise _peer_error(error, transfer.blame) from error


def _peer_error(error: RuntimeError, blame: Callable[[], str]) -> RuntimeError:
    """Return an error that names the peer; `blame` has a placeholder for its state."""
    words = str(error).lower()
    is_late = "timed out" in words or "not come to" in words  # of gloo, and of shared memory
    return RuntimeError(blame().format("did not answer in time" if is_late else "is gone"))


def _is_cut(shape: tuple[int, ...], axis: Axis) -> bool:
    """Return whether each rank of a tensor axis sends only its part of a tensor."""
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
    """Return the fixed spec; the spec of the output must fit it."""
    found = [(tensor.shape, tensor.dtype) for tensor in spec.tensors]
    if spec.structure != fixed.structure or found != [
        (tensor.shape, tensor.dtype) for tensor in fixed.tensors
    ]:
        raise ValueError(
            f"stage {stage} returned {spec}, but tensor_shape is {fixed}: correct TENSOR_SHAPE, or leave "
            "it out (as you must where the last microbatch is smaller, or a stage returns not only tensors)"
        )
    return fixed
