"""Traced module: the user's own model, with a graph of its operations and its recomputed blocks.

The documented names use the trace of `colossalai.auto_parallel`. No code is generated from it: the trace is
for costs, and the given model is run and trained. Its graph is a frozen value; assigning a graph with
recomputed blocks activates their recomputation in the model.
"""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from colossalai.auto_parallel.checkpoint import TracedGraph, graph_of, profiled
from colossalai.runtime import RecomputeHandle, removable_recompute
from colossalai.tensor import is_own_attribute

_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, type(None))


class TracedModule(nn.Module):
    """A model with its graph, returned by `symbolic_trace` and `metainfo_trace`.

    It computes, trains and is saved like the model: `state_dict`, `named_parameters`, `named_buffers` and
    attributes (`gm.config`) have the model's own names. Changes of one of the two apply to both.

    Args:
        model: The model; it is referenced, not copied.
        graph: Graph of the model.
        arguments: Arguments of the traced forward by name, without memory for tensors.
    """

    def __init__(self, model: nn.Module, graph: TracedGraph, arguments: Mapping[str, Any]) -> None:
        super().__init__()
        self.training = model.training
        self.module = model
        self.traced_arguments = dict(arguments)
        self._graph = graph
        self._recomputation = RecomputeHandle()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "module" not in self.__dict__.get("_modules", {}):
                raise
            return getattr(self.module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute on the model, except those of the wrapper."""
        if "_recomputation" not in self.__dict__ or name == "module" or is_own_attribute(self, name):
            super().__setattr__(name, value)
        else:
            setattr(self.module, name, value)

    def __delattr__(self, name: str) -> None:
        """Delete an attribute of the wrapper or of the model, as it would be read."""
        if name == "module" or is_own_attribute(self, name):
            super().__delattr__(name)
        else:
            delattr(self.module, name)

    @property
    def graph(self) -> TracedGraph:
        """The operations of the model, their costs, and the recomputed blocks."""
        return self._graph

    @graph.setter
    def graph(self, graph: TracedGraph) -> None:
        """Recompute the segments of a graph instead of those of the earlier graph.

        Raises:
            ValueError: `graph` is from another trace: of another model, or of a batch of another shape.
        """
        if not isinstance(graph, TracedGraph):
            raise ValueError(
                f"graph is a {type(graph).__name__}: assign the result of solve() of a solver of "
                "colossalai.auto_parallel.checkpoint"
            )
        if graph.digest != self._graph.digest:
            raise ValueError(
                f"this graph is of another trace of {graph.model} ({graph.digest[:12]}) than that of the "
                f"model, a {self._graph.model} ({self._graph.digest[:12]}): solve gm.graph of this module, "
                "traced with arguments of these shapes and in this mode"
            )
        self._take(graph)

    def retrace(self, graph: TracedGraph, arguments: Mapping[str, Any]) -> None:
        """Replace the graph by a graph for other arguments.

        Args:
            graph: Graph of the same model.
            arguments: Arguments of its forward.
        """
        self._take(graph)
        self.traced_arguments = dict(arguments)

    def _take(self, graph: TracedGraph) -> None:
        self._recomputation.remove()
        if graph.segments:
            self._recomputation = removable_recompute(self.module, graph.named_segments)
        self._graph = graph

    def unwrap(self) -> nn.Module:
        """Return the original model."""
        model: nn.Module = self.module
        return model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model."""
        return self.module(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state of the model, under its own names."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load a state of the model."""
        return self.module.load_state_dict(state_dict, strict, assign)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Return the parameters under the names of the model."""
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Return the buffers under the names of the model."""
        return self.module.named_buffers(prefix, recurse, remove_duplicate)


class ColoTracer:
    """Traces models; see `symbolic_trace`, which returns a module with the graph."""

    def trace(
        self,
        root: nn.Module,
        concrete_args: Mapping[str, Any] | None = None,
        meta_args: Mapping[str, Any] | None = None,
    ) -> TracedGraph:
        """Return the graph of one forward of a model in its current mode.

        Args:
            root: The model. It can be on the meta device.
            concrete_args: Arguments of its forward by name that are passed unchanged, such as flags.
            meta_args: Further arguments. Only the shapes of tensors are used; they can be on the meta device.

        Raises:
            ValueError: An argument is missing, unknown or given twice, or the forward cannot be traced.
        """
        return graph_of(_untraced(root), _merged(concrete_args, meta_args))


def symbolic_trace(
    root: nn.Module,
    concrete_args: Mapping[str, Any] | None = None,
    meta_args: Mapping[str, Any] | None = None,
) -> TracedModule:
    """Return a model with the graph of one of its forwards.

    Args:
        root: The model, in the mode of its training.
        concrete_args: Arguments of its forward by name that are passed unchanged, such as flags.
        meta_args: Further arguments. Only the shapes of tensors are used; they can be on the meta device.
            With labels, a loss returned by the model is in the graph.

    Raises:
        ValueError: An argument is missing, unknown or given twice, or the forward cannot be traced.
    """
    arguments = _merged(concrete_args, meta_args)
    return TracedModule(_untraced(root), graph_of(root, arguments), arguments)


def metainfo_trace(
    gm: TracedModule, *args: Any, profile: str | Path | None = None, **kwargs: Any
) -> TracedModule:
    """Add the costs of operations, in bytes and seconds, to the graph of a module; return the module.

    Recomputation is removed.

    Args:
        gm: Result of `symbolic_trace`.
        args: Arguments of the forward. Tensors can be on the meta device. If their shapes differ from the
            traced ones, the model is traced again with these.
        profile: Profile of the machine, with the times of operations: the path of a profile or the name of a
            shipped one. Default: two CPU cores. Bytes do not depend on it.
        kwargs: Further arguments of the forward.

    Raises:
        ValueError: `gm` is not traced, or the forward does not take the arguments.
    """
    if not isinstance(gm, TracedModule):
        raise ValueError(
            f"{type(gm).__name__} is not traced: call metainfo_trace(symbolic_trace(model, meta_args=...))"
        )
    model = gm.unwrap()
    gm.graph = replace(gm.graph, segments=())  # trace the model without recomputation
    arguments = {**gm.traced_arguments, **_bound(model, args, kwargs)}
    graph = gm.graph if _are_same(arguments, gm.traced_arguments) else graph_of(model, arguments)
    gm.retrace(profiled(graph, model, profile), arguments)
    return gm


def _untraced(root: nn.Module) -> nn.Module:
    if isinstance(root, TracedModule):
        raise ValueError(
            f"this {root.graph.model} is traced already: give its arguments of other shapes to "
            "metainfo_trace, or trace gm.unwrap() again once nothing of it is recomputed"
        )
    return root


def _merged(concrete_args: Mapping[str, Any] | None, meta_args: Mapping[str, Any] | None) -> dict[str, Any]:
    for name, given in (("concrete_args", concrete_args), ("meta_args", meta_args)):
        if given is not None and not isinstance(given, Mapping):
            raise ValueError(
                f"{name} is a {type(given).__name__}: give a dict of the arguments of the forward by name"
            )
    first, second = dict(concrete_args or {}), dict(meta_args or {})
    if twice := sorted(first.keys() & second.keys()):
        raise ValueError(f"{twice[0]!r} is in concrete_args and in meta_args: give it once")
    return _without_memory({**first, **second})


def _bound(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of a forward by their names.

    Raises:
        ValueError: The forward does not take them, or takes them without names.
    """
    signature = inspect.signature(model.forward)
    try:
        bound = signature.bind_partial(*args, **kwargs).arguments
    except TypeError as error:
        raise ValueError(f"the forward of {type(model).__name__} cannot be called so: {error}") from error
    found: dict[str, Any] = {}
    for name, value in bound.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            raise ValueError(
                f"the forward of {type(model).__name__} takes *{name}: a trace needs arguments with names"
            )
        found.update(value if kind is inspect.Parameter.VAR_KEYWORD else {name: value})
    return _without_memory(found)


def _without_memory(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments with tensors of the same shapes, strides and dtypes on the meta device."""

    def shape_of(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        made = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
        return made.requires_grad_(leaf.requires_grad)

    found: dict[str, Any] = tree_map(shape_of, dict(arguments))
    return found


def _are_same(arguments: Mapping[str, Any], others: Mapping[str, Any]) -> bool:
    """Whether a trace with some arguments is also valid for others."""
    leaves, structure = tree_flatten(dict(sorted(arguments.items())))
    other_leaves, other_structure = tree_flatten(dict(sorted(others.items())))
    return structure == other_structure and all(map(_is_same, leaves, other_leaves))


def _is_same(value: Any, other: Any) -> bool:
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        return _description(value) == _description(other)
    if value is other:
        return True
    return type(value) is type(other) and isinstance(value, _PLAIN) and bool(value == other)


def _description(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad
