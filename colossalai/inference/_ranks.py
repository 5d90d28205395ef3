"""Steps on several ranks: each step passes through the pipeline stages, and its tokens return to rank 0.

Ranks have the layout (pp, tp). Rank 0 has the engine. The ranks of a stage run the same step at the same
time, each with its part of the layers. A step is sent to the next stage together with its activations, rank
by rank, so that no rank waits for a stage that is busy with an earlier step.

| rank | receives from | sends to |
| --- | --- | --- |
| rank 0 | the last stage's first rank: drawn tokens | its tensor ranks: the step; the next stage |
| tensor ranks of the first stage | rank 0: the step | the next stage |
| ranks of another stage | the same place of the stage before: step and activations | the next stage |
| first rank of the last stage | (as above) | rank 0: drawn tokens |

An idle engine sends an empty step from time to time, a heartbeat that keeps the waits of other ranks short.

New weights are announced like a step, when none is in flight, so all ranks change between the same two steps.
Each reads its own part of the checkpoint, and either all of them succeed or none has changed anything.
"""

import ast
import os
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ReduceOp

from colossalai.communication import all_reduce, broadcast, start_messages
from colossalai.context import Axis, Mesh
from colossalai.inference._executor import Executor, StepOrder, StepResult, finish_step
from colossalai.inference.loading import ServedWeights, WeightSource
from colossalai.inference.paging import Runner, StepArrays, pack_arrays, unpack_arrays
from colossalai.inference.sampling import Drawn, Draws

# Size of the first of two messages in bytes, including the length of the whole; most steps fit in it.
_FIRST_BYTES = 1 << 14
_LENGTH_BYTES = 8
_STOP = b"stop"
_IDLE = b"idle"
_WEIGHTS = b"weights "  # followed by a path; no step begins with these bytes


class StepLink:
    """Messages between this rank and the other ranks of an engine.

    Args:
        mesh: The ranks, as (pp, tp).
        device: Device of the messages.
    """

    def __init__(self, mesh: Mesh, device: torch.device) -> None:
        self.stages: Axis = mesh.axis("pp")
        self.tensor: Axis = mesh.axis("tp")
        self.device = device
        self._in_flight: deque[tuple[Callable[[], None], Sequence[Tensor]]] = deque()

    @property
    def num_ranks(self) -> int:
        """Number of ranks of all stages."""
        return self.stages.size * self.tensor.size

    @property
    def is_first(self) -> bool:
        """Whether this rank belongs to the first stage."""
        return self.stages.rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this rank belongs to the last stage."""
        return self.stages.rank == self.stages.size - 1

    def share(self, message: bytes | None) -> bytes:
        """Broadcast a message from the first tensor rank of this stage; collective over its tensor ranks.

        Args:
            message: The message on the first tensor rank, None on the others.
        """
        if self.tensor.size == 1:
            assert message is not None, "there is no other rank that has it"
            return message
        source = self.tensor.ranks[0]
        first, rest = self._as_tensors(message) if message is not None else (self._empty(_FIRST_BYTES), None)
        first = broadcast(first, source, self.tensor)  # fixed size, so the receivers need no length
        length = _length_of(first)
        if length > _FIRST_BYTES - _LENGTH_BYTES:
            # The tensor ranks now have the length, so all of them join the second broadcast, or none does.
            missing = length - (_FIRST_BYTES - _LENGTH_BYTES)
            rest = broadcast(self._empty(missing) if rest is None else rest, source, self.tensor)
        return _join_message(first, rest, length)

    def send(self, message: bytes, tensors: Sequence[Tensor], *, stage: int) -> None:
        """Start to send a message, and the tensors it describes, to the same place of another stage."""
        first, rest = self._as_tensors(message)
        for part in (first, rest, *tensors):
            if part is not None and part.numel():
                sent = part.contiguous()
                # Does not block: the same place of the other stage posts a receive of equal size.
                wait = start_messages(self.stages, sends={stage: sent}, receives={})
                self._in_flight.append((wait, (sent,)))
        # Buffers in flight must stay alive. An answer implies that older messages have arrived.
        while len(self._in_flight) > 4 * (2 + len(tensors)):
            self._in_flight.popleft()[0]()

    def receive(self, *, stage: int) -> bytes:
        """Wait for the next message from the same place of another stage, and return it."""
        first = self.receive_tensor((_FIRST_BYTES,), torch.uint8, stage=stage)
        length, rest = _length_of(first), None
        if length > _FIRST_BYTES - _LENGTH_BYTES:
            missing = length - (_FIRST_BYTES - _LENGTH_BYTES)
            rest = self.receive_tensor((missing,), torch.uint8, stage=stage)
        return _join_message(first, rest, length)

    def receive_tensor(self, shape: Sequence[int], dtype: torch.dtype, *, stage: int) -> Tensor:
        """Wait for the next tensor from the same place of another stage, and return it."""
        place = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        if place.numel():
            start_messages(self.stages, sends={}, receives={stage: place})()  # blocks until it has arrived
        return place

    def least(self, number: int) -> int:
        """Return the minimum of a number over all ranks (all-reduce); collective over them."""
        mesh = self.stages.mesh
        found = torch.tensor([number], dtype=torch.int64, device=self.device)
        return int(all_reduce(found, mesh.axis(("pp", "tp")), op=ReduceOp.MIN).item())

    def wait(self) -> None:
        """Wait for all pending sends."""
        while self._in_flight:
            self._in_flight.popleft()[0]()

    def _as_tensors(self, message: bytes) -> tuple[Tensor, Tensor | None]:
        whole = len(message).to_bytes(_LENGTH_BYTES, "little") + message
        padded = whole + bytes(max(0, _FIRST_BYTES - len(whole)))
        every = torch.frombuffer(bytearray(padded), dtype=torch.uint8).to(self.device)
        return every[:_FIRST_BYTES], every[_FIRST_BYTES:] if len(padded) > _FIRST_BYTES else None

    def _empty(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)


def _length_of(first: Tensor) -> int:
    return int.from_bytes(first[:_LENGTH_BYTES].cpu().numpy().tobytes(), "little")


def _join_message(first: Tensor, rest: Tensor | None, length: int) -> bytes:
    message = first[_LENGTH_BYTES : _LENGTH_BYTES + length].cpu().numpy().tobytes()
    return message if rest is None else message + rest.cpu().numpy().tobytes()


class RanksExecutor(Executor):
    """Executor on rank 0 of an engine on several ranks.

    Args:
        runner: The stage of this rank.
        link: Link to the other ranks, which run `work`.
        weights: The values of this stage.
    """

    def __init__(self, runner: Runner, link: StepLink, weights: ServedWeights) -> None:
        self.runner = runner
        self._weights = weights
        self._link = link
        self._results: deque[StepResult] = deque()
        self._is_closed = False

    @property
    def depth(self) -> int:
        """The number of stages."""
        return self._link.stages.size

    def submit(self, order: StepOrder) -> None:
        """Run a step on the first stage, and send it to the next one."""
        message = self._link.share(_order_as_bytes(order))
        output = self.runner.run(order.arrays)  # the tensor ranks run it, too, and join its collectives
        if self._link.is_last:
            self._results.append(finish_step(output, order))
        else:
            _send_activations(self._link, message, output)

    def collect(self) -> StepResult:
        """Receive the result of the oldest step from the last stage."""
        if self._link.is_last:
            return self._results.popleft()
        # Results arrive in the order of submission: every stage runs its steps one after another.
        return _result_of(self._link.receive(stage=self._link.stages.size - 1))

    def discard(self) -> None:
        """Drop results of this rank; messages of other ranks are not received any more."""
        self._results.clear()

    def weights_stamp(self) -> int:
        """Return the stamp of this rank's part: values change on all ranks at the same time."""
        return self.runner.weights_stamp()

    @property
    def is_partly_updated(self) -> bool:
        """Whether values are partly new, on any rank."""
        return self._weights.is_partly_updated

    def update_weights(self, source: WeightSource) -> None:
        """Replace the values of all ranks.

        Raises:
            ValueError: `source` is not a path, the only kind that other ranks can read, or does not fit.
            OSError: `source` cannot be read.
        """
        if not isinstance(source, str | os.PathLike):
            raise ValueError(
                f"several ranks read new weights from a file or folder, not from a {type(source).__name__} "
                "in the memory of one: save it, and give its path"
            )
        self._broadcast(_WEIGHTS + os.fsencode(os.path.abspath(source)))
        self._weights.load(source)  # collective: the other ranks load in `work`

    def keep_alive(self) -> None:
        """Send a heartbeat to the other ranks; no step may be in flight."""
        self._broadcast(_IDLE)

    def pause(self) -> None:
        """Make `work` return on the other ranks, which call it again before the next step.

        No step may be in flight.
        """
        self._broadcast(_STOP)
        self._link.wait()

    def close(self) -> None:
        """End the other ranks."""
        if not self._is_closed:
            self._is_closed = True
            self.pause()

    def _broadcast(self, message: bytes) -> None:
        self._link.share(message)
        if not self._link.is_last:
            self._link.send(message, (), stage=1)
            # `message` can be written again after it.
            self._link.wait()


def work(runner: Runner, link: StepLink, weights: ServedWeights) -> None:
    """Run steps on a rank other than rank 0, until rank 0 pauses or ends.

    Args:
        runner: The stage of this rank.
        link: Link to the other ranks.
        weights: The values of this stage.
    """
    before, after = link.stages.rank - 1, link.stages.rank + 1
    while True:
        message = link.share(None) if link.is_first else link.receive(stage=before)
        if message in (_STOP, _IDLE) or message.startswith(_WEIGHTS):
            if not link.is_last:
                link.send(message, (), stage=after)
                link.wait()  # deliver the message before this rank loads or returns
            if message == _STOP:
                return
            if message != _IDLE:
                with suppress(ValueError, OSError):  # all ranks raise the same error, and rank 0 reports it
                    weights.load(os.fsdecode(message.removeprefix(_WEIGHTS)))
            continue
        received = None if link.is_first else _receive_activations(link, message)
        order = _order_of(message)
        output = runner.run(order.arrays, received)
        if not link.is_last:
            _send_activations(link, message, output)
        elif link.tensor.rank == 0:
            # One rank draws the tokens: draws of several ranks could differ by rounding.
            result = finish_step(output, order)
            link.send(_result_as_bytes(result), (), stage=0)


def receive_sample(link: StepLink) -> Any:
    """Receive the sample activations of the previous stage; None on the first stage."""
    if link.is_first:
        return None
    return _receive_activations(link, link.receive(stage=link.stages.rank - 1))


def send_sample(link: StepLink, output: Any) -> None:
    """Send the sample activations of this stage to the next one, if any."""
    if not link.is_last:
        _send_activations(link, pack_arrays({}), output)
        link.wait()


def _send_activations(link: StepLink, message: bytes, output: Any) -> None:
    """Send a step and its activations to the next stage."""
    tensors, kind = _flatten_output(output)
    head = [(str(each.dtype).removeprefix("torch."), list(each.shape)) for each in tensors]
    link.send(
        pack_arrays({**unpack_arrays(message), "activations": _text(repr((kind, head)))}),
        tensors,
        stage=link.stages.rank + 1,
    )


def _receive_activations(link: StepLink, message: bytes) -> Any:
    kind, head = ast.literal_eval(unpack_arrays(message)["activations"].tobytes().decode())
    tensors = [
        link.receive_tensor(shape, getattr(torch, name), stage=link.stages.rank - 1) for name, shape in head
    ]
    if kind == "tensor":
        return tensors[0]
    return tuple(tensors) if kind == "tuple" else dict(zip(kind, tensors, strict=True))


def _flatten_output(output: Any) -> tuple[list[Tensor], Any]:
    """Return the tensors of a stage's output, and the structure to rebuild it."""
    if isinstance(output, Tensor):
        return [output], "tensor"
    if isinstance(output, dict):
        return list(output.values()), list(output)
    return list(output), "tuple"


def _text(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), dtype=np.uint8)


def _order_as_bytes(order: StepOrder) -> bytes:
    named = {f"step.{name}": array for name, array in order.arrays.arrays().items()}
    named |= {f"draw.{name}": array for name, array in order.draws.arrays().items()}
    others = ("draw_rows", "scored_rows", "scored_ids", "scored_top")
    return pack_arrays(named | {name: getattr(order, name) for name in others})


def _order_of(message: bytes) -> StepOrder:
    arrays = unpack_arrays(message)
    return StepOrder(
        StepArrays(**_with_prefix("step.", arrays)),
        Draws.from_arrays(_with_prefix("draw.", arrays)),
        *(arrays[name] for name in ("draw_rows", "scored_rows", "scored_ids", "scored_top")),
    )


def _result_as_bytes(result: StepResult) -> bytes:
    named = {f"drawn.{name}": array for name, array in result.drawn.arrays().items()}
    return pack_arrays(named | {f"scored.{name}": array for name, array in result.scored.arrays().items()})


def _result_of(message: bytes) -> StepResult:
    arrays = unpack_arrays(message)
    return StepResult(
        Drawn.from_arrays(_with_prefix("drawn.", arrays)), Drawn.from_arrays(_with_prefix("scored.", arrays))
    )


def _with_prefix(prefix: str, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
