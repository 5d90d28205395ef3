"""Count the memory that a forward keeps for its backward."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


class SavedBytes:
    """The bytes of all storages that autograd has saved, each counted once.

    Args:
        except_of: Tensors whose storages do not count: parameters are held anyhow.
    """

    def __init__(self, except_of: Iterable[torch.Tensor]) -> None:
        self.num_bytes = 0
        self._seen = {storage.data_ptr() for tensor in except_of for storage in _storages(tensor)}

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count a tensor that is being saved, and return it."""
        for storage in _storages(tensor):
            if storage.data_ptr() not in self._seen:
                self._seen.add(storage.data_ptr())
                self.num_bytes += storage.nbytes()
        return tensor


@contextmanager
def saved_bytes(except_of: Iterable[torch.Tensor]) -> Iterator[SavedBytes]:
    """Count what the forward within the block saves; run the backward after it."""
    count = SavedBytes(except_of)
    with torch.autograd.graph.saved_tensors_hooks(count.add, lambda tensor: tensor):
        yield count


def _storages(tensor: torch.Tensor) -> Iterator[torch.UntypedStorage]:
    """Yield the storages of a tensor; a DTensor and its like are made of others."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        for part in (getattr(tensor, name) for name in names):
            if isinstance(part, torch.Tensor):  # a DTensor names its mesh, too
                yield from _storages(part)
    else:
        yield tensor.untyped_storage()
