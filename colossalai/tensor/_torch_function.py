"""Functions of torch that tensor subclasses of the package handle without reading values.

Functions of torch dispatch on the class of their arguments (`__torch_function__`). Functions that read no
values are called on the underlying tensor.

[Note: calls of autograd]
`torch.autograd.grad(outputs, inputs)` dispatches on the class too, which has to forward the call. It cannot
forward it with `__torch_function__` disabled, since a recomputation in the backward calls functions with
parameters. So it passes graph edges in place of inputs, and plain views in place of outputs.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

_PROPERTIES = """
    shape dtype device ndim layout itemsize nbytes names name grad_fn output_nr retains_grad _version _base
"""
_PROPERTIES_TO_SET = "requires_grad grad grad_dtype _backward_hooks _post_accumulate_grad_hooks"
_METHODS = """
    size dim ndimension numel nelement stride storage_offset element_size get_device dim_order requires_grad_
    register_hook register_post_accumulate_grad_hook retain_grad __hash__ __len__ untyped_storage data_ptr
    new_empty new_zeros new_ones new_full new_tensor
"""
_IS = " ".join(name for name in dir(torch.Tensor) if name.startswith("is_") and name != "is_set_to")


def _named(names: str) -> Iterator[Any]:
    """Yield the members of a tensor of some names, as far as this torch has them."""
    return (getattr(torch.Tensor, name) for name in names.split() if hasattr(torch.Tensor, name))


ASKING_NO_VALUES: frozenset[Any] = frozenset(
    [
        *(
            one.__get__
            for one in _named(f"{_PROPERTIES} {_PROPERTIES_TO_SET} {_IS}")
            if hasattr(one, "__set__")
        ),
        *(one.__set__ for one in _named(_PROPERTIES_TO_SET)),
        *(one.__delete__ for one in _named("grad")),
        *(one for one in _named(f"{_METHODS} {_IS}") if not hasattr(one, "__set__")),
        *(torch.is_floating_point, torch.is_complex, torch.is_tensor, torch.numel),
    ]
)
"""Functions that read no values."""

OF_AUTOGRAD = frozenset([torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad])
"""Functions whose arguments go through `with_gradient_edges`."""


def with_gradient_edges(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of `torch.autograd.grad`, `.backward` or `Tensor.backward` in classes of torch.

    Args:
        func: One of these; see [Note: calls of autograd].
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
