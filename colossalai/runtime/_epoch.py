"""A data loader that knows when it hands out the last batch of an epoch."""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from colossalai.monitor import section
from colossalai.tensor import is_own_attribute

_NOTHING = object()
_LOADING = section("data loading")  # what the watchdog calls it


class EpochWatch(Protocol):
    """A loader that says whether the batch it handed out last is the last one of the epoch."""

    at_last_batch: bool


class WatchedLoader:
    """A loader with the batches and attributes of another one that says which batch is the last.

    Args:
        loader: Any iterable of batches.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.at_last_batch = False
        self.loader = loader  # last: see [Note: where an attribute is set]

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not set yet: pickle and copy ask before __init__ has run
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if "loader" not in self.__dict__ or is_own_attribute(self, name):
            super().__setattr__(name, value)
        else:
            setattr(self.loader, name, value)

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        for batch, is_last in with_last(self.loader, length_of(self.loader)):
            self.at_last_batch = is_last
            yield batch
        self.at_last_batch = False


def with_last(batches: Iterable[Any], length: int | None) -> Iterator[tuple[Any, bool]]:
    """Return each batch with whether it is the last one.

    It reads one batch ahead only where the length is not known: what is read ahead would draw its random
    numbers too early.
    """
    following = iter(batches)
    if length is not None:
        for number in itertools.count(1):
            with _LOADING:
                batch = next(following, _NOTHING)
            if batch is _NOTHING:
                return
            yield batch, number == length
    with _LOADING:
        current = next(following, _NOTHING)
    while current is not _NOTHING:
        with _LOADING:
            upcoming = next(following, _NOTHING)
        yield current, upcoming is _NOTHING
        current = upcoming


def length_of(loader: Iterable[Any]) -> int | None:
    """Return the number of batches of a loader, None where it does not know."""
    try:
        return len(loader)  # type: ignore[arg-type]
    except TypeError:
        return None
