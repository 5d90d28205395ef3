"""Sequences of layers that keep their names in the original model."""

import inspect
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from torch import nn

from colossalai.logging import get_dist_logger
from colossalai.pipeline.stages._chunks import as_model
from colossalai.pipeline.stages._partition import (
    Part,
    parameter_weights,
    partition_balanced,
    partition_uniform,
)


@dataclass(frozen=True)
class LayerStep:
    """A layer with the functions around it.

    Attributes:
        name: The name of the layer in the whole model.
        module: The layer.
        front: Functions applied to its input, in this order.
        behind: Functions applied to its output, in this order.
    """

    name: str
    module: nn.Module
    front: tuple[Callable[..., Any], ...] = ()
    behind: tuple[Callable[..., Any], ...] = ()

    def followed_by(self, function: Callable[..., Any]) -> Self:
        """Return the step with one more function on its output."""
        return replace(self, behind=(*self.behind, function))

    def run(self, values: tuple[Any, ...], data: Mapping[str, Any]) -> Any:
        """Call the functions and the layer, which gets the data that its forward has an argument for."""
        for function in self.front:
            values = _as_tuple(function(*values))
        output = self.module(*values, **_wanted(self.module, len(values), data))
        for function in self.behind:
            output = function(*_as_tuple(output))
        return output


class LayerChain(nn.Module):
    """Layers that run in sequence.

    Args:
        steps: The layers and the functions around them.
    """

    def __init__(self, steps: Sequence[LayerStep]) -> None:
        super().__init__()
        self._steps = tuple(steps)
        for step in steps:
            _graft(self, step.name, step.module)

    def forward(self, *received: Any, **data: Any) -> Any:
        """Run the layers.

        Args:
            received: The input of the first layer; a tuple from a layer is the arguments of the next one.
            data: Named data; each layer gets the entries that its forward has an argument for.
        """
        for step in self._steps:
            received = _as_tuple(step.run(received, data))
        return received[0] if len(received) == 1 else received


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _wanted(module: nn.Module, num_positional: int, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the data that the forward of a module names, beyond its first arguments."""
    if not data:
        return {}
    names = list(inspect.signature(module.forward).parameters)[num_positional:]
    return {name: data[name] for name in names if name in data}


def _graft(root: nn.Module, name: str, module: nn.Module) -> None:
    """Register a module under a dotted name, with empty modules as its parents."""
    parent, _, last = name.rpartition(".")
    for step in parent.split(".") if parent else ():
        if step not in root._modules:
            root.add_module(step, nn.Module())
        root = root.get_submodule(step)
    root.add_module(last, module)


PartitionMethod = Literal["uniform", "balanced"]


def cut_sequential(
    layers: nn.Sequential,
    *,
    num_chunks: int,
    size: int,
    rank: int,
    method: PartitionMethod = "uniform",
    verbose: bool = False,
) -> nn.Module:
    """Return the chunks of a rank, an `nn.Sequential` each; layer 5 is called "5" on every rank.

    Args:
        layers: The whole model.
        num_chunks: Number of chunks on each rank; several are returned as a `ChunkList`.
        size: Number of pipeline ranks.
        rank: The pipeline rank.
        method: "uniform" by the number of layers, or "balanced" by their parameters.
        verbose: Whether each rank logs its layers.

    Raises:
        ValueError: `layers` is not an `nn.Sequential` or has fewer layers than parts, or `method` is unknown.
    """
    if not isinstance(layers, nn.Sequential):
        raise ValueError(
            f"a {type(layers).__name__} is not an nn.Sequential: build it as one, or cut it with "
            "PipelinableContext, or by hand"
        )
    parts = parts_by(method, list(layers), num_chunks=num_chunks, size=size)[rank]
    if verbose:
        log_parts(parts, len(layers), rank=rank)
    named = list(layers._modules.items())  # not named_children(), which drops a repeated layer
    return as_model([nn.Sequential(OrderedDict(named[start:end])) for start, end in parts])


def parts_by(
    method: str, layers: Sequence[nn.Module], *, num_chunks: int, size: int
) -> list[list[tuple[int, int]]]:
    """Split layers by a named method; return the parts of each rank.

    Raises:
        ValueError: `method` is unknown, or `layers` are fewer than the parts.
    """
    if method == "uniform":
        return partition_uniform(len(layers), size, num_chunks)
    if method == "balanced":
        return partition_balanced(parameter_weights(layers), size, num_chunks)
    raise ValueError(f"the partition method is {method!r}; it must be 'uniform' or 'balanced'")


def log_parts(parts: Sequence[Part], num_layers: int, *, rank: int) -> None:
    """Log the layers of a rank."""
    held = ", ".join(f"{start}-{end - 1}" for start, end in parts)
    get_dist_logger().info(f"pipeline rank {rank} holds layers {held} of {num_layers}")
