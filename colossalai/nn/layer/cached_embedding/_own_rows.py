"""The tables of a cache as data methods and checkpoints see them."""

import weakref
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from colossalai.context import Axis
from colossalai.nn.layer.cached_embedding._row_states import RowStates
from colossalai.tensor import RowCache, ShardingSpec, set_spec
from colossalai.tensor import RowCacheStates as States


class TableCache(Protocol):
    """The parts of a cache that are seen from outside.

    Attributes:
        param: The cache, (slots, dim).
        name: Name of the table in error messages.
        axis: The ranks that divide the tables; None for a table of one process.
        cut: The cut of the table over them; None where a rank has whole rows.
        parts: Key in a state dict, first row and number of rows of each table of this rank.
        states: States of optimizers.
    """

    name: str
    axis: Axis | None
    cut: ShardingSpec | None
    parts: tuple[tuple[str, int, int], ...]
    states: RowStates

    @property
    def param(self) -> nn.Parameter:
        """The cache."""

    def expose_table(self) -> Tensor:
        """Return all rows of this rank, with the newest values."""

    def check_readable(self) -> None:
        """Check that the rows can be used."""

    def loading(self) -> AbstractContextManager[None]:
        """Context in which the rows are overwritten."""


class OwnRows(RowCache):
    """The tables of this rank.

    Args:
        cache: Their cache; None for a copy, whose cache makes another.
    """

    def __init__(self, cache: TableCache | None = None) -> None:
        self._cache = None if cache is None else weakref.ref(cache)  # the parameter leads here

    def __reduce__(self) -> tuple[type["OwnRows"], tuple[()]]:
        return OwnRows, ()

    @property
    def name(self) -> str:
        """See the base class."""
        return self._alive().name

    @property
    def axis(self) -> Axis | None:
        """See the base class."""
        return self._alive().axis

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """See the base class."""
        self._alive().states.check(optimizer)

    def tables(self) -> dict[str, Tensor]:
        """See the base class."""
        cache = self._alive()
        weight = cache.expose_table().detach()
        if cache.cut is not None:
            set_spec(weight, cache.cut)
            return {key: weight for key, _, _ in cache.parts}
        return {key: weight[begin : begin + num_rows] for key, begin, num_rows in cache.parts}

    def check_readable(self) -> None:
        """See the base class."""
        self._alive().check_readable()

    def loading(self) -> AbstractContextManager[None]:
        """See the base class."""
        return self._alive().loading()

    def states(self, optimizer: Optimizer) -> States:
        """See the base class."""
        return self._alive().states.of_all_rows(optimizer)

    def load_states(self, optimizer: Optimizer, states: States) -> None:
        """See the base class."""
        self._alive().states.load(optimizer, states)

    def _alive(self) -> TableCache:
        cache = None if self._cache is None else self._cache()
        assert cache is not None, "the module of the parameter owns its cache"
        return cache
