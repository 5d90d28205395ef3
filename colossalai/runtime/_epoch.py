"""Data loaders that mark the last batch of an epoch."""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from colossalai.monitor import section
from colossalai.tensor import is_own_attribute

_NOTHING = object()
_LOADING = section("data loading")  # its name in reports of the watchdog


class EpochWatch(Protocol):
    """A loader that marks whether the last returned batch is the last one of the epoch."""

    at_last_batch: bool


class WatchedLoader:
    """A loader with the batches and attributes of another one, which marks the last batch.

    Args:
        loader: Any iterable of batches.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.at_last_batch = False
        self.loader = loader  # last: see [Note: attributes of a wrapper]

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not set yet: pickle and copy read attributes before __init__ has run
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if "loader" not in self.__dict__ or is_own_attribute(self, name):
            super().__setattr__(name, value)
        else:
            setattr(self.loader, name, value)

    @property
    def read_position(self) -> Any:
        """Whether a batch is the last one, and the position of the loader; see `DataParallelLoader`."""
        return self.at_last_batch, getattr(self.loader, "read_position", None)

    @read_position.setter
    def read_position(self, value: Any) -> None:
        self.at_last_batch, position = value
        if position is not None:
            self.loader.read_position = position  # type: ignore[attr-defined]

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        for batch, is_last in with_last(self.loader, length_of(self.loader)):
            self.at_last_batch = is_last
            yield batch
        self.at_last_batch = False


def with_last(batches: Iterable[Any], length: int | None) -> Iterator[tuple[Any, bool]]:
    """Yield each batch, and whether it is the last one.

    It reads one batch ahead only if the length is not known: reading ahead draws random numbers too early.
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
    """Return the number of batches of a loader, or None."""
    try:
        return len(loader)  # type: ignore[arg-type]
    except TypeError:
        return None
