"""The peak of live bytes of the tensors that a block of code makes."""

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Looks after every operation at the storages that operations within the block returned.

    Memory that a kernel takes and gives back within one operation is not seen.

    Args:
        outside: Tensors of before, which do not count.
    """

    def __init__(self, *outside: torch.Tensor) -> None:
        super().__init__()
        self.peak = 0
        self._outside = {StorageWeakRef(tensor.untyped_storage()) for tensor in outside}
        self._sizes: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and look."""
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if (ref := StorageWeakRef(storage)) not in self._outside:
                    self._sizes[ref] = storage.nbytes()
        self._sizes = {ref: size for ref, size in self._sizes.items() if not ref.expired()}
        self.peak = max(self.peak, sum(self._sizes.values()))
        return result
