"""Pipeline executor: runs the steps of a lowered schedule in order, for any schedule.

A rank runs its own list of steps (see `schedules/_lowered.py`), which fixes where a message begins and where
it is waited for; the executor decides nothing. Everything is freed with the backward (or the weight gradient)
of its microbatch: only the place in the autograd graph of a sent output is kept.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from colossalai.context import Axis
from colossalai.pipeline.execution._communication import Channel, Exchange, SpecKey
from colossalai.pipeline.execution._payload import (
    PayloadSpec,
    digest,
    fixed_spec,
    put_together,
    shape_digests,
    take_apart,
)
from colossalai.pipeline.execution._split_backward import PendingBackward, input_grads
from colossalai.pipeline.schedules import (
    Op,
    Schedule,
    ScheduleStep,
    StepKind,
    lower,
    messages_between,
    validate,
)
from colossalai.pipeline.schedules import forward_only as forward_only_schedule
from colossalai.pipeline.stages import caller_of
from colossalai.tensor import map_tensors

ComputeLoss = Callable[[Any, int], torch.Tensor]


class LossCollection(Protocol):
    """Collection of the loss terms of stages that are not part of their outputs.

    The sum is sent with the activations, and reaches the criterion of the last stage with all terms in it.
    Its gradient comes back with theirs, with the factor of the loss, so each stage differentiates its terms.
    """

    def run(self, forward: Callable[[], Any], carried: torch.Tensor | None) -> tuple[Any, torch.Tensor]:
        """Run the forward of a stage.

        Args:
            forward: Returns the output.
            carried: The sum over the stages before; None on the first one.

        Returns:
            The output, and the sum, a scalar.
        """


_NAMES = {
    Op.FORWARD: "forward",
    Op.BACKWARD: "backward",
    Op.INPUT_GRAD: "input gradient",
    Op.WEIGHT_GRAD: "weight gradient",
}


@dataclass(frozen=True)
class PipelineResult:
    """Outputs and losses of a run.

    Attributes:
        outputs: On the rank of the last stage, the model's output for each microbatch, if outputs are kept;
            else None.
        losses: On the rank of the last stage, the loss of each microbatch, detached and without its factor;
            None on other ranks, or if no loss was computed.
    """

    outputs: list[Any] | None = None
    losses: list[torch.Tensor] | None = None


@dataclass
class _LiveMicrobatch:
    """A microbatch on a stage, between its forward and its last backward.

    Attributes:
        inputs: The leaves that get a gradient.
        outputs: The graph edges where the backward starts, one for each received gradient; None for an
            unused one.
        pending: The weight gradients, once the input gradient is computed.
    """

    inputs: list[torch.Tensor]
    outputs: Sequence[GradientEdge | None]
    pending: PendingBackward | None = None


@dataclass(frozen=True)
class _Lowered:
    """A schedule as this rank runs it.

    Attributes:
        schedule: The schedule.
        steps: The steps of this rank, in order.
        callers: For each stage of this rank, the function that runs it.
        pairs: All pairs of ranks that exchange messages.
        digest: Digest of the schedule.
    """

    schedule: Schedule
    steps: tuple[ScheduleStep, ...]
    callers: Mapping[int, Callable[[Any, Any], Any]]
    pairs: tuple[tuple[int, int], ...]
    digest: int


class PipelineExecutor:
    """Runs a schedule over the stages of a model.

    Args:
        chunks: The stages of this rank, in ascending order; see `caller_of` for the calls.
        axis: The pipeline axis.
        make_schedule: Returns the schedule for a number of microbatches; called once for each number.
        device: Device of the received tensors.
        tensor_shape: Shape of the output of every stage but the last (or shapes, of a tuple of tensors), if
            it is always the same; otherwise shapes are exchanged.
        dtype: The dtype for `tensor_shape`. Default: torch's default dtype.
        scatter_axis: A tensor axis along which activations are the same: each of its ranks sends its part.
        stage_context: Returns the context of every forward, for autocast. Default: none.
        convert_activation: Converts the output of every stage but the last. Default: no conversion.
        collection: Collection of loss terms of the stages, given on all ranks or on none. With it, shapes
            are exchanged.
        on_last_backward: Called with the index of a chunk before the last action that adds to its gradients.

    Attributes:
        peak_live: For each chunk, the largest number of microbatches between forward and last backward in the
            last run.

    Raises:
        ValueError: The number of chunks differs from the schedule's stages on this rank (from `run`).
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
        convert_activation: Callable[[Any], Any] | None = None,
        collection: LossCollection | None = None,
        on_last_backward: Callable[[int], None] | None = None,
    ) -> None:
        self.chunks = list(chunks)
        self.axis = axis
        self.peak_live = [0] * len(self.chunks)
        self._make_schedule = make_schedule
        self._channel = Channel(axis, device=device, scatter_axis=scatter_axis)
        self._fixed: PayloadSpec | None = None
        if tensor_shape is not None and collection is None:
            self._fixed = fixed_spec(tensor_shape, dtype or torch.get_default_dtype())
        self._stage_context = stage_context
        self._convert_activation = convert_activation
        self._collection = collection
        self._on_last_backward = on_last_backward
        self._lowered: dict[tuple[int, bool], _Lowered] = {}
        self._specs: dict[SpecKey, PayloadSpec] = {}

    def run(
        self,
        microbatches: Sequence[Any],
        *,
        compute_loss: ComputeLoss | None = None,
        forward_only: bool = False,
        loss_factors: Sequence[float] | None = None,
        keep_outputs: bool = False,
    ) -> PipelineResult:
        """Run all microbatches through the stages, and back; collective over the axis.

        Args:
            microbatches: Data of each microbatch, the same on all stages.
            compute_loss: Returns the loss for an output and the index of its microbatch; called on the last
                stage, outside of `stage_context`.
            forward_only: Whether to skip the backward.
            loss_factors: Factor of each microbatch's loss in the backward: its weight times the loss scale.
                Default: 1.
            keep_outputs: Whether the result has the outputs.

        Returns:
            Outputs and losses on the rank of the last stage.

        Raises:
            ValueError: The chunks do not fit the schedule, or the output of a stage cannot be sent.
            RuntimeError: Another rank has left or is too late; the message names it and the missing message.
        """
        lowered = self._prepare(len(microbatches), forward_only)
        if not forward_only and compute_loss is None:
            raise ValueError("compute_loss is None: no loss, no backward; give one, or use forward_only=True")
        data = shape_digests(microbatches)
        common = digest((lowered.digest, not forward_only, tuple(data)))
        self._channel.connect(lowered.pairs)  # all ranks, in one order; connected pairs send nothing
        exchange = Exchange(
            self._channel,
            rank_of_stage=lowered.schedule.rank_of_stage,
            common=common,
            specs=self._specs,
            data=data,
            fixed=self._fixed,
            training=not forward_only,
        )
        run = _Run(
            self.chunks,
            lowered,
            exchange,
            microbatches,
            compute_loss=compute_loss,
            loss_factors=[1.0] * len(microbatches) if loss_factors is None else loss_factors,
            keep_outputs=keep_outputs,
            stage_context=self._stage_context,
            convert_activation=self._convert_activation,
            collection=self._collection,
            on_last_backward=self._on_last_backward,
        )
        self.peak_live = run.peak_live
        handlers = self._handlers(run)
        with torch.set_grad_enabled(not forward_only):
            for step in lowered.steps:
                try:
                    handlers[step.kind](step)
                except BaseException as error:
                    error.add_note(f"in {self._describe(step, lowered.schedule)}")
                    raise
        exchange.finish()  # waits for the sends without a WAIT step that shows them complete
        return PipelineResult(_in_order(run.outputs), _in_order(run.losses))

    def _handlers(self, run: "_Run") -> dict[StepKind, Callable[[ScheduleStep], None]]:
        """Return the handler of each kind of step; a benchmark adds timers to them."""
        return run.handlers

    def _describe(self, step: ScheduleStep, schedule: Schedule) -> str:
        action = step.action
        return (
            f"the {_NAMES[action.op]} of microbatch {action.microbatch} on stage {action.stage} "
            f"(rank {self.axis.mesh.rank}, action {action} of schedule {schedule.name!r})"
        )

    def _prepare(self, num_microbatches: int, forward_only: bool) -> _Lowered:
        """Return the schedule as this rank runs it: made, checked and lowered once."""
        key = (num_microbatches, forward_only)
        if key not in self._lowered:
            schedule = self._make_schedule(num_microbatches)
            if forward_only:
                schedule = forward_only_schedule(schedule)
            validate(schedule)
            self._check(schedule, num_microbatches)
            stages = schedule.stages_of(self.axis.rank)
            written = [[str(action) for action in actions] for actions in schedule.actions]
            self._lowered[key] = _Lowered(
                schedule,
                lower(schedule, self.axis.rank, has_tokens=self._fixed is None),
                {
                    stage: caller_of(chunk, is_first=stage == 0)
                    for stage, chunk in zip(stages, self.chunks, strict=True)
                },
                tuple(messages_between(schedule)),
                digest((written, schedule.rank_of_stage)),
            )
        return self._lowered[key]

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


class _Run:
    """One run of a lowered schedule, with a handler for each kind of step.

    Args:
        chunks: The stages of this rank.
        lowered: The lowered schedule.
        exchange: The messages.
        microbatches: See `PipelineExecutor.run`, as for the others.
        compute_loss: Returns a loss.
        loss_factors: Factors of the losses.
        keep_outputs: Whether outputs are kept.
        stage_context: Returns the context of every forward.
        convert_activation: Converts the output of every stage but the last.
        collection: Collection of loss terms of the stages.
        on_last_backward: Called before the last action that adds to the gradients of a chunk.

    Attributes:
        outputs: By microbatch, the output of the model.
        losses: By microbatch, the loss.
        peak_live: For each chunk, the largest number of live microbatches.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        lowered: _Lowered,
        exchange: Exchange,
        microbatches: Sequence[Any],
        *,
        compute_loss: ComputeLoss | None,
        loss_factors: Sequence[float],
        keep_outputs: bool,
        stage_context: Callable[[], AbstractContextManager[Any]] | None,
        convert_activation: Callable[[Any], Any] | None,
        collection: LossCollection | None,
        on_last_backward: Callable[[int], None] | None,
    ) -> None:
        self.outputs: dict[int, Any] = {}
        self.losses: dict[int, torch.Tensor] = {}
        self.peak_live = [0] * len(chunks)
        self._chunks, self._exchange, self._microbatches = chunks, exchange, microbatches
        self._callers = lowered.callers
        self._chunk_of = {stage: chunk for chunk, stage in enumerate(lowered.callers)}
        self._last_stage = len(lowered.schedule.rank_of_stage) - 1
        self._compute_loss, self._loss_factors, self._keep_outputs = compute_loss, loss_factors, keep_outputs
        self._stage_context, self._on_last_backward = stage_context, on_last_backward
        self._convert_activation = convert_activation
        self._collection = collection
        self._live: dict[int, dict[int, _LiveMicrobatch]] = {stage: {} for stage in lowered.callers}
        self._result: Any = None  # result of a computation, for the next step, which sends it or hands it on

    @property
    def handlers(self) -> dict[StepKind, Callable[[ScheduleStep], None]]:
        """The handler of each kind of step."""
        return {
            StepKind.FORWARD: self._forward,
            StepKind.BACKWARD: self._backward,
            StepKind.INPUT_GRAD: self._input_grad,
            StepKind.WEIGHT_GRAD: self._weight_grad,
            StepKind.TOKEN: self._begin_stage,
            StepKind.RECV: self._exchange.post,
            StepKind.WAIT: self._exchange.wait,
            StepKind.SEND_F: self._pass_output_on,
            StepKind.HAND_F: self._pass_output_on,
            StepKind.SEND_B: self._send_gradients,
            StepKind.HAND_B: self._hand_gradients,
            StepKind.CLOSE: self._close,
        }

    def _forward(self, step: ScheduleStep) -> None:
        stage, microbatch = step.action.stage, step.action.microbatch
        received: Any = None
        inputs: list[torch.Tensor] = []
        if stage > 0:
            spec, tensors = self._exchange.activations.pop((stage, microbatch))
            if torch.is_grad_enabled():
                inputs = [
                    tensor.requires_grad_()
                    for tensor, tensor_spec in zip(tensors, spec.tensors, strict=True)
                    if tensor_spec.requires_grad
                ]
            received = put_together(spec, tensors)
            del tensors  # leaves with a gradient live until the backward, the others as long as the graph
        with nullcontext() if self._stage_context is None else self._stage_context():
            if self._collection is None:
                output = self._callers[stage](received, self._microbatches[microbatch])
            else:
                received, carried = (None, None) if received is None else received
                forward = partial(self._callers[stage], received, self._microbatches[microbatch])
                output, total = self._collection.run(forward, carried)
                if stage < self._last_stage:
                    output = (output, total)
                del forward, carried, total
        del received
        live = _LiveMicrobatch(inputs, [])
        if stage < self._last_stage:
            self._result = output if self._convert_activation is None else self._convert_activation(output)
        else:
            live.outputs = self._finish_forward(output, microbatch)
        if torch.is_grad_enabled():
            chunk = self._chunk_of[stage]
            self._live[stage][microbatch] = live
            self.peak_live[chunk] = max(self.peak_live[chunk], len(self._live[stage]))

    def _finish_forward(self, output: Any, microbatch: int) -> list[GradientEdge | None]:
        """Compute the loss on the last stage; return the edges where the backward starts."""
        if self._keep_outputs:
            self.outputs[microbatch] = map_tensors(torch.Tensor.detach, output)
        if self._compute_loss is None:
            return []
        loss = self._compute_loss(output, microbatch)
        # The mean of mse_loss is a view into a storage of all the squares; a clone frees it.
        self.losses[microbatch] = loss.detach().clone()
        if not torch.is_grad_enabled():
            return []
        return [get_gradient_edge(loss * self._loss_factors[microbatch]) if loss.requires_grad else None]

    def _pass_output_on(self, step: ScheduleStep) -> None:
        """Send an output, or hand it to the next stage of this rank, and keep its graph edges."""
        stage, microbatch = step.action.stage, step.action.microbatch
        spec, tensors = take_apart(self._result)
        self._result = None
        if step.message is not None:
            # The exchange keeps the tensors until the send is complete; only their graph edges are kept here.
            spec = self._exchange.send_activation(step.message, spec, tensors)
        else:
            leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]
            self._exchange.activations[stage + 1, microbatch] = (spec, leaves)
        if torch.is_grad_enabled():
            edges: list[GradientEdge | None] = []
            for tensor, tensor_spec in zip(tensors, spec.tensors, strict=True):
                if tensor_spec.requires_grad:
                    edges.append(get_gradient_edge(tensor) if tensor.requires_grad else None)
            self._live[stage][microbatch].outputs = edges

    def _backward(self, step: ScheduleStep) -> None:
        # Inputs, graph and gradients of the microbatch are freed on return, except for sent tensors.
        live = self._live[step.action.stage].pop(step.action.microbatch)
        outputs, grads = self._edges_with_gradient(live, step)
        if outputs:
            torch.autograd.backward(outputs, grads)
        self._result = []
        for leaf in live.inputs:
            self._result.append(leaf.grad)
            leaf.grad = None

    def _input_grad(self, step: ScheduleStep) -> None:
        live = self._live[step.action.stage][step.action.microbatch]
        self._result, live.pending = input_grads(*self._edges_with_gradient(live, step), live.inputs)
        live.outputs, live.inputs = [], []

    def _weight_grad(self, step: ScheduleStep) -> None:
        live = self._live[step.action.stage].pop(step.action.microbatch)
        assert live.pending is not None, "the input gradient is computed first"
        live.pending.weight_grads()

    def _edges_with_gradient(
        self, live: _LiveMicrobatch, step: ScheduleStep
    ) -> tuple[list[GradientEdge], list[torch.Tensor]]:
        """Return the graph edges of a microbatch with a gradient to propagate, and the gradients."""
        stage, microbatch = step.action.stage, step.action.microbatch
        if stage == self._last_stage:
            grads: Sequence[torch.Tensor | None] = [torch.ones_like(self.losses[microbatch])]
        else:
            grads = self._exchange.gradients.pop((stage, microbatch))
        edges, useful = [], []
        for edge, grad in zip(live.outputs, grads, strict=True):
            if edge is not None and grad is not None:
                edges.append(edge)
                useful.append(grad)
        return edges, useful

    def _send_gradients(self, step: ScheduleStep) -> None:
        assert step.message is not None, "a message is sent"
        self._exchange.send_gradients(step.message, self._result)
        self._result = None

    def _hand_gradients(self, step: ScheduleStep) -> None:
        self._exchange.gradients[step.action.stage - 1, step.action.microbatch] = self._result
        self._result = None

    def _begin_stage(self, step: ScheduleStep) -> None:
        """Send the next stage a token of the mode and the parameters with a gradient, beyond the data."""
        chunk = self._chunks[self._chunk_of[step.action.stage]]
        has_grad = "".join(["01"[param.requires_grad] for param in chunk.parameters()])
        state = (chunk.training, has_grad) if torch.is_grad_enabled() else None
        self._exchange.begin_stage(step.action.stage, state, step.message)

    def _close(self, step: ScheduleStep) -> None:
        if self._on_last_backward is not None:
            self._on_last_backward(self._chunk_of[step.action.stage])


def _in_order(values: dict[int, Any]) -> list[Any] | None:
    return [values[microbatch] for microbatch in sorted(values)] or None
