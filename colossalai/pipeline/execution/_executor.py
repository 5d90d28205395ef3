"""The executor: runs the actions of a schedule, one after the other, whatever the schedule.

A rank goes through its own list. A forward takes what came from the stage before, a backward the gradient
from the stage behind; what comes of them is sent, or handed to the next stage of the same rank. Everything is
freed with the backward (or the weight gradient) of its microbatch: of an output that has been sent only its
place in the autograd graph is kept. For the messages see `_exchange.py`.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from colossalai.context import Axis
from colossalai.pipeline.execution._communication import Exchange, Routes, SpecKey
from colossalai.pipeline.execution._microbatch import map_tensors
from colossalai.pipeline.execution._p2p import Channel
from colossalai.pipeline.execution._payload import (
    PayloadSpec,
    fixed_spec,
    put_together,
    shape_digest,
    take_apart,
)
from colossalai.pipeline.execution._split_backward import PendingBackward, input_grads
from colossalai.pipeline.schedules import (
    Action,
    Message,
    Op,
    Schedule,
    message_needed_by,
    message_sent_by,
    validate,
)
from colossalai.pipeline.schedules import forward_only as forward_only_schedule
from colossalai.pipeline.stages import caller_of

ComputeLoss = Callable[[Any, int], torch.Tensor]
_NAMES = {
    Op.FORWARD: "forward",
    Op.BACKWARD: "backward",
    Op.INPUT_GRAD: "input gradient",
    Op.WEIGHT_GRAD: "weight gradient",
}


@dataclass(frozen=True)
class PipelineResult:
    """What a run gives.

    Attributes:
        outputs: On the rank of the last stage, what the model returned for each microbatch, if it was to be
            kept; else None.
        losses: On the rank of the last stage, the loss of each microbatch, detached and without its factor;
            None on other ranks, or if no loss was computed.
    """

    outputs: list[Any] | None = None
    losses: list[torch.Tensor] | None = None


@dataclass
class _Live:
    """A microbatch on a stage, between its forward and its last backward.

    Attributes:
        inputs: The leaves that get a gradient.
        outputs: Where in the graph the backward starts; one place for each gradient that comes, None where it
            is of no use.
        pending: The weight gradients, once the input gradient is done.
    """

    inputs: list[torch.Tensor]
    outputs: Sequence[GradientEdge | None]
    pending: PendingBackward | None = None


@dataclass
class _Run:
    """One run of a schedule."""

    microbatches: Sequence[Any]
    exchange: Exchange
    compute_loss: ComputeLoss | None
    loss_factors: Sequence[float]
    forward_only: bool
    keep_outputs: bool
    last_backwards: dict[Action, int]
    live: dict[tuple[int, int], _Live] = field(default_factory=dict)
    handed: dict[tuple[int, int], Any] = field(default_factory=dict)
    handed_back: dict[tuple[int, int], list[torch.Tensor | None]] = field(default_factory=dict)
    begun: set[int] = field(default_factory=set)
    outputs: dict[int, Any] = field(default_factory=dict)
    losses: dict[int, torch.Tensor] = field(default_factory=dict)


class PipelineExecutor:
    """Runs a schedule over the stages of a model.

    Args:
        chunks: The stages of this rank, in ascending order; see `caller_of` for how they are called.
        axis: The pipeline axis.
        make_schedule: Gives the schedule for a number of microbatches; asked once for each number.
        device: Where tensors are received.
        tensor_shape: Shape of what every stage but the last returns (or shapes, of a tuple of tensors), if it
            is always the same; shapes are exchanged otherwise.
        dtype: The type that belongs to `tensor_shape`; torch's default type if not given.
        scatter_axis: A tensor axis along which activations are the same: each of its ranks sends its part.
        stage_context: Gives the context of every forward, for autocast.
        on_last_backward: Called with the index of a chunk before the last action that adds to its gradients.

    Attributes:
        peak_live: For each chunk, the most microbatches that were between forward and last backward at a time
            in the last run.

    Raises:
        ValueError: There are not as many chunks as the schedule has stages on this rank (from `run`).
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        axis: Axis,
        *,
        make_schedule: Callable[[int], Schedule],
        device: torch.device,
        tensor_shape: Sequence[int] | Sequence[Sequence[int]] | None = None,
        dtype: torch.dtype | None = None,
        scatter_axis: Axis | None = None,
        stage_context: Callable[[], AbstractContextManager[Any]] | None = None,
        on_last_backward: Callable[[int], None] | None = None,
    ) -> None:
        self.chunks = list(chunks)
        self.axis = axis
        self.peak_live = [0] * len(self.chunks)
        self._make_schedule = make_schedule
        self._channel = Channel(axis, device=device, scatter_axis=scatter_axis)
        self._fixed: PayloadSpec | None = None
        if tensor_shape is not None:
            self._fixed = fixed_spec(tensor_shape, dtype or torch.get_default_dtype())
        self._stage_context = stage_context or nullcontext
        self._on_last_backward = on_last_backward
        self._routes: dict[tuple[int, bool], Routes] = {}
        self._specs: dict[SpecKey, PayloadSpec] = {}
        self._callers: dict[int, Callable[[Any, Any], Any]] = {}

    def run(
        self,
        microbatches: Sequence[Any],
        *,
        compute_loss: ComputeLoss | None = None,
        forward_only: bool = False,
        loss_factors: Sequence[float] | None = None,
        keep_outputs: bool = False,
    ) -> PipelineResult:
        """Run all microbatches through the stages, and back; every rank of the axis calls it.

        Args:
            microbatches: Their data, the same on all stages.
            compute_loss: Gives the loss of an output and the number of its microbatch; called on the last
                stage, outside of `stage_context`.
            forward_only: Whether there is no backward.
            loss_factors: What each microbatch's loss is multiplied by for the backward: its weight, times the
                loss scale; 1 if not given.
            keep_outputs: Whether the result has the outputs.

        Returns:
            Outputs and losses on the rank of the last stage.

        Raises:
            ValueError: The chunks are not those of the schedule, or a stage returned what cannot be sent.
            RuntimeError: Another rank is gone or too late; the message names it and what was waited for.
        """
        schedule, routes = self._prepare(len(microbatches), forward_only)
        if not forward_only and compute_loss is None:
            raise ValueError("compute_loss is None: no loss, no backward; give one, or use forward_only=True")
        self._channel.connect(routes.pairs)
        run = _Run(
            microbatches=microbatches,
            exchange=Exchange(
                self._channel,
                routes,
                specs=self._specs,
                data=[shape_digest(data) for data in microbatches],
                fixed=self._fixed,
                training=not forward_only,
            ),
            compute_loss=compute_loss,
            loss_factors=[1.0] * len(microbatches) if loss_factors is None else loss_factors,
            forward_only=forward_only,
            keep_outputs=keep_outputs,
            last_backwards=self._last_backwards(schedule),
        )
        self.peak_live = [0] * len(self.chunks)
        for action in schedule.actions[self.axis.rank]:
            try:
                self._execute(action, run, schedule)
            except BaseException as error:
                error.add_note(
                    f"in the {_NAMES[action.op]} of microbatch {action.microbatch} on stage {action.stage} "
                    f"(rank {self.axis.mesh.rank}, action {action} of schedule {schedule.name!r})"
                )
                raise
        run.exchange.finish()
        return PipelineResult(_in_order(run.outputs), _in_order(run.losses))

    def _prepare(self, num_microbatches: int, forward_only: bool) -> tuple[Schedule, Routes]:
        """Return the schedule and its messages, checked once."""
        key = (num_microbatches, forward_only)
        if key not in self._routes:
            schedule = self._make_schedule(num_microbatches)
            if forward_only:
                schedule = forward_only_schedule(schedule)
            validate(schedule)
            self._check(schedule, num_microbatches)
            self._routes[key] = Routes(self.axis.rank, schedule)
        routes = self._routes[key]
        return routes.schedule, routes

    def _check(self, schedule: Schedule, num_microbatches: int) -> None:
        if schedule.num_ranks != self.axis.size:
            raise ValueError(
                f"schedule {schedule.name!r} is for {schedule.num_ranks} pipeline ranks, "
                f"there are {self.axis.size}"
            )
        if schedule.num_microbatches != num_microbatches:
            raise ValueError(
                f"schedule {schedule.name!r} is for {schedule.num_microbatches} microbatches, there are "
                f"{num_microbatches}: give as many, or a schedule for any number"
            )
        stages = schedule.stages_of(self.axis.rank)
        if len(stages) != len(self.chunks):
            raise ValueError(
                f"schedule {schedule.name!r} has stages {list(stages)} on pipeline rank {self.axis.rank}, "
                f"which holds {len(self.chunks)} chunks: cut the model into as many"
            )

    def _last_backwards(self, schedule: Schedule) -> dict[Action, int]:
        """Return the last action that adds to the gradients of each chunk."""
        last = {
            action.stage: action
            for action in schedule.actions[self.axis.rank]
            if action.op in (Op.BACKWARD, Op.WEIGHT_GRAD)
        }
        stages = schedule.stages_of(self.axis.rank)
        return {action: stages.index(stage) for stage, action in last.items()}

    def _execute(self, action: Action, run: _Run, schedule: Schedule) -> None:
        if action.op is Op.FORWARD:
            with torch.set_grad_enabled(not run.forward_only):
                self._forward(action, run, schedule)
            return
        if self._on_last_backward is not None and action in run.last_backwards:
            self._on_last_backward(run.last_backwards[action])
        if action.op is Op.WEIGHT_GRAD:
            live = run.live.pop((action.stage, action.microbatch))
            assert live.pending is not None, "the input gradient comes first"
            live.pending.weight_grads()
        else:
            self._backward(action, run, schedule)

    def _forward(self, action: Action, run: _Run, schedule: Schedule) -> None:
        stage, microbatch = action.stage, action.microbatch
        chunk = schedule.stages_of(self.axis.rank).index(stage)
        if stage not in run.begun:
            run.begun.add(stage)
            run.exchange.begin_stage(stage, None if run.forward_only else _state_of(self.chunks[chunk]))
        received, inputs = self._take(action, run, schedule)
        data = run.microbatches[microbatch]
        with self._stage_context():
            output = self._caller(chunk, stage)(received, data)
        del received
        if stage + 1 == schedule.num_stages:
            outputs = self._finish_forward(output, run, microbatch)
        else:
            outputs = self._pass_on(output, message_sent_by(action, schedule), run, action)
        if not run.forward_only:
            run.live[stage, microbatch] = _Live(inputs, outputs)
            count = sum(1 for live_stage, _ in run.live if live_stage == stage)
            self.peak_live[chunk] = max(self.peak_live[chunk], count)

    def _take(self, action: Action, run: _Run, schedule: Schedule) -> tuple[Any, list[torch.Tensor]]:
        """Return what a forward receives, and the leaves in it that get a gradient."""
        if action.stage == 0:
            return None, []
        message = message_needed_by(action, schedule)
        if message is None:
            spec, tensors = take_apart(run.handed.pop((action.stage, action.microbatch)))
        else:
            spec, tensors = run.exchange.receive(message)
        if run.forward_only:
            return put_together(spec, tensors), []
        inputs = []
        for tensor, tensor_spec in zip(tensors, spec.tensors, strict=True):
            if tensor_spec.requires_grad:
                inputs.append(tensor.requires_grad_())
        return put_together(spec, tensors), inputs

    def _pass_on(
        self, output: Any, message: Message | None, run: _Run, action: Action
    ) -> list[GradientEdge | None]:
        """Send an output, or hand it to the next stage of this rank; return where its gradients enter."""
        spec, tensors = take_apart(output)
        if message is not None:
            spec = run.exchange.send_activation(message, spec, tensors)
        else:
            run.handed[action.stage + 1, action.microbatch] = map_tensors(_leaf, output)
        return [
            get_gradient_edge(tensor) if tensor.requires_grad else None
            for tensor, tensor_spec in zip(tensors, spec.tensors, strict=True)
            if tensor_spec.requires_grad
        ]

    def _finish_forward(self, output: Any, run: _Run, microbatch: int) -> list[GradientEdge | None]:
        """Compute the loss on the last stage."""
        if run.keep_outputs:
            run.outputs[microbatch] = map_tensors(torch.Tensor.detach, output)
        if run.compute_loss is None:
            return []
        loss = run.compute_loss(output, microbatch)
        # The mean of mse_loss is a number in a storage of all the squares, which a clone lets go.
        run.losses[microbatch] = loss.detach().clone()
        if run.forward_only:
            return []
        return [get_gradient_edge(loss * run.loss_factors[microbatch]) if loss.requires_grad else None]

    def _backward(self, action: Action, run: _Run, schedule: Schedule) -> None:
        key = (action.stage, action.microbatch)
        live = run.live[key]
        grads = self._take_gradients(action, run, schedule)
        if action.op is Op.INPUT_GRAD:
            found: Sequence[torch.Tensor | None]
            found, live.pending = input_grads(*_useful(live.outputs, grads), live.inputs)
            live.outputs, live.inputs = [], []
        else:
            del run.live[key]
            found = _whole_backward(live, grads)
        del grads, live
        message = message_sent_by(action, schedule)
        if message is not None:
            run.exchange.send_gradients(message, found)
        elif action.stage > 0:
            run.handed_back[action.stage - 1, action.microbatch] = list(found)

    def _take_gradients(self, action: Action, run: _Run, schedule: Schedule) -> Sequence[torch.Tensor | None]:
        """Return the gradients of what a forward returned."""
        if action.stage + 1 == schedule.num_stages:
            return [torch.ones_like(run.losses[action.microbatch])]
        message = message_needed_by(action, schedule)
        if message is not None:
            return run.exchange.receive(message)[1]
        return run.handed_back.pop((action.stage, action.microbatch))

    def _caller(self, chunk: int, stage: int) -> Callable[[Any, Any], Any]:
        if stage not in self._callers:
            self._callers[stage] = caller_of(self.chunks[chunk], is_first=stage == 0)
        return self._callers[stage]


def _whole_backward(live: _Live, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Do a plain backward; return the gradients of the inputs."""
    outputs, useful = _useful(live.outputs, grads)
    if outputs:
        torch.autograd.backward(outputs, useful)
    found = [leaf.grad for leaf in live.inputs]
    for leaf in live.inputs:
        leaf.grad = None
    return found


def _useful(
    outputs: Sequence[GradientEdge | None], grads: Sequence[torch.Tensor | None]
) -> tuple[list[GradientEdge], list[torch.Tensor]]:
    """Return where gradients of use enter the graph, and the gradients."""
    edges, useful = [], []
    for edge, grad in zip(outputs, grads, strict=True):
        if edge is not None and grad is not None:
            edges.append(edge)
            useful.append(grad)
    return edges, useful


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor cut off from the graph that it comes from."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _state_of(chunk: nn.Module) -> object:
    """Return what the output of a stage depends on besides its data: its mode, what has a gradient."""
    return chunk.training, "".join("01"[param.requires_grad] for param in chunk.parameters())


def _in_order(values: dict[int, Any]) -> list[Any] | None:
    return [values[microbatch] for microbatch in sorted(values)] or None
