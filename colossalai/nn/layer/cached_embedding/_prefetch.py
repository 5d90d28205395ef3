"""Prefetch: rows of the next batches of a loader come while a batch computes.

[Note: prefetch]
A loader is read `depth` batches ahead. While batch k computes, a thread chooses the rows that leave for batch
k + 1, and reads its missing rows into memory ([Note: moves on a thread]). The main thread puts them into the
cache when the loop takes batch k + 1, after the step of batch k: the thread never changes the cache or its
states. Rows of batch k can leave then, if no batch of the window needs them.

A loader of a plugin counts the batches that it has returned, for checkpoints, for the last window of an
accumulation and for results that are gathered. Its counts are those of the batch that the loop has, except
while it is read.

A plan is dropped if rows have moved since it was made, as in an evaluation, or if the table was changed; the
leaving rows are chosen again if batch k still waits for its step. A lookup reads the rows that are missing as
without prefetch.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from itertools import zip_longest
from threading import get_ident
from typing import Any, Generic, Protocol, TypeVar

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

    Attributes:
        thread: Identity of the thread that takes the batches.
    """

    def __init__(self, cache: CachedParamMgr, depth: int) -> None:
        self.thread = get_ident()
        self._cache, self._depth = cache, depth
        self._next: deque[KnownBatch] = deque()
        self._current: KnownBatch | None = None
        self._planned: Future[PlannedMove | None] | None = None

    @property
    def batches(self) -> list[KnownBatch]:
        """The batches, the nearest first."""
        return [*([] if self._current is None else [self._current]), *self._later(0)]

    def add(self, ids: Tensor) -> None:
        """Add the last batch, of ids that nothing changes."""
        added = KnownBatch(ids)
        added.is_in_range = self._cache.are_in_range(added.ids)
        self._next.append(added)

    def advance(self) -> None:
        """Move the rows of the next batch into the cache, and plan for the one after it."""
        self.thread = get_ident()
        current, planned, self._planned = self._next.popleft(), self._planned, None
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


class SharedIds(Protocol):
    """Ids of batches whose parts are on several ranks."""

    def collect(self, ids: Tensor | None, failure: Exception | None) -> Sequence[Tensor]:
        """Return the ids of all parts of a batch, for each cache of this rank; collective."""


class BatchIds:
    """Ids of the batches of a loader, for the windows of a module.

    Args:
        caches: The caches of the module.
        depth: Number of batches that are known ahead.
        ids_of: Function that returns the ids of a batch; None if a batch is its ids.
        shared: The ids of all ranks; None if a batch has those of this rank, of one cache.
    """

    def __init__(
        self, caches: Sequence[CachedParamMgr], depth: int, ids_of: IdsOf | None, shared: SharedIds | None
    ) -> None:
        self._windows = [Window(cache, depth) for cache in caches]
        self._ids_of, self._shared = ids_of, shared
        self._name = caches[0].name
        self._next: deque[Tensor] = deque()

    def read(self, batch: Any) -> Tensor:
        """Return a copy of the ids of a batch: a loader may fill its tensors again.

        Raises:
            TypeError: The ids are not tensors of integers.
        """
        return flat_ids(batch, self._ids_of).clone()

    def add(self, ids: Tensor | None, failure: Exception | None = None) -> None:
        """Add the last batch.

        Args:
            ids: The result of `read`; None at the end of the loader.
            failure: The error in the place of the batch.

        Raises:
            RuntimeError: Another rank has failed, or some ranks have a batch and others have not.
        """
        by_cache: Sequence[Tensor] = [] if ids is None else [ids]
        if self._shared is not None:
            by_cache = self._shared.collect(ids, failure)
        if ids is not None:
            self._next.append(ids)
            for window, each in zip(self._windows, by_cache, strict=True):
                window.add(each)

    def advance(self, batch: Any) -> None:
        """Move the rows of the next batch into the caches, and plan for the one after it.

        Args:
            batch: The next batch.

        Raises:
            RuntimeError: The ids have changed since `add`.
        """
        if not torch.equal(flat_ids(batch, self._ids_of), self._next.popleft()):
            raise RuntimeError(
                f"ids of {self._name} have changed since their batch was read: prefetch reads a loader "
                "ahead, which must return new tensors for each batch"
            )
        for window in self._windows:
            window.advance()

    def close(self) -> None:
        """Forget all batches."""
        self._next.clear()
        for window in self._windows:
            window.close()


class _ReadAhead(Generic[Batch]):
    """Batches of a loader that were read ahead.

    Args:
        loader: The loader.
    """

    def __init__(self, loader: Iterable[Batch]) -> None:
        self._loader = loader
        self._source: Iterator[Batch] | None = None
        self._position: Any = None  # of the loader after the last read
        self._positions: deque[Any] = deque()  # after the read of each batch that waits
        self.waiting: deque[Batch] = deque()
        self.is_over = False
        self.failure: Exception | None = None

    def read(self, number: int, modules: Sequence[BatchIds]) -> None:
        """Read until a number of batches wait; an error is kept until they have been used."""
        self._set(self._position)
        while not self.is_over and self.failure is None and len(self.waiting) < number:
            ids: list[Tensor] = []
            try:
                if self._source is None:
                    self._source = iter(self._loader)
                batch = next(self._source)
            except StopIteration:
                self.is_over = True
            except Exception as error:
                self.failure = error
            else:
                ids = self._read_ids(batch, modules)
            self.add(ids, modules)
            if self.failure is None and not self.is_over:
                self.waiting.append(batch)
                self._positions.append(getattr(self._loader, "read_position", None))
        self._position = getattr(self._loader, "read_position", None)

    def pop(self) -> Batch:
        """Return the first batch that waits; the loader has the position of its read."""
        self._set(self._positions.popleft())
        return self.waiting.popleft()

    def _set(self, position: Any) -> None:
        if position is not None:
            self._loader.read_position = position  # type: ignore[attr-defined]

    def raise_failure(self) -> None:
        """Raise the error that was kept, once: an iterator can go on after it."""
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure

    def _read_ids(self, batch: Batch, modules: Sequence[BatchIds]) -> list[Tensor]:
        # Not where `next` is tried: a StopIteration of the user's `ids` is an error, and no end.
        try:
            return [module.read(batch) for module in modules]
        except Exception as error:
            self.failure = error
            return []

    def add(self, ids: Sequence[Tensor], modules: Sequence[BatchIds]) -> None:
        """Add a batch to each module, or its end or failure, of which those of other ranks have to know.

        Args:
            ids: The ids of each module; none at the end, and after a failure.
            modules: The modules.
        """
        for module, own in zip_longest(modules, ids):
            try:
                module.add(own, self.failure)
            except Exception as error:
                self.failure = error


def prefetch(
    loader: Iterable[Batch],
    caches: Sequence[CachedParamMgr],
    depth: int,
    ids: IdsOf | None,
    shared: SharedIds | None = None,
) -> "PrefetchLoader[Batch]":
    """Return a loader of the same batches, whose rows come while the batch before them computes.

    Args:
        loader: Batches, or a loader of this function.
        caches: The caches of a module.
        depth: Number of batches that are known ahead; 0 for none.
        ids: Function that returns the ids of a batch, a tensor or several. Default: a batch is its ids.
        shared: The ids of all ranks, if a batch has a part of them.

    Raises:
        ValueError: `depth` is not a number of batches.
        TypeError: `loader` cannot be iterated, or `ids` not be called.
    """
    if not isinstance(depth, int) or depth < 0:
        raise ValueError(f"depth is {depth!r}; it must be a number of batches, or 0 for none")
    check_ids_of(ids)
    if not (hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")):  # as `iter` takes it
        raise TypeError(f"prefetch takes a loader of batches, and {type(loader).__name__} cannot be iterated")
    make = partial(BatchIds, caches, depth, ids, shared)
    if isinstance(loader, PrefetchLoader):
        return loader.with_module(depth, make)
    return PrefetchLoader(loader, [(depth, make)])


class PrefetchLoader(Generic[Batch]):
    """The batches of a loader, whose rows are in a cache when they come; see `CachedTable.prefetch`.

    It has the attributes of the loader. Batches of an iterator that were read ahead when a loop ends are the
    first ones of the next loop.

    Args:
        loader: The loader.
        modules: Functions that make the ids of a module's batches, with the number that is known ahead.
    """

    def __init__(
        self, loader: Iterable[Batch], modules: Sequence[tuple[int, Callable[[], BatchIds]]]
    ) -> None:
        self._loader, self._modules = loader, modules
        self._left: _ReadAhead[Batch] | None = None  # after a loop over an iterator

    def with_module(self, depth: int, make: Callable[[], BatchIds]) -> "PrefetchLoader[Batch]":
        """Return a loader that prefetches for another module, too."""
        return PrefetchLoader(self._loader, [*self._modules, (depth, make)])

    def __iter__(self) -> Iterator[Batch]:
        depth = max(depth for depth, _ in self._modules)
        modules = [make() for _, make in self._modules]
        ahead = self._left or _ReadAhead(self._loader)
        is_left_over = ahead.is_over
        self._left = ahead if isinstance(self._loader, Iterator) else None
        with ExitStack() as stack:
            for module in modules:
                stack.callback(module.close)
                for batch in ahead.waiting:
                    module.add(module.read(batch))
            if is_left_over:  # an iterator of another rank may go on
                ahead.add([], modules)
            while True:
                ahead.read(depth + 1, modules)
                if not ahead.waiting:
                    break
                for module in modules:  # the batch waits on: after an error it is the first of the next loop
                    module.advance(ahead.waiting[0])
                yield ahead.pop()
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
