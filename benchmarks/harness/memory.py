"""Peak of live tensor bytes within a block of code, for any device and allocator."""

from collections.abc import Iterator
from typing import Any, Self

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves


class PeakBytes(TorchDispatchMode):
    """Peak of live bytes of the storages that operations in the block return, backward included.

    The bytes are counted after every operation, so the peak is exact and the same in every run. A storage
    counts with its current size, as FSDP resizes those of gathered parameters to zero, and a DTensor with its
    local part. Not included: memory that a kernel allocates and frees within one operation, memory from
    before the block, and tensors on the meta device.

    Attributes:
        peak: Largest number of live bytes after an operation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._refs: set[StorageWeakRef] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and update the peak."""
        inputs = {StorageWeakRef(tensor.untyped_storage()) for tensor in _tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            ref = StorageWeakRef(storage)
            # Views and in-place results do not allocate memory.
            if ref not in inputs and storage.device.type != "meta":
                self._refs.add(ref)
        self.peak = max(self.peak, self.live())
        return result

    def live(self) -> int:
        """Return the number of live bytes."""
        self._refs = {ref for ref in self._refs if not ref.expired()}
        storages = map(torch.UntypedStorage._new_with_weak_ptr, (ref.cdata for ref in self._refs))
        return sum(storage.nbytes() for storage in storages if storage is not None)


class AllocatedPeak:
    """Peak allocation of torch's CPU allocator within the block, compiled code and kernels included.

    Attributes:
        rise: Largest number of bytes allocated since the begin of the block; available after the block.
    """

    def __init__(self) -> None:
        self.rise = 0
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)

    def __enter__(self) -> Self:
        self._profile.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._profile.__exit__(*error)  # type: ignore[arg-type]  # as of any context
        results = self._profile.profiler.kineto_results
        changes = [each for each in results.events() if each.name() == "[memory]"]
        now = 0
        for each in sorted(changes, key=lambda each: each.start_ns()):
            now += each.nbytes()  # negative for freed memory
            self.rise = max(self.rise, now)


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a value that own memory: for subclasses such as DTensor, their inner tensors."""
    for leaf in tree_leaves(tree):
        if is_traceable_wrapper_subclass(leaf):
            names, _ = leaf.__tensor_flatten__()
            yield from _tensors([getattr(leaf, name) for name in names])
        elif isinstance(leaf, torch.Tensor):
            yield leaf
