"""Moves of rows between the tables of a host and a cache, by the main thread or by one of their own.

[Note: moves on a thread]
With prefetch a thread reads rows into memory before they enter the cache. It also writes the rows that have
left it, which the main thread has copied to memory. Their table has older values until then, so each read of
a table by the main thread begins with `wait`. A row that could not be written is kept: the next `wait` writes
it again, or raises the error. Nothing is lost.
"""

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from functools import partial
from threading import RLock, Thread, current_thread
from time import perf_counter
from typing import Any, NamedTuple, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor, nn

from colossalai.nn.layer.cached_embedding._host_rows import HostRows, read_rows, write_rows
from colossalai.nn.layer.cached_embedding._row_states import RowStates
from colossalai.nn.layer.cached_embedding._slots import BatchSlots, RowExchange, SlotMap

_PIECE_BYTES = 1 << 26  # copied at a time by default

T = TypeVar("T")


class ReadRows(NamedTuple):
    """Rows that were read before they enter.

    Attributes:
        values: For each table, of weights and of states, its values.
        seconds: Time that reading has taken.
    """

    values: dict[HostRows, Tensor]
    seconds: float


class PlannedMove(NamedTuple):
    """Rows that are to enter for a batch, and their values.

    Attributes:
        exchange: The rows.
        slots: (n,): the slot of each id once they have entered.
        rows: Values of the entering rows.
        version: Number of moves and of refreshes of the cache that it was made for.
    """

    exchange: RowExchange
    slots: BatchSlots
    rows: ReadRows
    version: tuple[int, int]


class RowMoves:
    """Moves of rows between a cache and its tables, with the states of optimizers.

    Args:
        slot_map: The map of rows to slots.
        param: The cache, (slots, dim).
        buffer_size: Number of rows that are copied at a time; 0 for 64 MiB of them.
        pins_weight: Whether rows pass through pinned memory.

    Attributes:
        param: The cache.
        table: The table, (rows, dim).
        states: States of optimizers.
        is_newer: (slots,): whether a row is newer than in the table.
        is_fresh: (slots,): whether a row came before its lookup.
        has_been_ahead: Whether any row has.
        async_copy: Whether copies to an accelerator may overlap with the host's work.
    """

    table: HostRows
    states: RowStates
    async_copy = False

    def __init__(
        self, slot_map: SlotMap, param: nn.Parameter, buffer_size: int, *, pins_weight: bool
    ) -> None:
        self.param = param
        self.pins_weight = pins_weight
        self.is_newer = torch.zeros_like(slot_map.num_pins, dtype=torch.bool)
        self.is_fresh = torch.zeros_like(self.is_newer)
        self.has_been_ahead = False
        self._map = slot_map
        self._buffer_size = buffer_size
        self._worker = _RowWorker()
        self._num_written = 0
        self._bytes_in = self._bytes_out = 0
        self._seconds_in = self._seconds_out = 0.0

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key not in ("states", "_worker")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._worker = _RowWorker()

    @property
    def read_bandwidth(self) -> float:
        """Megabytes per second of the rows read so far; 0.0 before the first."""
        return self._bytes_in / 1e6 / self._seconds_in if self._bytes_in else 0.0

    @property
    def write_bandwidth(self) -> float:
        """Megabytes per second of the rows written so far; 0.0 before the first."""
        seconds = self._seconds_out + self._worker.seconds_writing
        return self._bytes_out / 1e6 / seconds if self._bytes_out else 0.0

    @property
    def tables(self) -> list[HostRows]:
        """The table, and those of the states."""
        return [self.table, *self.states.tables]

    def take_num_written(self) -> int:
        """Return the number of rows that exchanges have written since the last call."""
        number, self._num_written = self._num_written, 0
        return number

    def call(self, function: Callable[[], T]) -> "Future[T]":
        """Call a function on the thread, after all writes so far."""
        return self._worker.call(function)

    def wait(self) -> None:
        """Wait until the thread has nothing to do, and all rows that have left are in their tables."""
        self._worker.wait()

    def end_thread(self) -> None:
        """End the thread, after its writes; those that have failed are kept."""
        self._worker.end()

    def exchange(
        self, exchange: RowExchange, *, read_before: ReadRows | None = None, is_ahead: bool = False
    ) -> None:
        """Write the leaving rows that have changed, read the entering ones.

        Args:
            exchange: The rows.
            read_before: Values of the entering rows, if they were read.
            is_ahead: Whether it is made before the lookup of its batch: the thread writes the leaving rows.
        """
        is_newer = self.is_newer.numpy().take(exchange.left_slots.numpy())
        left_slots, leaving = exchange.left_slots[is_newer], exchange.leaving[is_newer]
        self.write_back(left_slots, leaving, self._worker.write if is_ahead else write_rows)
        self._num_written += leaving.numel()
        if not exchange.entering.numel():
            return
        begin = perf_counter()
        try:
            # After the write-back: the entering rows take the slots of the leaving ones.
            self._map.apply(exchange)
            self.has_been_ahead |= is_ahead
            self.is_fresh.numpy()[exchange.slots.numpy()] = is_ahead
            self._read(exchange, {} if read_before is None else read_before.values)
        except BaseException:  # an interrupt, too: no slot may have the values of another row
            self._map.drop(exchange)
            raise
        self._seconds_in += perf_counter() - begin + (0.0 if read_before is None else read_before.seconds)
        self._bytes_in += exchange.entering.numel() * self._row_bytes

    def write_back(
        self, slots: Tensor, rows: Tensor, write: Callable[[HostRows, Tensor, Tensor], None] = write_rows
    ) -> None:
        """Write rows from slots to the tables, by a function of table, rows and values."""
        if not slots.numel():
            return
        begin = perf_counter()
        for piece, piece_rows in self._pieces(slots, rows):
            write(self.table, piece_rows, self.param.data.index_select(0, piece.to(self.param.device)).cpu())
            self.states.write_back(piece, piece_rows, write)
        self.is_newer.numpy()[slots.numpy()] = False
        self._seconds_out += perf_counter() - begin
        self._bytes_out += slots.numel() * self._row_bytes

    def read_weights(self, slots: Tensor, rows: Tensor) -> None:
        """Read rows of the table into slots."""
        for piece, piece_rows in self._pieces(slots, rows):
            self._put(piece, self.table.read(piece_rows))

    def _read(self, exchange: RowExchange, values: dict[HostRows, Tensor]) -> None:
        """Read the entering rows, with their states, into their slots."""
        begin = 0
        for slots, rows in self._pieces(exchange.slots, exchange.entering):
            end = begin + len(rows)

            def read(table: HostRows, rows: Tensor, part: slice = slice(begin, end)) -> Tensor:
                return values[table][part] if table in values else read_rows(table, rows)

            self._put(slots, read(self.table, rows))
            self.states.read(slots, rows, read)
            begin = end

    def _put(self, slots: Tensor, values: Tensor) -> None:
        """Put values into slots; `data` has no version counter that a graph would compare."""
        device = self.param.device
        if self.pins_weight and not values.is_pinned():
            values = values.pin_memory()
        values = values.to(device, non_blocking=self.async_copy)
        self.param.data.index_copy_(0, slots.to(device), values)

    def _pieces(self, slots: Tensor, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Cut slots and rows into pieces of `buffer_size`."""
        size = self._buffer_size or max(_PIECE_BYTES // max(self._row_bytes, 1), 1)
        return zip(slots.split(size), rows.split(size), strict=True)

    @property
    def _row_bytes(self) -> int:
        return self.param.shape[1] * self.param.element_size()


def read_tables(tables: Sequence[HostRows], rows: Tensor, *, pins: bool) -> ReadRows:
    """Read rows of tables into memory.

    Args:
        tables: The tables.
        rows: (n,): the rows.
        pins: Whether the memory is pinned.
    """
    begin = perf_counter()
    values = {table: table.read(rows) for table in tables}
    if pins:
        values = {table: each.pin_memory() for table, each in values.items()}
    return ReadRows(values, perf_counter() - begin)


class _Write(NamedTuple):
    """Values of rows that have left a cache, and are not in their table yet."""

    table: HostRows
    rows: Tensor
    values: Tensor


class _RowWorker:
    """A thread that writes rows and calls functions, in order, from the first of them to `end`.

    Attributes:
        seconds_writing: Time that writes have taken.
    """

    def __init__(self) -> None:
        self.seconds_writing = 0.0
        self._writes: deque[_Write] = deque()
        self._executor: ThreadPoolExecutor | None = None
        self._last: Future[None] | None = None
        self._lock = RLock()  # one thread writes: an interrupt can come before `_last` is set
        self._threads: WeakSet[Thread] = WeakSet()
        self._owner = os.getpid()

    def write(self, table: HostRows, rows: Tensor, values: Tensor) -> None:
        """Write rows to a table later."""
        self._writes.append(_Write(table, rows, values))
        self._submit(self._write_all)

    def call(self, function: Callable[[], T]) -> "Future[T]":
        """Call a function later, after all writes so far; the future has the error of a write, too."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                self._write_all()
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        self._submit(run)
        return future

    def wait(self) -> None:
        """Wait until the thread has nothing to do, and all rows are written."""
        if self._is_own_thread:  # it collects garbage, and ends a loop or a module
            return
        self._check_fork()
        if self._last is not None:
            wait_for([self._last])
        self._last = None
        self._write_all()

    def end(self) -> None:
        """End the thread, after its writes; a later call starts another one."""
        self._check_fork()
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(wait=False)

    def _submit(self, function: Callable[[], None]) -> None:
        self._check_fork()
        if self._executor is None:
            begin = partial(_add_thread, self._threads)
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="cached-rows", initializer=begin)
        try:
            self._last = self._executor.submit(function)
        except RuntimeError:  # the main thread of the process has ended
            function()
        except BaseException:  # an interrupt, which can leave the executor without a thread
            self._executor = None
            raise

    @property
    def _is_own_thread(self) -> bool:
        return current_thread() in self._threads

    def _check_fork(self) -> None:
        """Forget the thread in a fork, which has none, and rows of files, which its parent writes."""
        if os.getpid() != self._owner:
            self._executor = self._last = None
            self._writes = deque(each for each in self._writes if not each.table.is_in_file)
            self._lock, self._owner = RLock(), os.getpid()

    def _write_all(self) -> None:
        begin = perf_counter()
        with self._lock:
            while self._writes:
                write = self._writes[0]
                write.table.write(write.rows, write.values)
                # Not before: a failed or interrupted write is made again. Garbage that is collected in a
                # write can end a module, whose flush makes all of them.
                if self._writes and self._writes[0] is write:
                    self._writes.popleft()
        self.seconds_writing += perf_counter() - begin


def _add_thread(threads: "WeakSet[Thread]") -> None:
    threads.add(current_thread())
