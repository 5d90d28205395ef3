"""Layers that run one after the other, under the names that they have in the model they are taken from."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from torch import nn


@dataclass(frozen=True)
class Step:
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
        """Return the same step with one more function behind."""
        return replace(self, behind=(*self.behind, function))

    def run(self, values: tuple[Any, ...], data: Mapping[str, Any]) -> Any:
        """Call all of it; of the data the layer gets what its forward has a name for."""
        for function in self.front:
            values = _as_tuple(function(*values))
        output = self.module(*values, **_wanted(self.module, len(values), data))
        for function in self.behind:
            output = function(*_as_tuple(output))
        return output


class LayerChain(nn.Module):
    """Layers that run one after the other.

    Args:
        steps: The layers and the functions around them.
    """

    def __init__(self, steps: Sequence[Step]) -> None:
        super().__init__()
        self._steps = tuple(steps)
        for step in steps:
            _graft(self, step.name, step.module)

    def forward(self, *received: Any, **data: Any) -> Any:
        """Run the layers.

        Args:
            received: The input of the first layer; a tuple that a layer returns is the next one's arguments.
            data: Named data; each layer gets what its forward has an argument for.
        """
        for step in self._steps:
            received = _as_tuple(step.run(received, data))
        return received[0] if len(received) == 1 else received


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _wanted(module: nn.Module, num_positional: int, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the data that the forward of a module has names for, beyond its first arguments."""
    if not data:
        return {}
    names = list(inspect.signature(module.forward).parameters)[num_positional:]
    return {name: data[name] for name in names if name in data}


def _graft(root: nn.Module, name: str, module: nn.Module) -> None:
    """Register a module under a dotted name, with empty modules on the way."""
    parent, _, last = name.rpartition(".")
    for step in parent.split(".") if parent else ():
        if step not in root._modules:
            root.add_module(step, nn.Module())
        root = root.get_submodule(step)
    root.add_module(last, module)
