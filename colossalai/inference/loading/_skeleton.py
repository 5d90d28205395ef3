"""Skeletons: copies of a model's modules with other tensors, or with tensors without memory.

A model for inference loses its parameters to faster parts. Their names, shapes and specs remain in a
skeleton: checkpoints are compared with it, and single parts of it get values again.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn


def twin_of(
    module: nn.Module,
    tensor_of: Callable[[Tensor], Tensor],
    *,
    instead_of: Mapping[nn.Module, nn.Module] | None = None,
) -> nn.Module:
    """Copy a module and its submodules, sharing all attributes except tensors with the original ones.

    Args:
        module: The original.
        tensor_of: Returns the replacement of a parameter or buffer; tied ones stay tied.
        instead_of: Replacements of some modules to copy.
    """
    modules: dict[nn.Module, nn.Module] = {}
    tensors: dict[int, Tensor] = {}

    def other(tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        if id(tensor) not in tensors:
            tensors[id(tensor)] = tensor_of(tensor)
        return tensors[id(tensor)]

    def copy(original: nn.Module) -> nn.Module:
        original = (instead_of or {}).get(original, original)
        if original not in modules:
            twin = modules[original] = original.__class__.__new__(original.__class__)
            twin.__dict__.update(original.__dict__)
            held = twin.__dict__
            held["_parameters"] = {name: other(param) for name, param in original._parameters.items()}
            held["_buffers"] = {name: other(buffer) for name, buffer in original._buffers.items()}
            held["_modules"] = {
                name: None if child is None else copy(child) for name, child in original._modules.items()
            }
        return modules[original]

    return copy(module)


def without_memory(tensor: Tensor) -> Tensor:
    """Return a meta tensor like another one, with its spec and ties."""
    made: Tensor = torch.empty_like(tensor.detach(), device="meta")
    if isinstance(tensor, nn.Parameter):
        made = nn.Parameter(made, requires_grad=False)
    made.__dict__.update(tensor.__dict__)
    return made
