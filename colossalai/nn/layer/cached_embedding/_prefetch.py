"""Prefetch: rows of the next batches of a loader come while a batch computes.

[Note: prefetch]
A loader is read `depth` batches ahead. While batch k computes, a thread chooses the rows that leave for batch
k + 1, and reads its missing rows into memory ([Note: moves on a thread]). The main thread puts them into the
cache when the loop takes batch k + 1, after the step of batch k: the thread never changes the cache or its
states. Rows of batch k can leave then, if no batch of the window needs them.

A plan is dropped if rows have moved since it was made, as in an evaluation, or if the table was changed; the
leaving rows are chosen again if batch k still waits for its step. A lookup reads the rows that are missing as
without prefetch.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from threading import get_ident
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from colossalai.nn.layer.cached_embedding._param_mgr import CachedParamMgr
from colossalai.nn.layer.cached_embedding._row_moves import PlannedMove
from colossalai.nn.layer.cached_embedding._slots import KnownBatch

Batch = TypeVar("Batch")
IdsOf = Callable[[Any], Tensor | Sequence[Tensor]]


def check_ids_of(ids: object) -> None:
    """Check the function that returns the ids of a batch.

    Raises:
        TypeError: `ids` is not None and cannot be called.
    """
    if ids is not None and not callable(ids):
        raise TypeError(f"ids is {ids!r}; it must be a function of a batch, as lambda batch: batch[0]")


def flat_ids(batch: Any, ids_of: IdsOf | None) -> Tensor:
    """Return the ids of a batch of a loader as one tensor, int64 in host memory.

    Args:
        batch: The batch.
        ids_of: Function that returns its ids; None if it is its ids.

    Raises:
        TypeError: The ids are not tensors of integers.
    """
    found = batch if ids_of is None else ids_of(batch)
    tensors = [found] if isinstance(found, Tensor) or ids_of is None else found
    if not isinstance(tensors, list | tuple) or not all(isinstance(each, Tensor) for each in tensors):
        raise TypeError(
            f"prefetch found {type(found).__name__} for the ids of a batch: give ids, a function that "
            "returns a tensor or a list of them, as ids=lambda batch: batch[0]"
        )
    flat = [each.detach().flatten().cpu() for each in tensors]
    for each in flat:
        if each.dtype not in (torch.int64, torch.int32):
            raise TypeError(
                f"prefetch found ids of type {each.dtype}, which must be torch.int64 or int32: check ids"
            )
    return flat[0].long() if len(flat) == 1 else torch.cat([_NO_IDS, *(each.long() for each in flat)])


class Window:
    """Rows of the current batch of a loop and of the next ones.

    Args:
        cache: The cache of the rows.
        depth: Number of the next ones.
        ids_of: Function that returns the ids of a batch; None if a batch is its ids.

    Attributes:
        thread: Identity of the thread that takes the batches.
    """

    def __init__(self, cache: CachedParamMgr, depth: int, ids_of: IdsOf | None) -> None:
        self.thread = get_ident()
        self._cache, self._depth, self._ids_of = cache, depth, ids_of
        self._next: deque[KnownBatch] = deque()
        self._current: KnownBatch | None = None
        self._planned: Future[PlannedMove | None] | None = None

    @property
    def batches(self) -> list[KnownBatch]:
        """The batches, the nearest first."""
        return [*([] if self._current is None else [self._current]), *self._later(0)]

    def add(self, batch: Any) -> None:
        """Add the last batch.

        Raises:
            TypeError: The ids are not tensors of integers.
        """
        # A copy: a loader may fill its tensors again.
        added = KnownBatch(self._ids(batch).clone())
        added.is_in_range = self._cache.are_in_range(added.ids)
        self._next.append(added)

    def advance(self, batch: Any) -> None:
        """Move the rows of the next batch into the cache, and plan for the one after it.

        Args:
            batch: The next batch.

        Raises:
            RuntimeError: The ids have changed since `add`.
        """
        self.thread = get_ident()
        current, planned, self._planned = self._next.popleft(), self._planned, None
        if not torch.equal(self._ids(batch), current.ids):
            raise RuntimeError(
                f"ids of {self._cache.name} have changed since their batch was read: prefetch reads a loader "
                "ahead, which must return new tensors for each batch"
            )
        self._current, self._cache.window = (current if current.is_in_range else None), self
        self._cache.enter(self._current, planned, later=self._later(0))
        if self._next and self._next[0].is_in_range:
            self._planned = self._cache.plan_ahead(self._next[0], later=self._later(1))

    def close(self) -> None:
        """Forget all batches."""
        self._next.clear()
        self._current = self._planned = None
        self._cache.close_window(self)

    def _later(self, begin: int) -> list[KnownBatch]:
        return [each for each in [*self._next][begin : self._depth] if each.is_in_range]

    def _ids(self, batch: Any) -> Tensor:
        return flat_ids(batch, self._ids_of)


class _ReadAhead(Generic[Batch]):
    """Batches of a loader that were read ahead.

    Args:
        loader: The loader.
    """

    def __init__(self, loader: Iterable[Batch]) -> None:
        self._source = iter(loader)
        self.waiting: deque[Batch] = deque()
        self.is_over = False
        self.failure: Exception | None = None

    def read(self, number: int, windows: Sequence[Window]) -> None:
        """Read until a number of batches wait; an error is kept until they have been used."""
        while not self.is_over and self.failure is None and len(self.waiting) < number:
            try:
                batch = next(self._source)
            except StopIteration:
                self.is_over = True
            except Exception as error:
                self.failure = error
            else:
                self._add(batch, windows)

    def raise_failure(self) -> None:
        """Raise the error that was kept, once: an iterator can go on after it."""
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure

    def _add(self, batch: Batch, windows: Sequence[Window]) -> None:
        # Not where `next` is tried: a StopIteration of the user's `ids` is an error, and no end.
        try:
            for window in windows:
                window.add(batch)
        except Exception as error:
            self.failure = error
        else:
            self.waiting.append(batch)


class PrefetchLoader(Generic[Batch]):
    """The batches of a loader, whose rows are in a cache when they come; see `CachedTable.prefetch`.

    It has the attributes of the loader. Batches of an iterator that were read ahead when a loop ends are the
    first ones of the next loop.

    Args:
        loader: The loader.
        windows: Functions that make a window, with its depth.
    """

    def __init__(self, loader: Iterable[Batch], windows: Sequence[tuple[int, Callable[[], Window]]]) -> None:
        self._loader, self._windows = loader, windows
        self._left: _ReadAhead[Batch] | None = None  # after a loop over an iterator

    def with_table(self, depth: int, make: Callable[[], Window]) -> "PrefetchLoader[Batch]":
        """Return a loader that prefetches for another table, too."""
        return PrefetchLoader(self._loader, [*self._windows, (depth, make)])

    def __iter__(self) -> Iterator[Batch]:
        depth = max(depth for depth, _ in self._windows)
        windows = [make() for _, make in self._windows]
        ahead = self._left or _ReadAhead(self._loader)
        self._left = ahead if isinstance(self._loader, Iterator) else None
        with ExitStack() as stack:
            for window in windows:
                stack.callback(window.close)
                for batch in ahead.waiting:
                    window.add(batch)
            while True:
                ahead.read(depth + 1, windows)
                if not ahead.waiting:
                    break
                for window in windows:  # the batch waits on: after an error it is the first of the next loop
                    window.advance(ahead.waiting[0])
                yield ahead.waiting.popleft()
            ahead.raise_failure()

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        return bool(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # before `__init__`, as in a copy
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            super().__setattr__(name, value)
        else:
            setattr(self._loader, name, value)


_NO_IDS = torch.empty(0, dtype=torch.int64, device="cpu")
