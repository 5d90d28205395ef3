"""Cache of the rows of a table: a parameter on the compute device, the whole table in host memory or a file.

[Note: newer copies]
The newest values of a cached row are in the cache once a step has changed it, else in both places. Writes by
others are noticed by the version counters of both tensors. After a write to the cache the rows of batches
with a gradient are newer (a loop without an optimizer), and all others must be as in the table. After a write
to the table the cached rows are read again. A write through `data` changes no counter: a table that was
handed out since the last lookup counts as written, as do the rows of a gradient that was discarded.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from threading import get_ident
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from colossalai.context import Axis
from colossalai.logging import get_dist_logger
from colossalai.nn.layer.cached_embedding._host_rows import HostRows
from colossalai.nn.layer.cached_embedding._in_flight import InFlight
from colossalai.nn.layer.cached_embedding._own_rows import OwnRows
from colossalai.nn.layer.cached_embedding._row_moves import PlannedMove, RowMoves, read_tables
from colossalai.nn.layer.cached_embedding._row_states import RowStates
from colossalai.nn.layer.cached_embedding._slots import (
    BatchSlots,
    CacheOverflowError,
    EvictionStrategy,
    KnownBatch,
    SlotMap,
)
from colossalai.nn.layer.cached_embedding._table_file import TableFile
from colossalai.tensor import ShardingSpec, set_row_cache


class RowWindow(Protocol):
    """Batches that are to come.

    Attributes:
        thread: Identity of the thread that takes them.
    """

    thread: int

    @property
    def batches(self) -> list[KnownBatch]:
        """The batches, the nearest first."""


class _Entered(NamedTuple):
    """A batch whose rows are in the cache before its lookup; see `PlannedMove`."""

    ids: Tensor
    slots: BatchSlots
    version: tuple[int, int]


class CachedParamMgr:
    """Cache of the most useful rows of a table.

    The cache is the parameter that is trained. Rows move between it and the table in `prepare_ids`: missing
    ones are read, evicted ones are written back if a step has changed them.

    Args:
        weight: The table, (rows, dim), in host memory or a file; it is used in place.
        cuda_row_num: Number of rows of the cache; 0 for all.
        buffer_size: Number of rows that are copied at a time; 0 for 64 MiB of them.
        pin_weight: Whether the table is in pinned memory, which is copied to an accelerator faster. Default:
            where the cache is on an accelerator.
        evict_strategy: Order of eviction.
        async_copy: Whether copies to an accelerator may overlap with the host's work.
        device: Device of the cache. Default: the current default device.
        fixed: A row that is always cached; None for none.
        name: Name of the table in error messages.

    Attributes:
        num_hits_history: For each lookup the number of distinct rows that were cached.
        num_miss_history: For each lookup the number of distinct rows that were read from the table, also
            before it by prefetch.
        num_write_back_history: For each lookup the number of rows that were written to the table.

    Raises:
        ValueError: `weight` does not have two dimensions, or a number is out of range.
    """

    _is_exposed: bool  # the table was handed out since the last lookup
    _requires_grad: bool  # of the table, as it was handed out
    _param_version: int
    _table_version: int
    axis: Axis | None = None
    """The ranks that divide the tables; None for a table of one process."""
    cut: ShardingSpec | None = None
    """The cut of the table over them; None where a rank has whole rows."""
    parts: tuple[tuple[str, int, int], ...]
    """Key in a state dict, first row and number of rows of each table of this rank."""
    window: RowWindow | None = None
    """Batches that are to come, while a loader of `prefetch` is in use."""

    def __init__(
        self,
        weight: Tensor | TableFile,
        cuda_row_num: int = 0,
        buffer_size: int = 0,
        pin_weight: bool | None = None,
        evict_strategy: EvictionStrategy = EvictionStrategy.DATASET,
        async_copy: bool = False,
        *,
        device: torch.device | str | None = None,
        fixed: int | None = None,
        name: str = "the table",
    ) -> None:
        table = weight if isinstance(weight, Tensor) else weight.tensor
        if table.dim() != 2:
            raise ValueError(f"the table has the shape {tuple(table.shape)}; it must be (rows, dim)")
        self.num_rows, self.dim = table.shape
        num_slots = cuda_row_num or self.num_rows
        if not 0 < num_slots <= self.num_rows:
            raise ValueError(f"cuda_row_num is {cuda_row_num}; it must be from 1 to the {self.num_rows} rows")
        if buffer_size < 0:
            raise ValueError(
                f"buffer_size is {buffer_size}; it must be a number of rows, or 0 for 64 MiB of them"
            )
        if not isinstance(evict_strategy, EvictionStrategy):
            raise ValueError(f"evict_strategy is {evict_strategy!r}; it must be an EvictionStrategy")
        self.name = name
        self.parts = (("weight", 0, self.num_rows),)
        self.buffer_size = buffer_size
        cache = nn.Parameter(torch.zeros(num_slots, self.dim, dtype=table.dtype, device=device))
        self._slots = SlotMap(self.num_rows, num_slots, strategy=evict_strategy, fixed=fixed, name=name)
        self._moves = RowMoves(
            self._slots, cache, buffer_size, pins_weight=self._decide_pinning(cache, pin_weight)
        )
        self._set_table(weight)
        self._mark()
        self.set_async_copy(async_copy)
        self.in_flight = InFlight(self._slots, self.param)
        self._moves.states = self.states = RowStates(self, name)
        self._num_refreshes = 0
        self._entered: _Entered | None = None
        self.num_hits_history: list[int] = []
        self.num_miss_history: list[int] = []
        self.num_write_back_history: list[int] = []
        self._remember_versions()
        if fixed is not None:
            self._refresh()

    @property
    def param(self) -> nn.Parameter:
        """The cache, (slots, dim)."""
        return self._moves.param

    @property
    def _table(self) -> HostRows:
        return self._moves.table

    @property
    def cuda_cached_weight(self) -> nn.Parameter:
        """The cache, (slots, dim); the documented name of `param`."""
        return self.param

    @property
    def cuda_row_num(self) -> int:
        """Number of rows of the cache."""
        return len(self.param)

    @property
    def cuda_available_row_num(self) -> int:
        """Number of slots without a row."""
        return self._slots.num_empty

    @property
    def row_of(self) -> Tensor:
        """Id of the row in each slot, -1 in an empty one: (slots,)."""
        return self._slots.row_of

    @property
    def has_whole_rows(self) -> bool:
        """Whether the table has all columns of its rows; else other ranks have the others."""
        return self.cut is None

    @property
    def weight(self) -> Tensor:
        """The whole table, (rows, dim), with the newest values; it can be changed in place until a step.

        Raises:
            RuntimeError: The table is in a file that cannot be used, see `TableFile.check_readable`.
        """
        self.check_readable()
        return self.expose_table()

    def check_readable(self) -> None:
        """Check that the rows can be used.

        Raises:
            RuntimeError: The table is in a file that cannot be used, see `TableFile.check_readable`.
        """
        self._table.check_readable(self.name)

    def expose_table(self) -> Tensor:
        """Return the table with the newest values, which others can change until a step."""
        self.flush()
        self._notice_freezing()
        self._is_exposed = True  # a write through `data` does not count in its version
        self._requires_grad = self.param.requires_grad
        return self._table.tensor.requires_grad_(self._requires_grad)

    @property
    def swap_in_bandwidth(self) -> float:
        """Megabytes per second of the rows read from the table so far; 0.0 before the first."""
        return self._moves.read_bandwidth

    @property
    def swap_out_bandwidth(self) -> float:
        """Megabytes per second of the rows written to the table so far; 0.0 before the first."""
        return self._moves.write_bandwidth

    def slots_of(self, rows: Tensor) -> Tensor:
        """Return the slots of rows, -1 for those that are not cached."""
        return self._slots.slots_of(rows)

    def set_tables(self, begins: Sequence[int]) -> None:
        """Note that the rows are those of several tables, whose gradients are added separately.

        Args:
            begins: The first row of each table.
        """
        self._slots.table_begins = tuple(begins)

    def reorder(
        self, ids_freq_mapping: Tensor | Sequence[int] | None = None, warmup_ratio: float = 0.7
    ) -> None:
        """Order the rows by frequency, and fill the cache with the most frequent ones.

        Args:
            ids_freq_mapping: (rows,): how often each id is used; None: the smaller, the more often.
            warmup_ratio: Share of the cache to fill, from 0 to 1.

        Raises:
            ValueError: The number of frequencies differs from `rows`, or `warmup_ratio` is out of range.
            RuntimeError: Batches wait for their step.
        """
        if not 0 <= warmup_ratio <= 1:
            raise ValueError(f"warmup_ratio is {warmup_ratio}; it must be from 0 to 1")
        if not self.in_flight.is_empty:
            raise RuntimeError(
                f"rows of {self.name} wait for a step: call reorder before a forward or after a step"
            )
        if ids_freq_mapping is not None:
            frequencies = torch.as_tensor(ids_freq_mapping).cpu()
            if frequencies.shape != (self.num_rows,):
                raise ValueError(
                    f"ids_freq_mapping has the shape {tuple(frequencies.shape)}, and {self.name} has "
                    f"{self.num_rows} rows: give one frequency for each row"
                )
            self._slots.order_by(frequencies)
        self.flush()
        self._slots.clear()
        self._moves.exchange(self._slots.plan_filling(int(warmup_ratio * self.cuda_row_num)))

    @torch.no_grad()
    def prepare_ids(self, ids: Tensor) -> Tensor:
        """Read the rows of a batch into the cache, and pin them until its step.

        For lookups with `set_cache_op(False)`, which take slots: they are expected in the order of these
        calls.

        Args:
            ids: Ids of any shape, int64 or int32.

        Returns:
            The slots of `ids`, of their shape, type and device.

        Raises:
            ValueError: An id is out of range.
            RuntimeError: The batch has more distinct ids than the cache can hold.
        """
        slots, distinct = self.lookup(ids)
        self.in_flight.prepare(slots, distinct=distinct)
        return slots.clone()  # the user may change them, and they can be those of a plan

    @torch.no_grad()
    def lookup(self, ids: Tensor) -> BatchSlots:
        """Read the rows of a batch into the cache, without pinning them; see `prepare_ids`."""
        self._slots.check(ids)
        self._check_thread()
        self._begin_move()
        flat = ids.detach().flatten().long().cpu()
        slots, distinct, num_read = self._find(flat)
        self.num_hits_history.append(distinct.numel() - num_read)
        self.num_miss_history.append(num_read)
        self.num_write_back_history.append(self._moves.take_num_written())
        return BatchSlots(slots.view(ids.shape).to(ids.device, ids.dtype), distinct)

    def _find(self, ids: Tensor) -> tuple[Tensor, Tensor, int]:
        """Return the slots of ids, these without duplicates, and how many rows were read for them."""
        entered = self._entered
        if entered is not None and entered.version == self._version and torch.equal(ids, entered.ids):
            return *entered.slots, self._take_fresh(entered.slots.distinct)
        slots, num_read = self._slots.slots_of(ids), 0
        if self.window is None or not self._slots.are_counted(slots):
            self._moves.wait()
            later = [] if self.window is None else [each.rows for each in self.window.batches]
            exchange = self._slots.plan(ids, later=later)
            self._moves.exchange(exchange)
            num_read = exchange.entering.numel()
            slots = self._slots.slots_of(ids)
            self._slots.count(distinct := self._slots.distinct(slots))
        else:
            distinct = self._slots.distinct(slots)
        return slots, distinct, num_read + self._take_fresh(distinct)

    def are_in_range(self, ids: Tensor) -> bool:
        """Return whether ids are those of rows of the table.

        Raises:
            TypeError: `ids` are not of type int64 or int32.
        """
        try:
            self._slots.check(ids)
        except ValueError:
            return False
        return True

    @torch.no_grad()
    def enter(
        self,
        batch: KnownBatch | None,
        planned: "Future[PlannedMove | None] | None",
        *,
        later: Sequence[KnownBatch],
    ) -> None:
        """Move the rows of a batch into the cache before its lookup; see [Note: prefetch].

        Args:
            batch: The batch; None for one without rows.
            planned: The result of `plan_ahead` for it, if it was called.
            later: The next batches, the nearest first.
        """
        is_exposed = self._is_exposed
        self._begin_move()
        self._is_exposed = is_exposed  # until the lookup, before which the table can be changed
        self._entered = None
        self._moves.wait()
        plan = planned.result() if planned is not None and planned.done() else None  # not done: in a fork
        if batch is None:
            return
        if plan is not None and plan.version != self._version:
            plan = None
        if plan is not None and not self._slots.num_pins[plan.exchange.left_slots].any():
            exchange = plan.exchange
        else:
            try:
                exchange = self._slots.plan(batch.rows, later=[each.rows for each in later])
            except CacheOverflowError:  # of the lookup to come
                return
        self._moves.exchange(exchange, read_before=None if plan is None else plan.rows, is_ahead=True)
        if plan is not None and exchange is plan.exchange:
            self._entered = _Entered(batch.ids, plan.slots, self._version)
            self._slots.count(plan.slots.distinct)
        else:
            self._slots.count(self._slots.slots_of(batch.rows))

    def plan_ahead(self, batch: KnownBatch, *, later: Sequence[KnownBatch]) -> "Future[PlannedMove | None]":
        """Choose the rows that leave for a batch, and read its missing rows, on a thread.

        Args:
            batch: The batch.
            later: The batches after it, the nearest first.

        Returns:
            The result to come, None if the batch needs too many rows.
        """
        # Without the cache: the thread must not be the last to hold it, and end it in the middle of a step.
        plan = partial(
            _plan_move,
            self._slots,
            batch,
            later,
            self._slots.num_pins.numpy() > 0,
            self._version,
            tables=self._moves.tables,
            pins=self._moves.pins_weight,
        )
        return self._moves.call(plan)

    def close_window(self, window: RowWindow) -> None:
        """Forget the batches of a window; one of an earlier loop can be closed at any time, as garbage."""
        if self.window is window:
            self.window = self._entered = None
            self._moves.end_thread()

    def wait_for_moves(self) -> None:
        """Wait until rows that have left are in their tables."""
        self._moves.wait()

    def is_table(self, tensor: Tensor) -> bool:
        """Return whether a tensor is the table."""
        return tensor is self._table.tensor

    def new_rows(self, shape: Sequence[int], dtype: torch.dtype) -> HostRows:
        """Return zeros, (rows, ...), where the table is: in host memory or in a file."""
        return self._table.new_rows(shape, dtype)

    def check_table_grad(self) -> None:
        """Check that the table has no gradient.

        Raises:
            RuntimeError: The table has a gradient.
        """
        if self._table.tensor.grad is not None:
            self._table.tensor.grad = None
            raise RuntimeError(
                f"a loss was computed with the attribute `weight` of {self.name}, whose gradient no "
                "optimizer applies: compute it with the output"
            )

    @property
    def padding_slot(self) -> int | None:
        """Slot of the row `fixed`, None without one."""
        return self._slots.fixed_slot

    def begin_step(self) -> Tensor:
        """Mark the rows with a gradient as changed, and return their slots.

        Raises:
            RuntimeError: The gradient was applied by an earlier step, or is not of batches in flight.
        """
        slots = self.in_flight.slots_with_grad()
        self._notice_writes()  # before the step, which changes the version of the cache
        self._note_newer(slots)
        return slots

    def end_step(self) -> None:
        """Release the batches whose gradients were applied."""
        self.in_flight.end_step()
        self._remember_versions()  # the writes since `begin_step` are the optimizer's

    @torch.no_grad()
    def flush(self) -> None:
        """Write the rows that steps have changed to the table."""
        self._moves.wait()
        self.in_flight.release_discarded()
        self._notice_writes()
        self._moves.is_newer |= self.in_flight.has_grad()  # a loop of the user may write through `data`
        slots = self._moves.is_newer.nonzero().flatten()
        self._moves.write_back(slots, self.row_of[slots])
        self._table.finish()

    def flush_at_end(self) -> None:
        """Write the rows that steps have changed to a table in a file, unless a step was interrupted."""
        if self._table.is_own and not self.states.is_stepping:
            self.flush()
            self._table.warn_if_deleted(self.name)

    def close(self) -> None:
        """Release the file of a table, which cannot be used afterwards."""
        self._moves.end_thread()
        self._table.release()

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Context in which the result of `expose_table` is overwritten."""
        self.flush()
        with self._table.loading():
            yield

    @torch.no_grad()
    def load(self, weight: Tensor) -> None:
        """Replace the values of the table, a block at a time; the cache notices it by the table's version.

        Args:
            weight: The values, (rows, dim).
        """
        assert weight.shape == (self.num_rows, self.dim)
        self.flush()
        self._table.load(weight)

    @torch.no_grad()
    def load_rows(self, begin: int, weight: Tensor) -> None:
        """Replace the values of some rows of the table, which the cache notices by the table's version.

        Args:
            begin: The first row.
            weight: The values, (rows, dim).
        """
        self.flush()
        self._table.tensor[begin : begin + len(weight)].copy_(weight)

    @torch.no_grad()
    def replace_table(self, weight: Tensor) -> None:
        """Use another table from now on, and read the cached rows from it; a table in a file is loaded.

        Args:
            weight: The table, (rows, dim).
        """
        if self._table.path is not None:
            self.load(weight)
            return
        assert weight.shape == (self.num_rows, self.dim)
        self.flush()
        self._set_table(weight.to(self.param.dtype))
        self._refresh()

    def check_castable(self, cast: Callable[[Tensor], Tensor]) -> None:
        """Check that the table can have the data type that a function gives to the cache.

        Raises:
            RuntimeError: The table is in a file of another type.
        """
        if self._table.path is None:
            return
        dtype = cast(torch.empty_like(self.param[:0])).dtype
        if dtype != self.param.dtype:
            raise RuntimeError(
                f"{self.name} is in a file of type {self.param.dtype}, which is not cast to {dtype}: make a "
                f"module with dtype={dtype} and another weight_path, and load the state_dict() of this one"
            )

    @torch.no_grad()
    def rebind(self, param: nn.Parameter) -> None:
        """Use another parameter as the cache, or the same with other memory; the table gets its data type.

        Args:
            param: The parameter; the cached rows are read into it.
        """
        self._moves.param = param
        self.in_flight.set_param(param)
        self._mark()
        if self._table.tensor.dtype != param.dtype:
            self._set_table(self._table.tensor.to(param.dtype))
        self._refresh()

    def set_async_copy(self, async_copy: bool) -> None:
        """Set whether copies to an accelerator may overlap with the host's work."""
        self._moves.async_copy = async_copy

    def print_comm_stats(self) -> None:
        """Log hits, misses and the rows that moved so far."""
        num_hits, num_misses = sum(self.num_hits_history), sum(self.num_miss_history)
        get_dist_logger().info(
            f"{self.name}: {num_hits + num_misses} rows looked up, {num_misses} read at "
            f"{self.swap_in_bandwidth:.0f} MB/s, {sum(self.num_write_back_history)} written back at "
            f"{self.swap_out_bandwidth:.0f} MB/s"
        )

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy: batches and optimizers stay with the original.

        Raises:
            RuntimeError: The table is in a file.
        """
        if self._table.path is not None:
            raise RuntimeError(
                f"{self.name} is in the file {self._table.path}, which a copy cannot share: make a module "
                "with another weight_path, and load the state_dict() of this one"
            )
        self.flush()
        state = vars(self).copy()
        del state["states"], state["in_flight"]
        state |= {"window": None, "_entered": None}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._slots.reset_pins()
        self._mark()
        self.in_flight = InFlight(self._slots, self.param)
        self._moves.states = self.states = RowStates(self, self.name)
        self._remember_versions()

    def _mark(self) -> None:
        set_row_cache(self.param, OwnRows(self))

    def _decide_pinning(self, cache: Tensor, pin_weight: bool | None) -> bool:
        on_accelerator = cache.device.type not in ("cpu", "meta")
        if pin_weight and not on_accelerator:
            get_dist_logger().warning(
                f"pin_weight=True has no effect for {self.name}: its cache is on the CPU, as the table is"
            )
        return on_accelerator if pin_weight is None else pin_weight and on_accelerator

    def _set_table(self, weight: Tensor | TableFile) -> None:
        if isinstance(weight, Tensor):
            table = weight.detach().cpu().contiguous()
            self._moves.table = HostRows(table.pin_memory() if self._moves.pins_weight else table)
        else:
            self._moves.table = weight
        self._is_exposed, self._requires_grad = False, self._table.tensor.requires_grad

    def _check_thread(self) -> None:
        """Check that batches of a window are computed by the thread that takes them.

        Raises:
            RuntimeError: Another thread takes them; a thread of autograd, which recomputes, is none.
        """
        is_other = self.window is not None and self.window.thread != get_ident()
        if is_other and torch._C._current_graph_task_id() == -1:
            raise RuntimeError(
                f"a loader of prefetch for {self.name} is read by another thread than that of this forward, "
                "whose rows would move in the middle of a step: read it in the thread that trains"
            )

    def _begin_move(self) -> None:
        """Check the table, and notice changes since the last move."""
        self._table.check_readable(self.name)
        self._table.check_lasting(self.name)
        self.in_flight.release_discarded()
        self._notice_freezing()
        self._notice_writes()

    @property
    def _version(self) -> tuple[int, int]:
        """Number of moves and of refreshes so far."""
        return self._slots.num_moves, self._num_refreshes

    def _take_fresh(self, slots: Tensor) -> int:
        """Return how many rows in slots came before their lookup, once."""
        if not self._moves.has_been_ahead:
            return 0
        is_fresh, flat = self._moves.is_fresh.numpy(), slots.numpy()
        number = int(is_fresh.take(flat).sum())
        if number:
            is_fresh[flat] = False
        return number

    def _notice_writes(self) -> None:
        """Compare the version counters of the cache and the table; see [Note: newer copies].

        Raises:
            RuntimeError: The table was changed while the cache had newer rows.
        """
        changed = self.in_flight.take_changed()
        if self._table.tensor._version != self._table_version:
            # It was handed out after the cache was written back.
            num_newer = int(self._moves.is_newer.sum())
            self._refresh()
            if num_newer:
                raise RuntimeError(
                    f"{self.name} was changed in place after {num_newer} rows of its cache had been trained, "
                    "which keep their values: read the attribute `weight` again before each change"
                )
        else:
            if changed.numel():
                self._note_newer(changed)
            if self.param._version != self._param_version:
                self._check_foreign_writes()
                self._note_newer(self.in_flight.has_grad().nonzero().flatten())
                self._param_version = self.param._version
            if self._is_exposed:
                self._refresh()
        if self._is_exposed:
            self._table.release_memory()
            self._is_exposed = False

    def _note_newer(self, slots: Tensor) -> None:
        """Note that rows of the cache are newer than the table."""
        self._moves.is_newer.numpy()[slots.numpy()] = True
        self._table.begin_change()

    def _check_foreign_writes(self) -> None:
        """Check that rows without a gradient are as in the table, after writes without a known optimizer.

        Raises:
            RuntimeError: A row differs; all are read again.
        """
        others = (self.row_of >= 0) & ~self._moves.is_newer & ~self.in_flight.has_grad()
        slots = others.nonzero().flatten()
        self._moves.wait()
        cached = self.param.data[slots.to(self.param.device)].cpu()
        if torch.equal(cached.nan_to_num(), self._table.read(self.row_of[slots]).nan_to_num()):
            return
        self._refresh()
        raise RuntimeError(
            f"the parameter of {self.name} was written to, which is a cache of some rows, and the writes "
            "were undone: write to the attribute `weight`, the whole table, also for averages of models"
        )

    def _notice_freezing(self) -> None:
        """Let the cache follow `weight.requires_grad`."""
        if self._table.tensor.requires_grad != self._requires_grad:
            self._requires_grad = self._table.tensor.requires_grad
            self.param.requires_grad_(self._requires_grad)

    def _remember_versions(self) -> None:
        self._param_version, self._table_version = self.param._version, self._table.tensor._version

    def _refresh(self) -> None:
        """Read all cached rows again, but those that are newer than the table."""
        self._moves.wait()
        self._num_refreshes += 1
        slots = ((self.row_of >= 0) & ~self._moves.is_newer).nonzero().flatten()
        self._moves.read_weights(slots, self.row_of[slots])
        self._remember_versions()


def _plan_move(
    slot_map: SlotMap,
    batch: KnownBatch,
    later: Sequence[KnownBatch],
    is_pinned: NDArray[np.bool_],
    version: tuple[int, int],
    *,
    tables: Sequence[HostRows],
    pins: bool,
) -> PlannedMove | None:
    """Choose the rows that leave for a batch, and read its missing rows; see `CachedParamMgr.plan_ahead`."""
    try:
        exchange = slot_map.plan(batch.rows, later=[each.rows for each in later], is_pinned=is_pinned)
    except CacheOverflowError:
        return None
    slots = BatchSlots(*(slot_map.slots_after(exchange, each) for each in (batch.ids, batch.rows)))
    return PlannedMove(exchange, slots, read_tables(tables, exchange.entering, pins=pins), version)
