"""Bytes that a block of code allocates, for tensors and for Python objects, and their peaks.

`Allocations` counts all of one process, by torch's profiler. On ranks `RankAllocations` counts the results of
operations: threads of gloo inherit the profiler, report to one that has ended, and crash.
"""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from types import TracebackType
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.autograd.profiler import profile
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocations:
    """Counts allocations of this thread for tensors on the CPU, and of the process for Python objects.

    Temporary memory of kernels counts, and so do storages without a tensor and arrays of numpy. Mapped files,
    shared memory and the memory of C libraries do not, and memory of before plays no part, freed or not. No
    page of the system is looked at: each run of a program finds the same numbers, but for a few kB.

    Args:
        with_objects: Whether to count Python objects, which slows Python down to a third.

    Attributes:
        sizes: Bytes of each allocation for a tensor, in order.
        tensors: The most bytes of tensors at a time.
        objects: The most bytes of Python objects and arrays of numpy at a time.
        left: Bytes of tensors at the end.
    """

    def __init__(self, *, with_objects: bool = True) -> None:
        self._with_objects = with_objects
        self.sizes: list[int] = []
        self.tensors = self.objects = self.left = 0
        self._mapped: set[int] = set()
        self._profile = profile(profile_memory=True)
        self._patches = ExitStack()

    @property
    def peak(self) -> int:
        """The most bytes at a time, or more, as the two kinds can have their peaks one after the other."""
        return self.tensors + self.objects

    def __enter__(self) -> Allocations:
        assert not dist.is_initialized()
        assert not tracemalloc.is_tracing(), "a test before counted with RankAllocations, outside of ranks"
        for owner in (torch, torch.UntypedStorage):
            self._patches.enter_context(patch.object(owner, "from_file", self._noted(owner.from_file)))
        gc.collect(1)  # collections in the block come after the same allocations; one of all objects is slow
        self._profile.__enter__()
        if self._with_objects:
            tracemalloc.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.objects = tracemalloc.get_traced_memory()[1]  # 0 if it has not been started
        tracemalloc.stop()
        self._profile.__exit__(kind, error, trace)
        self._patches.close()
        results = self._profile.kineto_results
        assert results is not None
        found = _allocations(results.experimental_event_tree())
        alive: dict[int, int] = {}
        for _, address, size in sorted(found, key=lambda each: each[0]):
            if address in self._mapped:
                continue
            if size > 0:
                self.sizes.append(size)
                alive[address] = size
                self.left += size
                self.tensors = max(self.tensors, self.left)
            else:
                self.left -= alive.pop(address, 0)

    def _noted(self, from_file: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that maps a file, and notes its address."""

        def note(*args: Any, **options: Any) -> Any:
            mapped = from_file(*args, **options)
            self._mapped.add(mapped.data_ptr())
            return mapped

        return note


class RankAllocations(TorchDispatchMode):
    """Counts bytes of the storages that operations of torch return on a rank, and of Python objects.

    Mapped files and shared memory do not count, nor does memory of kernels within one operation.

    Args:
        outside: Tensors of before, which do not count.

    Attributes:
        tensors: The most bytes of tensors at a time.
        objects: The most bytes of Python objects and arrays of numpy at a time.
    """

    def __init__(self, outside: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.tensors = self.objects = 0
        self._outside = {StorageWeakRef(_local(tensor).untyped_storage()) for tensor in outside}
        self._sizes: dict[StorageWeakRef, int] = {}

    @property
    def mb(self) -> float:
        """The most at a time in MB, or more, as the two kinds can have their peaks one after the other."""
        return (self.tensors + self.objects) / 1024 / 1024

    def __enter__(self) -> RankAllocations:
        super().__enter__()
        torch.zeros(2)[:1].clone()  # torch imports modules at the first operation of a mode
        # Never stopped: a thread of gloo that allocates at that time writes to freed tables, in Python before
        # 3.12.9 (https://github.com/python/cpython/issues/128679).
        if tracemalloc.is_tracing():
            tracemalloc.clear_traces()
        else:
            tracemalloc.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self.objects = tracemalloc.get_traced_memory()[1]
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and count."""
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = _local(tensor).untyped_storage()
                ref = StorageWeakRef(storage)
                if ref not in self._sizes and not _is_allocated(storage):
                    self._outside.add(ref)
                if ref not in self._outside:
                    self._sizes[ref] = storage.nbytes()
        self._sizes = {ref: size for ref, size in self._sizes.items() if not ref.expired()}
        self._outside = {ref for ref in self._outside if not ref.expired()}
        self.tensors = max(self.tensors, sum(self._sizes.values()))
        return result


def _allocations(events: Iterable[Any]) -> Iterator[tuple[int, int, int]]:
    """Yield time, address and bytes of the allocations in a tree of events; less than 0 for a free."""
    rest = list(events)
    while rest:
        event = rest.pop()
        rest += event.children
        if event.name == "[memory]":
            yield event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the shard of a `DTensor`, or the tensor."""
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


def _is_allocated(storage: torch.UntypedStorage) -> bool:
    """Return whether a storage has memory other than that of a mapped file or of shared memory."""
    address = storage.data_ptr()
    with open("/proc/self/maps") as lines:
        for line in lines:
            begin, end = (int(place, 16) for place in line.split(maxsplit=1)[0].split("-"))
            if begin <= address < end:
                return "/" not in line
    return False
