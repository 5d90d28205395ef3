"""States of optimizers for the rows of a table, of which an optimizer holds those in the cache.

[Note: states of rows]
An optimizer is given the cache, a parameter (slots, dim), and makes states of its shape. A state belongs to
the row that is in its slot: it leaves and returns with the row. `RowStates` has the states of all rows in
tables of the host, in memory or in files as the table is, and torch's hooks of `step`, `state_dict` and
`load_state_dict`:

- before a step the optimizer is checked, rows with a gradient are marked as changed, and a sparse gradient is
  coalesced, except for SGD, which does not do so itself ([Note: order of sums]).
- after it, new states get their tables, and rows of the batches that the step was for can be evicted.
- `optimizer.state_dict()` has the states of all rows in the order of ids, those of `torch.nn.EmbeddingBag`.

An optimizer finds the table at its first step: the hooks of `step` are torch's for all optimizers of the
process, and are removed with the table.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Optimizer, SparseAdam
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from colossalai.nn.layer.cached_embedding._host_rows import HostRows, read_rows, write_rows
from colossalai.nn.layer.cached_embedding._in_flight import InFlight
from colossalai.nn.optimizer import RowWiseAdagrad
from colossalai.tensor import RowCacheStates

_ROW_WISE = (SGD, Adagrad, SparseAdam, RowWiseAdagrad)
_WHOLE_TABLE_OPTIONS = ("weight_decay", "momentum")

States = dict[str, Tensor]


class CachedRows(Protocol):
    """The parts of a cache that its states need."""

    @property
    def param(self) -> nn.Parameter:
        """The cache, (slots, dim)."""

    @property
    def num_rows(self) -> int:
        """Number of rows of the table."""

    @property
    def has_whole_rows(self) -> bool:
        """Whether the table has all columns of its rows."""

    @property
    def in_flight(self) -> InFlight:
        """Its batches in flight."""

    @property
    def row_of(self) -> Tensor:
        """Id of the row in each slot, -1 in an empty one."""

    def is_table(self, tensor: Tensor) -> bool:
        """Return whether a tensor is the table."""

    def new_rows(self, shape: Sequence[int], dtype: torch.dtype) -> HostRows:
        """Return zeros, (rows, ...), where the table is."""

    def check_table_grad(self) -> None:
        """Check that the table has no gradient."""

    def wait_for_moves(self) -> None:
        """Wait until rows that have left are in their tables."""

    def begin_step(self) -> Tensor:
        """Mark the rows with a gradient as changed, and return their slots."""

    def end_step(self) -> None:
        """Release the batches whose gradients were applied."""


class RowStates:
    """Tables of the states of optimizers, (rows, ...) each.

    See [Note: states of rows].

    Args:
        cache: The cache; the states hold a weak reference to it.
        name: Name of the table in error messages.
    """

    def __init__(self, cache: CachedRows, name: str) -> None:
        self._cache = weakref.ref(cache)
        self._name = name
        self._tables: weakref.WeakKeyDictionary[Optimizer, dict[str, HostRows]] = weakref.WeakKeyDictionary()
        self._touched: Tensor | None = None  # the slots with a gradient in the current step
        self._updates_at_once = True  # the current step writes to the cache once
        for register, hook in (
            (register_optimizer_step_pre_hook, RowStates._before_step),
            (register_optimizer_step_post_hook, RowStates._after_step),
        ):
            weakref.finalize(self, register(_weakly(self, hook)).remove).atexit = False

    @property
    def is_stepping(self) -> bool:
        """Whether a step is in progress that changes the cache in parts."""
        return self._touched is not None and not self._updates_at_once

    @property
    def tables(self) -> list[HostRows]:
        """The tables of all states."""
        return [table for _, table in self._pairs()]

    def write_back(
        self, slots: Tensor, rows: Tensor, write: Callable[[HostRows, Tensor, Tensor], None] = write_rows
    ) -> None:
        """Write the states in slots to their rows of the tables, by a function of table, rows and values."""
        for cached, table in self._pairs():
            write(table, rows, cached.index_select(0, slots.to(cached.device)).cpu())

    def read(
        self, slots: Tensor, rows: Tensor, read: Callable[[HostRows, Tensor], Tensor] = read_rows
    ) -> None:
        """Read the states of rows into slots, by a function of table and rows."""
        for cached, table in self._pairs():
            values = read(table, rows).to(cached.device)
            cached.index_copy_(0, slots.to(cached.device), values)

    def check(self, optimizer: Optimizer) -> None:
        """Check that an optimizer, if it holds the cache, changes the rows with a gradient only.

        Raises:
            ValueError: `optimizer` changes every row at each step, is not known to change rows separately, or
                holds the table instead.
        """
        group = self._group_of_cache(optimizer)
        if group is None:
            return
        _check_row_wise(optimizer, group, self._name)
        if isinstance(optimizer, RowWiseAdagrad) and not self._alive().has_whole_rows:
            raise ValueError(
                f"RowWiseAdagrad has one sum for each row of {self._name}, whose columns are on several "
                "ranks: use Adagrad, or ParallelCachedEmbeddingBagTablewise, which has whole rows"
            )

    def of_all_rows(self, optimizer: Optimizer) -> RowCacheStates:
        """Return the states of all rows, (rows, ...) each, with the newest values, and numbers.

        Raises:
            ValueError: States are those of slots of an earlier cache.
        """
        cache = self._alive()
        if not optimizer.state.get(cache.param):
            return {}
        self.adopt(optimizer)
        self._write_back_all()
        wholes = {key: table.tensor for key, table in self._tables[optimizer].items()}
        return {**optimizer.state[cache.param], **wholes}

    def load(self, optimizer: Optimizer, states: RowCacheStates) -> None:
        """Replace the states of all rows.

        Args:
            optimizer: The optimizer.
            states: The states, (rows, ...) each, and numbers; empty for none.
        """
        cache = self._alive()
        if not states:
            optimizer.state.pop(cache.param, None)
            self._tables.get(optimizer, {}).clear()
            return
        optimizer.state[cache.param] = states
        self._tables.get(optimizer, {}).clear()
        self.adopt(optimizer)

    def adopt(self, optimizer: Optimizer) -> None:
        """Take the states of an optimizer into tables.

        Raises:
            ValueError: A state has neither one row for each row of the table nor equal values in all slots.
        """
        is_new = optimizer not in self._tables
        if is_new:
            self._tables[optimizer] = {}
            optimizer.register_state_dict_post_hook(_weakly(self, RowStates._fill_state_dict))
            optimizer.register_load_state_dict_post_hook(_weakly(self, RowStates._after_load))
        self._make_tables(optimizer, are_unknown=is_new)

    def _make_tables(self, optimizer: Optimizer, *, are_unknown: bool) -> None:
        """Make tables of states that have none.

        Args:
            optimizer: The optimizer.
            are_unknown: Whether its earlier steps, if any, were made without tables, so it must hold states
                of the whole table.
        """
        cache, tables = self._alive(), self._tables[optimizer]
        states, num_slots = optimizer.state.get(cache.param, {}), len(cache.param)
        has_stepped = _has_stepped(states)
        for key in [key for key in tables if key not in states]:  # the user has cleared the states
            del tables[key]
        for key, value in states.items():
            if key in tables or not isinstance(value, Tensor) or not value.dim():
                continue
            if len(value) == cache.num_rows:  # loaded, or the cache has all rows
                tables[key] = cache.new_rows(value.shape, value.dtype)
                tables[key].load(value.detach())
                if num_slots < cache.num_rows:  # else each row has the slot of its number
                    value = tables[key].read(cache.row_of.clamp(min=0))
                states[key] = value.to(cache.param.device)
            elif not has_stepped and bool((value == value[:1]).all()):  # as the optimizer has made it
                states[key] = value[:1].repeat(num_slots, *(1 for _ in value.shape[1:]))
                tables[key] = self._table_of(key, value, untouched=value)
            elif len(value) == num_slots and not are_unknown:
                # Made in this step. Rows with a gradient have changed, all others have the initial value.
                is_touched = torch.zeros_like(cache.row_of, dtype=torch.bool)
                if self._touched is not None:
                    is_touched[self._touched] = True
                untouched = value[(~is_touched).to(value.device)]
                # As Adagrad and RowWiseAdagrad have it; states of the others begin with zeros.
                group = self._group_of_cache(optimizer) or {}
                initial = group.get("initial_accumulator_value", 0.0)
                tables[key] = self._table_of(key, value, untouched=untouched, initial=initial)
            else:
                raise ValueError(
                    f"the optimizer's state {key!r} has {len(value)} rows and not the {cache.num_rows} of "
                    f"{self._name}: load the state_dict() of an optimizer that has made a step with it, "
                    "or begin with a new optimizer"
                )

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        cache = self._cache()
        if cache is None:  # it ends
            return
        group = self._group_of_cache(optimizer)
        if group is None:
            return
        self._touched = None  # an earlier step may have been interrupted
        cache.check_table_grad()
        if any(each is not None for each in (*args[1:], *kwargs.values())):  # args[0] is the optimizer
            raise ValueError(
                f"step(closure) computes gradients inside of the step, where those of {self._name} cannot be "
                "prepared: call backward(), then step()"
            )
        self.check(optimizer)
        self.adopt(optimizer)
        grad = cache.param.grad
        if grad is None:
            return
        self._touched = cache.begin_step()
        self._updates_at_once = type(optimizer) in _ROW_WISE
        if grad.is_sparse and not isinstance(optimizer, SGD):
            # One entry a row, so that the optimizer's own `coalesce` adds nothing. SGD has none: it adds the
            # entries in the order of the batch.
            cache.param.grad = cache.in_flight.sums.coalesce(grad)

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        cache = self._cache()
        if cache is None or self._touched is None or self._group_of_cache(optimizer) is None:
            return
        self._make_tables(optimizer, are_unknown=False)
        self._touched = None
        cache.end_step()

    def _table_of(self, key: str, value: Tensor, *, untouched: Tensor, initial: float = 0.0) -> HostRows:
        """Return a table of the value that a state begins with.

        Args:
            key: Name of the state.
            value: The state of the rows in slots.
            untouched: Those of rows without a gradient, which have it.
            initial: The value if all rows have a gradient.
        """
        cache = self._alive()
        table = cache.new_rows((cache.num_rows, *value.shape[1:]), value.dtype)
        if not len(untouched):
            untouched = torch.full_like(value[:1], initial)
        first = untouched[0]
        if not bool((untouched == first).all()):
            raise ValueError(
                f"the optimizer's state {key!r} has several values in slots without a gradient, so its rows "
                f"outside of the cache of {self._name} are unknown: load a state_dict() of the whole table, "
                "or begin with a new optimizer"
            )
        if first.any():
            table.load(first.expand(cache.num_rows, *first.shape))
        return table

    def _fill_state_dict(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """Put the states of all rows into the result of `optimizer.state_dict()`."""
        cache = self._alive()
        index = _index_of(optimizer, cache.param)
        tables = self._tables[optimizer]
        if index is None or not tables:
            return
        self._write_back_all()
        wholes = {key: table.tensor for key, table in tables.items()}
        state_dict["state"][index] = {**state_dict["state"][index], **wholes}

    def _write_back_all(self) -> None:
        """Write the states of all cached rows to their tables."""
        cache = self._alive()
        cache.wait_for_moves()
        # Also rows that are not newer than the table: it costs little here, and needs no mark.
        slots = (cache.row_of >= 0).nonzero().flatten()
        self.write_back(slots, cache.row_of[slots])

    def _after_load(self, optimizer: Optimizer) -> None:
        """Take the states of all rows that `optimizer.load_state_dict` has loaded."""
        self._tables[optimizer] = {}
        self._make_tables(optimizer, are_unknown=True)

    def _group_of_cache(self, optimizer: Optimizer) -> dict[str, Any] | None:
        """Return the group of the cache in an optimizer, None if it has another optimizer.

        Raises:
            ValueError: The optimizer holds the table.
        """
        cache = self._alive()
        for group in optimizer.param_groups:
            for param in group["params"]:
                if param is cache.param:
                    return group
                if cache.is_table(param):
                    raise ValueError(
                        f"the optimizer was given the attribute `weight` of {self._name}, which is the whole "
                        "table: give it the parameters() of the module"
                    )
        return None

    def _alive(self) -> CachedRows:
        cache = self._cache()
        assert cache is not None, "the cache owns its states"
        return cache

    def _pairs(self) -> Iterator[tuple[Tensor, HostRows]]:
        """Yield each state of the cache with its table."""
        cache = self._alive()
        for optimizer, tables in self._tables.items():
            states = optimizer.state.get(cache.param, {})
            for key in [key for key in tables if key not in states]:  # the user has cleared the states
                del tables[key]
            for key, table in tables.items():
                yield states[key], table


def _weakly(owner: RowStates, hook: Callable[..., None]) -> Callable[..., None]:
    """Return a hook that does nothing once its owner is gone; torch keeps hooks of all optimizers."""
    reference = weakref.ref(owner)

    def call(*args: Any) -> None:
        alive = reference()
        if alive is not None:
            hook(alive, *args)

    return call


def _index_of(optimizer: Optimizer, param: nn.Parameter) -> int | None:
    """Return the number of a parameter in the state dict of its optimizer."""
    params = (each for group in optimizer.param_groups for each in group["params"])
    return next((index for index, each in enumerate(params) if each is param), None)


def _check_row_wise(optimizer: Optimizer, group: dict[str, Any], name: str) -> None:
    """Check that an optimizer changes the rows with a gradient only, each by itself.

    Raises:
        ValueError: `optimizer` changes every row at each step, or is not known to change rows separately.
    """
    kind = type(optimizer)
    if kind not in _ROW_WISE and not getattr(kind, "is_row_wise", False):
        names = ", ".join(each.__name__ for each in _ROW_WISE)
        raise ValueError(
            f"{kind.__name__} is not known to change only the rows of {name} that have a gradient, each by "
            f"itself (moments that decay at each step do not): use one of {names}, and another optimizer for "
            "the dense layers; if one of your own does so, set is_row_wise = True in its class"
        )
    for option in _WHOLE_TABLE_OPTIONS:
        if group.get(option):
            raise ValueError(
                f"{kind.__name__} with {option}={group[option]} changes every row of {name} at each step, "
                f"also those outside of the cache: give its parameters a group with {option}=0"
            )


def _has_stepped(states: States) -> bool:
    """Return whether states are of an optimizer that has made a step."""
    return bool(states) and float(states.get("step", 1)) > 0
