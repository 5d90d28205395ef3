"""Bytes that a block of code allocates, for tensors and for Python objects, and their peaks."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from types import TracebackType
from typing import Any
from unittest.mock import patch

import torch
from torch.autograd.profiler import profile


class Allocations:
    """Counts allocations of this thread for tensors on the CPU, and of the process for Python objects.

    Temporary memory of kernels counts, and so do storages without a tensor and arrays of numpy. Mapped files,
    shared memory and the memory of C libraries do not, and memory of before plays no part, freed or not. No
    page of the system is looked at: each run of a program finds the same numbers, but for a few kB.

    Attributes:
        sizes: Bytes of each allocation for a tensor, in order.
        tensors: The most bytes of tensors at a time.
        objects: The most bytes of Python objects and arrays of numpy at a time.
        left: Bytes of tensors at the end.
    """

    def __init__(self) -> None:
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
        assert not tracemalloc.is_tracing()
        for owner in (torch, torch.UntypedStorage):
            self._patches.enter_context(patch.object(owner, "from_file", self._noted(owner.from_file)))
        gc.collect()
        self._profile.__enter__()
        tracemalloc.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.objects = tracemalloc.get_traced_memory()[1]
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


def _allocations(events: Iterable[Any]) -> Iterator[tuple[int, int, int]]:
    """Yield time, address and bytes of the allocations in a tree of events; less than 0 for a free."""
    rest = list(events)
    while rest:
        event = rest.pop()
        rest += event.children
        if event.name == "[memory]":
            yield event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size
