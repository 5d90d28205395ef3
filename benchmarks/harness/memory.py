"""The peak of live bytes of all tensors that a block of code makes, on any device and with any allocator."""

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakBytes(TorchDispatchMode):
    """Looks after every operation, backward included, at the storages that operations in the block returned.

    The peak is exact to the byte and the same in every run. Not in it: memory that a kernel takes and gives
    back within one operation, and what there was before the block.

    Attributes:
        peak: The most bytes that were alive after an operation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._sizes: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and look."""
        inputs = {StorageWeakRef(tensor.untyped_storage()) for tensor in _tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            ref = StorageWeakRef(storage)
            if ref not in inputs:  # a view is no new memory, nor is a result in place
                self._sizes[ref] = storage.nbytes()
        self._sizes = {ref: size for ref, size in self._sizes.items() if not ref.expired()}
        self.peak = max(self.peak, sum(self._sizes.values()))
        return result


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
