"""Auxiliary losses of layers with experts, by forward, and the placement of experts: `moe_env`.

A layer cannot return its auxiliary loss, since any model can be between it and the criterion. It adds the
loss to the losses of the forward in progress, and `MoeLoss` looks up the losses of the forward that made its
arguments.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import Node

from colossalai.context._mesh import Axis
from colossalai.context._parallel_context import global_context
from colossalai.context._process import ExpertLosses, process
from colossalai.context._random import moe_set_seed
from colossalai.logging import get_dist_logger

# [Note: losses found by outputs] The losses of a forward of a wrapped model are in the metadata of the
# autograd nodes of its outputs, so they are freed with the graph. From a loss these nodes are a few steps of
# cross entropy, casts and views away. Reference counts cannot free a cycle through a graph, so a node on
# which one of the losses can depend (hidden states that are returned, too) gets a weak reference: such a node
# is older than the loss, by autograd's sequence numbers. Without a graph the losses are kept by output, with
# weak references.
_METADATA = "colossalai.expert_losses"
_MOST_NODES = 1000  # limit of nodes visited from a loss; takes about half a millisecond


class MoeInfo(NamedTuple):
    """Placement of experts.

    Attributes:
        ep_size: Number of ranks that share the experts of a layer.
        dp_size: Number of ranks that hold the same experts.
        ep_axis: Axis of the ranks that share experts.
        dp_axis: Axis of the ranks that hold the same experts.
    """

    ep_size: int
    dp_size: int
    ep_axis: Axis
    dp_axis: Axis


class MoeEnvironment:
    """The experts of the launched job, and the auxiliary losses of forwards.

    All instances share the state of the process.
    """

    __slots__ = ()

    @property
    def data_parallel_size(self) -> int:
        """The number of ranks that hold the same experts; 1 before launch."""
        return global_context.mesh.axis_size("edp") if global_context.is_launched else 1

    @property
    def model_parallel_size(self) -> int:
        """The number of ranks that share the experts of a layer; 1 before launch."""
        return global_context.mesh.axis_size("ep") if global_context.is_launched else 1

    @property
    def aux_loss(self) -> torch.Tensor | float:
        """The result of `get_loss` for the last forward."""
        return self.get_loss()

    def is_initialized(self) -> bool:
        """Return whether a job has been launched, so that the sizes are those of its config."""
        return global_context.is_launched

    def setup(self, seed: int) -> None:
        """Seed the experts of the layers that are built afterwards: `moe_set_seed`."""
        moe_set_seed(seed)

    def get_info(self, num_experts: int) -> tuple[int, MoeInfo]:
        """Return the number of experts on a rank along `ep`, of `num_experts`, and their placement.

        Raises:
            ValueError: `num_experts` is not a multiple of the ranks along `ep`.
        """
        mesh = global_context.mesh
        ep_axis, dp_axis = mesh.axis("ep"), mesh.axis("edp")
        if num_experts % ep_axis.size:
            raise ValueError(f"{num_experts} experts, which {ep_axis.size} ranks do not divide")
        info = MoeInfo(ep_axis.size, dp_axis.size, ep_axis, dp_axis)
        return num_experts // ep_axis.size, info

    @contextmanager
    def forward_of(self, model: nn.Module, inputs: Iterable[torch.Tensor] = ()) -> Iterator[ExpertLosses]:
        """Collect the losses of a forward of a wrapped model within the block; `assign` outputs to them.

        The losses of a forward within another one belong to both. The outputs also lead to the losses of the
        forwards that made the inputs.
        """
        experts = process.experts
        outer = experts.current.get()
        experts.num_wrapped += 1
        losses = ExpertLosses(number=experts.num_wrapped)
        for tensor in inputs:
            if tensor.grad_fn is not None:
                losses.behind.extend(_known_losses(tensor))
        if outer is None and not is_in_backward():  # a repeated forward does not count as the last one
            experts.last = losses
        token = experts.current.set(losses)
        try:
            yield losses
        finally:
            experts.current.reset(token)
            if losses.terms:
                experts.sources.add(model)
                if outer is not None:
                    outer.terms.extend(losses.terms)

    def assign(self, losses: ExpertLosses, outputs: Iterable[torch.Tensor]) -> None:
        """Record the losses of a forward with its outputs."""
        # See [Note: losses found by outputs].
        nodes = [term.grad_fn for term in losses.terms if term.grad_fn is not None]
        newest = max((node._sequence_nr() for node in nodes), default=-1)
        has_graph = any(term.requires_grad for term in losses.terms)
        for output in outputs:
            node = output.grad_fn
            if node is not None:
                earlier = _losses_at(node)
                if earlier is None or earlier.number > losses.number:  # from a forward within this one
                    is_later = node._sequence_nr() > newest
                    _metadata(node)[_METADATA] = losses if is_later else weakref.ref(losses)
            elif not output.requires_grad and not has_graph and output.is_floating_point():
                process.experts.outputs[output] = losses

    def expect_losses(self, layer: type[nn.Module] | None = None) -> None:
        """Announce a layer that adds losses: from then on wrapped models collect losses by forward.

        Args:
            layer: Class of the layer. A compiled forward of a model without such layers does not collect
                losses, since `torch.compile` cannot trace the collection.
        """
        experts = process.experts
        experts.has_layers = True
        if layer is not None:
            experts.layer_classes.add(layer)
        while experts.waiting:
            model, install = experts.waiting.popitem()
            install(model)

    def when_expected(self, model: Any, install: Callable[[Any], None]) -> None:
        """Call `install(model)` once a layer that adds losses is announced or has added one, perhaps now.

        Args:
            model: A wrapped model, which is not kept alive.
            install: A function without a reference to `model`.
        """
        if process.experts.has_layers:
            install(model)
        else:
            process.experts.waiting[model] = install

    def has_layers(self, model: nn.Module) -> bool:
        """Return whether a model has a layer of an announced class."""
        classes = tuple(process.experts.layer_classes)
        return any(isinstance(part, classes) for part in model.modules())

    def reset_loss(self) -> None:
        """Drop the losses of the forward in progress, or, outside of one, of the last forward.

        A forward of a wrapped model begins without losses. In a loop over a model without a wrapper call it
        before each forward.
        """
        losses = process.experts.current.get()
        if losses is None:
            process.experts.last = ExpertLosses()
        else:
            losses.terms.clear()

    def add_loss(self, loss: torch.Tensor, *, layer: nn.Module | None = None) -> None:
        """Add a loss to the forward in progress, or, outside of one, to the last forward.

        Nothing is added while a forward is repeated for its backward.

        Args:
            loss: The loss, a scalar.
            layer: The layer that computed it. Outside of a wrapped model its loss is not added to the forward
                of a wrapped one.
        """
        if is_in_backward():
            return
        experts = process.experts
        if not experts.has_layers:
            self.expect_losses()
        losses = experts.current.get()
        if losses is None:
            last = experts.last
            if last.number and layer is not None:
                experts.last = ExpertLosses()
            elif last.number and last.extends is None:
                # A copy, as the user's loss can depend on outputs that `last` is assigned to.
                experts.last = ExpertLosses([*last.terms], last.number, last)
            losses = experts.last
            if layer is not None and not losses.terms:
                experts.sources.add(layer)
        losses.terms.append(loss)

    @property
    def has_losses(self) -> bool:
        """Whether the forward in progress, or the last one, has added a loss, even a zero."""
        return bool((process.experts.current.get() or process.experts.last).terms)

    def get_loss(self, outputs: torch.Tensor | None = None) -> torch.Tensor | float:
        """Return the sum of the auxiliary losses of a forward; 0.0 if there are none.

        Args:
            outputs: A tensor that a wrapped model returned, or that was computed from such tensors, for the
                forward of that model. Default: the forward in progress, or the last one.
        """
        return self.losses_of([] if outputs is None else [outputs]).total()

    def losses_of(self, tensors: Iterable[torch.Tensor]) -> ExpertLosses:
        """Return the losses of the forwards that made the first tensor with known losses.

        If no losses are known, they are those of the forward in progress, or of the last one, with a warning
        if several models are possible.
        """
        experts = process.experts
        found: list[ExpertLosses] = []
        if experts.num_wrapped:
            found = next(filter(None, map(_known_losses, tensors)), [])
        if not found:
            current = experts.current.get()
            if current is None:
                _warn_if_ambiguous()
            return current or experts.last
        if experts.last.extends in found:
            found[found.index(experts.last.extends)] = experts.last
        if len(found) == 1:
            return found[0]
        terms = {id(term): term for losses in found for term in losses.terms}
        return ExpertLosses([*terms.values()])


MOE_CONTEXT = MoeEnvironment()
"""The environment of this process; also `colossalai.global_variables.moe_env`."""


def is_in_backward() -> bool:
    """Return whether a backward makes this call, for example in a repeated forward."""
    return bool(torch._C._current_graph_task_id() != -1)


def _metadata(node: Node) -> dict[Any, Any]:
    return node.metadata  # type: ignore[return-value]  # a property, which torch declares as a method


def _losses_at(node: Node) -> ExpertLosses | None:
    losses = _metadata(node).get(_METADATA)
    found: ExpertLosses | None = losses() if isinstance(losses, weakref.ref) else losses
    return found


def _known_losses(tensor: torch.Tensor) -> list[ExpertLosses]:
    """Return the losses of the forwards that made a tensor, or whose outputs it was computed from."""
    if tensor.grad_fn is None:
        outputs = process.experts.outputs
        losses = outputs.get(tensor)
        if losses is None and tensor._base is not None:
            losses = outputs.get(tensor._base)
        return [] if losses is None else [losses]
    found: list[ExpertLosses] = []
    seen = [tensor.grad_fn]  # keeps the Python objects of nodes alive, so that each has only one
    known = set(seen)
    for node in seen:  # breadth first, and not beyond the outputs of a forward
        losses = _losses_at(node)
        if losses is not None:
            if losses not in found:
                found.append(losses)
                found.extend(earlier for earlier in losses.behind if earlier not in found)
        elif len(seen) < _MOST_NODES:
            for earlier, _ in node.next_functions:
                if earlier is not None and earlier not in known:
                    known.add(earlier)
                    seen.append(earlier)
    if not found and (losses := process.experts.outputs.get(tensor)) is not None:
        return [losses]  # a forward without a graph that got one later, as by reentrant checkpointing
    return found


def _warn_if_ambiguous() -> None:
    experts = process.experts
    sources = list(experts.sources)
    if len(sources) == experts.num_sources_compared or len(sources) < 2:
        return
    experts.num_sources_compared = len(sources)
    within = {part for source in sources for part in source.modules() if part is not source}
    if sum(source not in within for source in sources) > 1:
        get_dist_logger().log_once(
            "auxiliary losses of experts: several models have left some, and the loss is not known "
            "to come from the outputs of one of them; those of the last forward are taken. Compute the loss "
            "from the outputs of a model that Booster.boost, colossalai.initialize or zero_model_wrapper "
            "returned (without detach), or before the next model runs",
            ranks=[0],
        )
