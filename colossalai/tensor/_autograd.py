"""Calls of autograd with parameters of classes of our own.

Such a class is asked before `torch.autograd.grad(outputs, inputs)` runs, and has to hand the call on. It
cannot do so with its answers switched off: a backward recomputes, and there functions get parameters, too. So
it hands on edges of the graph in the place of inputs, and plain views in the place of outputs.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge


def with_gradient_edges(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of `torch.autograd.grad`, `.backward` or `Tensor.backward` in classes of torch.

    Args:
        func: One of the three.
        args: As they were given.
        kwargs: Likewise.
    """
    names = {
        torch.autograd.grad: ("outputs", "inputs", "grad_outputs"),
        torch.autograd.backward: (
            *("tensors", "grad_tensors", "retain_graph", "create_graph", "grad_variables", "inputs"),
        ),
        torch.Tensor.backward: ("self", "gradient", "retain_graph", "create_graph", "inputs"),
    }[func]
    with torch._C.DisableTorchFunctionSubclass():
        changed = [
            _edges(value) if name == "inputs" else _plain(value)
            for name, value in zip(names, args, strict=False)
        ]
        return (*changed, *args[len(changed) :]), {
            name: _edges(value) if name == "inputs" else _plain(value) for name, value in kwargs.items()
        }


def _edges(inputs: Any) -> Any:
    if isinstance(inputs, torch.Tensor):
        is_own = type(inputs) not in (torch.Tensor, torch.nn.Parameter)
        return get_gradient_edge(inputs) if is_own and inputs.requires_grad else inputs
    return None if inputs is None else [_edges(each) for each in inputs]


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value if type(value) in (torch.Tensor, torch.nn.Parameter) else value.view_as(value)
    if isinstance(value, list | tuple):
        return type(value)(map(_plain, value))
    return value
