"""Number of samples in a batch of any structure."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor


def num_samples(batch: Any) -> int:
    """Return the extent of dim 0 of the first tensor in a nested batch, 1 if there is no such tensor."""
    tensor = next((tensor for tensor in tensors_in(batch) if tensor.dim() > 0), None)
    return 1 if tensor is None else tensor.size(0)


def tensors_in(nested: Any) -> Iterator[Tensor]:
    """Yield the tensors of nested mappings, lists and tuples in their order."""
    if isinstance(nested, Tensor):
        yield nested
    elif isinstance(nested, Mapping):
        for value in nested.values():
            yield from tensors_in(value)
    elif isinstance(nested, list | tuple):
        for value in nested:
            yield from tensors_in(value)
