"""Cache of the rows of a table: a parameter on the compute device, the whole table in host memory or a file.

[Note: newer copies]
The newest values of a cached row are in the cache once a step has changed it, else in both places. Writes by
others are noticed by the version counters of both tensors. After a write to the cache the rows of batches
with a gradient are newer (a loop without an optimizer), and all others must be as in the table. After a write
to the table the cached rows are read again. A write through `data` changes no counter: a table that was
handed out since the last lookup counts as written, as do the rows of a gradient that was discarded.
"""

from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from colossalai.logging import get_dist_logger
from colossalai.nn.layer.cached_embedding._host_rows import HostRows
from colossalai.nn.layer.cached_embedding._in_flight import InFlight
from colossalai.nn.layer.cached_embedding._row_states import RowStates
from colossalai.nn.layer.cached_embedding._slots import EvictionStrategy, RowExchange, SlotMap
from colossalai.nn.layer.cached_embedding._table_file import TableFile
from colossalai.tensor import CACHED_ROWS_OF

_PIECE_BYTES = 1 << 26  # copied at a time by default


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
        param: The cache, (slots, dim).
        num_hits_history: For each lookup the number of distinct rows that were cached.
        num_miss_history: For each lookup the number of distinct rows that were read from the table.
        num_write_back_history: For each lookup the number of rows that were written to the table.

    Raises:
        ValueError: `weight` does not have two dimensions, or a number is out of range.
    """

    _table: HostRows
    _is_exposed: bool  # the table was handed out since the last lookup
    _requires_grad: bool  # of the table, as it was handed out
    _param_version: int
    _table_version: int

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
        self.buffer_size = buffer_size
        self.async_copy = async_copy
        cache = torch.zeros(num_slots, self.dim, dtype=table.dtype, device=device)
        self.param = nn.Parameter(cache)
        setattr(self.param, CACHED_ROWS_OF, name)
        self._pins_weight = self._decide_pinning(pin_weight)
        self._set_table(weight)
        self._slots = SlotMap(self.num_rows, num_slots, strategy=evict_strategy, fixed=fixed, name=name)
        self._is_newer = torch.zeros_like(
            self._slots.num_pins, dtype=torch.bool
        )  # slots that are ahead of the table
        self.in_flight = InFlight(self._slots, self.param)
        self.states = RowStates(self, name)
        self.num_hits_history: list[int] = []
        self.num_miss_history: list[int] = []
        self.num_write_back_history: list[int] = []
        self._bytes_in = self._bytes_out = 0
        self._seconds_in = self._seconds_out = 0.0
        self._remember_versions()
        if fixed is not None:
            self._refresh()

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
    def weight(self) -> Tensor:
        """The whole table, (rows, dim), with the newest values; it can be changed in place until a step.

        Raises:
            RuntimeError: The table is in a file that cannot be used, see `TableFile.check_readable`.
        """
        self._table.check_readable(self.name)
        self.flush()
        self._notice_freezing()
        self._is_exposed = True  # a write through `data` does not count in its version
        self._requires_grad = self.param.requires_grad
        return self._table.tensor.requires_grad_(self._requires_grad)

    @property
    def swap_in_bandwidth(self) -> float:
        """Megabytes per second of the rows read from the table so far; 0.0 before the first."""
        return self._bytes_in / 1e6 / self._seconds_in if self._bytes_in else 0.0

    @property
    def swap_out_bandwidth(self) -> float:
        """Megabytes per second of the rows written to the table so far; 0.0 before the first."""
        return self._bytes_out / 1e6 / self._seconds_out if self._bytes_out else 0.0

    def slots_of(self, rows: Tensor) -> Tensor:
        """Return the slots of rows, -1 for those that are not cached."""
        return self._slots.slots_of(rows)

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
        self._move(self._slots.plan_filling(int(warmup_ratio * self.cuda_row_num)))

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
        slots = self.lookup(ids)
        self.in_flight.prepare(slots)
        return slots

    @torch.no_grad()
    def lookup(self, ids: Tensor) -> Tensor:
        """Read the rows of a batch into the cache, without pinning them; see `prepare_ids`."""
        self._table.check_readable(self.name)
        self._table.check_lasting(self.name)
        self._slots.check(ids)
        self.in_flight.release_discarded()
        self._notice_freezing()
        self._notice_writes()
        flat = ids.detach().flatten().long().cpu()
        exchange = self._slots.plan(flat)
        num_written = self._move(exchange)
        slots, num_distinct = self._slots.count(flat)
        self.num_hits_history.append(num_distinct - exchange.entering.numel())
        self.num_miss_history.append(exchange.entering.numel())
        self.num_write_back_history.append(num_written)
        return slots.view(ids.shape).to(ids.device, ids.dtype)

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
        self.in_flight.release_discarded()
        self._notice_writes()
        self._is_newer |= self.in_flight.has_grad()  # a loop of the user may write through `data`
        slots = self._is_newer.nonzero().flatten()
        self._write_back(slots, self.row_of[slots])
        self._table.finish()

    def flush_at_end(self) -> None:
        """Write the rows that steps have changed to a table in a file, unless a step was interrupted."""
        if self._table.is_own and not self.states.is_stepping:
            self.flush()
            self._table.warn_if_deleted(self.name)

    def close(self) -> None:
        """Release the file of a table, which cannot be used afterwards."""
        self._table.release()

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
        self.param = param
        self.in_flight.set_param(param)
        setattr(param, CACHED_ROWS_OF, self.name)
        if self._table.tensor.dtype != param.dtype:
            self._set_table(self._table.tensor.to(param.dtype))
        self._refresh()

    def set_async_copy(self, async_copy: bool) -> None:
        """Set whether copies to an accelerator may overlap with the host's work."""
        self.async_copy = async_copy

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
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._slots.reset_pins()
        setattr(self.param, CACHED_ROWS_OF, self.name)
        self.in_flight = InFlight(self._slots, self.param)
        self.states = RowStates(self, self.name)
        self._remember_versions()

    def _decide_pinning(self, pin_weight: bool | None) -> bool:
        on_accelerator = self.param.device.type not in ("cpu", "meta")
        if pin_weight and not on_accelerator:
            get_dist_logger().warning(
                f"pin_weight=True has no effect for {self.name}: its cache is on the CPU, as the table is"
            )
        return on_accelerator if pin_weight is None else pin_weight and on_accelerator

    def _set_table(self, weight: Tensor | TableFile) -> None:
        if isinstance(weight, Tensor):
            table = weight.detach().cpu().contiguous()
            self._table = HostRows(table.pin_memory() if self._pins_weight else table)
        else:
            self._table = weight
        self._is_exposed, self._requires_grad = False, self._table.tensor.requires_grad

    def _notice_writes(self) -> None:
        """Compare the version counters of the cache and the table; see [Note: newer copies].

        Raises:
            RuntimeError: The table was changed while the cache had newer rows.
        """
        changed = self.in_flight.take_changed()
        if self._table.tensor._version != self._table_version:
            # It was handed out after the cache was written back.
            num_newer = int(self._is_newer.sum())
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
        self._is_newer[slots] = True
        self._table.begin_change()

    def _check_foreign_writes(self) -> None:
        """Check that rows without a gradient are as in the table, after writes without a known optimizer.

        Raises:
            RuntimeError: A row differs; all are read again.
        """
        others = (self.row_of >= 0) & ~self._is_newer & ~self.in_flight.has_grad()
        slots = others.nonzero().flatten()
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
        slots = ((self.row_of >= 0) & ~self._is_newer).nonzero().flatten()
        for piece, rows in self._pieces(slots, self.row_of[slots]):
            self._read_values(piece, rows)
        self._remember_versions()

    def _move(self, exchange: RowExchange) -> int:
        """Write the leaving rows that have changed, read the entering ones; return the number written."""
        is_newer = self._is_newer[exchange.left_slots]
        left_slots, leaving = exchange.left_slots[is_newer], exchange.leaving[is_newer]
        self._write_back(left_slots, leaving)
        if exchange.entering.numel():
            begin = perf_counter()
            try:
                # After the write-back: the entering rows take the slots of the leaving ones.
                self._slots.apply(exchange)
                for slots, rows in self._pieces(exchange.slots, exchange.entering):
                    self._read_values(slots, rows)
                    self.states.read(slots, rows)
            except BaseException:  # an interrupt, too: no slot may have the values of another row
                self._slots.drop(exchange)
                raise
            self._seconds_in += perf_counter() - begin
            self._bytes_in += exchange.entering.numel() * self._row_bytes
        return leaving.numel()

    def _write_back(self, slots: Tensor, rows: Tensor) -> None:
        """Write rows from slots to the table."""
        if not slots.numel():
            return
        begin = perf_counter()
        for piece, piece_rows in self._pieces(slots, rows):
            values = self.param.data.index_select(0, piece.to(self.param.device)).cpu()
            self._table.write(piece_rows, values)
            self.states.write_back(piece, piece_rows)
        self._is_newer[slots] = False
        self._seconds_out += perf_counter() - begin
        self._bytes_out += slots.numel() * self._row_bytes

    def _read_values(self, slots: Tensor, rows: Tensor) -> None:
        """Read rows of the table into slots; `data` has no version counter that a graph would compare."""
        device = self.param.device
        values = self._table.read(rows)
        if self._pins_weight:
            values = values.pin_memory()
        values = values.to(device, non_blocking=self.async_copy)
        self.param.data.index_copy_(0, slots.to(device), values)

    def _pieces(self, slots: Tensor, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Cut slots and rows into pieces of `buffer_size`."""
        size = self.buffer_size or max(_PIECE_BYTES // max(self._row_bytes, 1), 1)
        return zip(slots.split(size), rows.split(size), strict=True)

    @property
    def _row_bytes(self) -> int:
        return self.dim * self.param.element_size()
