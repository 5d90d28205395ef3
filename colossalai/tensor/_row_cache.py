"""Parameters that cache rows of tables.

[Note: caches of rows]
A cached embedding trains a parameter, (slots, dim), with those rows of its tables that are in use. The layer
exchanges outputs between ranks, so a gradient is complete on the rank that holds the row. Other ranks have
other rows in the slots, and other numbers of slots. So

- data methods are applied without such parameters, as if the model had none (`without_row_caches`),
- a norm adds them over the ranks that divide the tables (`by_sharding_groups`),
- no precision casts them; the module casts its outputs (`set_output_dtype`),
- a checkpoint has tables, with the states of all rows, in their places (`tables_for_caches`).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from colossalai.context import Axis
from colossalai.tensor._attributes import CACHED_TABLE, ROW_CACHE
from colossalai.tensor._full_precision import FullPrecisionTensor, source_of

RowCacheStates = dict[str, Any]
"""States of an optimizer for all rows of a cache: tensors, (rows, ...), and numbers."""


class RowCache(ABC):
    """The tables whose rows a parameter caches; see [Note: caches of rows]."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Name of the tables in error messages."""

    @property
    @abstractmethod
    def axis(self) -> Axis | None:
        """The ranks that divide the tables; None for a table of one process."""

    @abstractmethod
    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Check that an optimizer, if it holds the parameter, changes rows separately.

        Raises:
            ValueError: `optimizer` does not.
        """

    @abstractmethod
    def tables(self) -> dict[str, Tensor]:
        """Return the tables of this rank, in host memory or files, by their keys in the module.

        They have the newest values, and can be written to in `loading`. Those that are cut carry their spec.
        They are the rows of `states` in this order.
        """

    @abstractmethod
    def check_readable(self) -> None:
        """Check that the tables can be saved.

        Raises:
            RuntimeError: A table in a file has rows of different steps.
        """

    @abstractmethod
    def loading(self) -> AbstractContextManager[None]:
        """Context in which the result of `tables` is overwritten; after an error a file is unfinished."""

    @abstractmethod
    def states(self, optimizer: Optimizer) -> RowCacheStates:
        """Return the states of all rows in an optimizer: (rows, ...), and numbers."""

    @abstractmethod
    def load_states(self, optimizer: Optimizer, states: RowCacheStates) -> None:
        """Replace the states of all rows in an optimizer.

        Args:
            optimizer: The optimizer.
            states: The states, as from `states`; empty for none.
        """


class RowCacheModule(nn.Module):
    """Base of the modules whose parameters, or those of their children, cache rows of tables.

    Attributes:
        output_dtype: Data type of the outputs; None: the tables' own.
    """

    output_dtype: torch.dtype | None = None

    def _output(self, output: Tensor) -> Tensor:
        return output if self.output_dtype is None else output.to(self.output_dtype)

    def _factors(self, factors: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        """Return factors of rows, which a precision of 16 bits has cast, in the data type of the tables."""
        if factors is None or self.output_dtype is None:
            return factors
        return (source_of(factors) if isinstance(factors, FullPrecisionTensor) else factors).to(dtype)


def set_row_cache(param: nn.Parameter, cache: RowCache) -> None:
    """Mark a parameter as a cache of rows."""
    setattr(param, ROW_CACHE, cache)


def row_cache_of(tensor: Tensor) -> RowCache | None:
    """Return the tables whose rows a parameter caches; None for another tensor."""
    found: RowCache | None = getattr(tensor, ROW_CACHE, None)
    return found


def row_cache_modules(module: nn.Module) -> Iterator[RowCacheModule]:
    """Yield the modules with caches of rows, outermost ones only."""
    inner: set[nn.Module] = set()
    for part in module.modules():  # outer ones first
        if isinstance(part, RowCacheModule) and part not in inner:
            inner.update(part.modules())
            yield part


def set_output_dtype(module: nn.Module, dtype: torch.dtype | None) -> None:
    """Set the data type of the outputs of cached tables in a module; None: the tables' own."""
    for part in row_cache_modules(module):
        part.output_dtype = dtype


@contextmanager
def without_row_caches(module: nn.Module) -> Iterator[None]:
    """Within the block a module lacks its parameters that are caches of rows."""
    removed = [
        (part, name, param)
        for part in module.modules()
        for name, param in part._parameters.items()
        if param is not None and row_cache_of(param) is not None
    ]
    for part, name, _ in removed:
        part._parameters[name] = None
    try:
        yield
    finally:
        for part, name, param in removed:
            part._parameters[name] = param


@contextmanager
def tables_for_caches(optimizer: Optimizer, *, loads: bool) -> Iterator[None]:
    """Within the block an optimizer holds tables in the places of their caches, with states of all rows.

    Args:
        optimizer: The optimizer.
        loads: Whether states can be replaced in the block.
    """
    groups = [list(group["params"]) for group in optimizer.param_groups]
    caches = {param: cache for params in groups for param in params if (cache := row_cache_of(param))}
    if not caches:
        yield
        return
    tables = {param: [*map(_as_param, cached_tables(param).values())] for param in caches}
    given = {param: cache.states(optimizer) for param, cache in caches.items()}
    own = {param: optimizer.state.pop(param, None) for param in caches}
    lent: dict[nn.Parameter, RowCacheStates] = {}
    for param, members in tables.items():
        lent |= _states_of_tables(members, given[param])
    optimizer.state.update({param: state for param, state in lent.items() if state})
    for group, params in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = [each for param in params for each in tables.get(param, [param])]
    try:
        yield
    finally:
        for group, params in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = params
        for param, cache in caches.items():
            found = {table: optimizer.state.pop(table, {}) for table in tables[param]}
            if not loads or all(_is_kept(state, lent[table]) for table, state in found.items()):
                if own[param] is not None:
                    optimizer.state[param] = own[param]
                continue
            initial = next(
                group.get("initial_accumulator_value", 0.0)
                for group in optimizer.param_groups
                if any(each is param for each in group["params"])
            )
            cache.load_states(optimizer, _joined(found, cache.name, initial=initial))


def row_caches(module: nn.Module) -> list[RowCache]:
    """Return the tables whose rows parameters of a module cache."""
    return [cache for param in module.parameters() if (cache := row_cache_of(param)) is not None]


def cached_tables(param: nn.Parameter) -> dict[str, Tensor]:
    """Return the tables of a cache on this rank; see `RowCache.tables`. They know the parameter."""
    cache = row_cache_of(param)
    tables = {} if cache is None else cache.tables()
    for key, table in tables.items():
        setattr(table, CACHED_TABLE, (param, key))
    return tables


def _as_param(table: Tensor) -> nn.Parameter:
    param = nn.Parameter(table, requires_grad=False)
    vars(param).update(vars(table))  # its spec, and its cache
    return param


def _is_kept(found: RowCacheStates, lent: RowCacheStates) -> bool:
    return found is lent or not (found or lent)


def _states_of_tables(
    tables: Iterable[nn.Parameter], states: RowCacheStates
) -> dict[nn.Parameter, RowCacheStates]:
    """Return the states of each of several tables, whose rows are one after the other."""
    found: dict[nn.Parameter, RowCacheStates] = {}
    begin = 0
    for table in tables:
        rows = slice(begin, begin + len(table))
        found[table] = {
            key: value[rows] if isinstance(value, Tensor) and value.dim() else value
            for key, value in states.items()
        }
        begin = rows.stop
    return found


def _joined(found: Mapping[nn.Parameter, RowCacheStates], name: str, *, initial: float) -> RowCacheStates:
    """Return the states of all rows from those of each table.

    Args:
        found: The states of each table, empty for one without a step.
        name: Name of the tables in error messages.
        initial: The value of states before the first step.

    Raises:
        ValueError: The tables have made different numbers of steps.
    """
    first = next((state for state in found.values() if state), {})
    if len(found) == 1 or not first:
        return dict(first)
    joined: RowCacheStates = {}
    for key, value in first.items():
        values = [state[key] for state in found.values() if state]
        if isinstance(value, Tensor) and value.dim():
            joined[key] = torch.cat(
                [
                    state[key] if state else value.new_full((len(table), *value.shape[1:]), initial)
                    for table, state in found.items()
                ]
            )
        elif any(bool(each != value) for each in values):
            raise ValueError(
                f"the tables of {name} have different values of the optimizer's state {key!r}, and one cache "
                "has one: load them into ParallelCachedEmbeddingBagTablewiseSplitCache"
            )
        else:
            joined[key] = value
    return joined
