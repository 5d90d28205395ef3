"""Rows of a table, or of a state of it, in host memory or in a file.

[Note: rows in a file]
The file is memory of the process, which the system reads from the disk and takes back when others need it.
Rows in use are far apart: they are read through a mapping of their own, without read-ahead, and their pages
are announced before, so that the disk reads them side by side. The tensor of all rows is another mapping,
which is read in order.
"""

import math
import mmap
import secrets
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from colossalai.nn.optimizer import PAGE, StateFile

_BLOCK_BYTES = 1 << 24  # copied at a time in a pass over all rows
_BLOCK_NUMBERS = 1 << 22  # a multiple of 16
_NUM_ANNOUNCED = 8192  # rows whose pages are read side by side
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class HostRows:
    """Rows in host memory.

    Args:
        tensor: The rows, (rows, ...), used in place.

    Attributes:
        tensor: The rows; of a file, a tensor whose memory is the file.
        path: The file of a table in a file, else None.
        is_own: Whether this process may write them: a fork of the process that has opened a file may not.
        is_in_file: Whether they are in a file, as tables and states can be.
    """

    path: Path | None = None
    is_own = True
    is_in_file = False

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def read(self, rows: Tensor) -> Tensor:
        """Return a copy of rows, (n, ...)."""
        values = torch.from_numpy(_bits(self.tensor).take(rows.numpy(), axis=0))
        return values.view(self.tensor.dtype).view(len(rows), *self.tensor.shape[1:])

    def write(self, rows: Tensor, values: Tensor) -> None:
        """Replace rows; the version of the tensor counts the writes of others only."""
        _bits(self.tensor)[rows.numpy()] = _bits(values)

    @torch.no_grad()
    def load(self, source: Tensor) -> None:
        """Replace all rows, a block at a time."""
        num_rows, row_bytes = len(self.tensor), max(self.tensor[:1].nbytes, 1)
        for begin in range(0, num_rows, size := max(_BLOCK_BYTES // row_bytes, 1)):
            self.tensor[begin : begin + size].copy_(source[begin : begin + size])
            self.release_memory()

    @torch.no_grad()
    def fill_normal(self) -> None:
        """Draw normal values, a block at a time: those of `torch.nn.init.normal_` for all rows."""
        numbers = self.tensor.view(-1)
        # Torch draws 16 at a time, and the last 16 again if they are not all.
        begins = range(0, max(numbers.numel() - 16, 1), _BLOCK_NUMBERS)
        for begin, end in zip(begins, (*begins[1:], numbers.numel()), strict=True):
            numbers[begin:end].normal_()
            self.release_memory()

    def loading(self) -> AbstractContextManager[None]:
        """Context in which all rows are replaced; those of a file are unfinished after an error."""
        return nullcontext()

    def begin_change(self) -> None:
        """Note that rows are of an earlier step than others, or than the cache."""

    def finish(self) -> None:
        """Note that all rows are of the same step."""

    def check_readable(self, name: str) -> None:
        """Check that the rows of a table in a file can be used; errors have the table's `name`."""

    def check_lasting(self, name: str) -> None:
        """Check that a table in a file has not been deleted."""

    def warn_if_deleted(self, name: str) -> None:
        """Warn if a table in a file has been deleted."""

    def release(self) -> None:
        """Release the file of a table."""

    def release_memory(self) -> None:
        """Release the memory of rows that are in a file, too."""

    def new_rows(self, shape: Sequence[int], dtype: torch.dtype) -> "HostRows":
        """Return rows of zeros in the same kind of memory."""
        return HostRows(torch.zeros(tuple(shape), dtype=dtype, device="cpu"))


class FileRows(HostRows):
    """Rows in a file; see [Note: rows in a file].

    Args:
        file: The file.
        shape: Shape of the rows, (rows, ...).
        dtype: Their data type.
        offset: Offset of the first row, a multiple of `PAGE`.
    """

    is_in_file = True

    def __init__(self, file: StateFile, shape: Sequence[int], dtype: torch.dtype, *, offset: int = 0) -> None:
        self._file = file
        self._offset = offset
        self._row_bytes = math.prod(shape[1:]) * dtype.itemsize
        super().__init__(file.tensor(offset, math.prod(shape), dtype).view(tuple(shape)))
        self._mapping = file.new_mapping()
        self._mapping.madvise(mmap.MADV_RANDOM)
        scattered = torch.frombuffer(self._mapping, dtype=dtype, count=math.prod(shape), offset=offset)
        self._scattered = scattered.view(tuple(shape))

    def read(self, rows: Tensor) -> Tensor:
        """Return a copy of rows, (n, ...).

        Raises:
            OSError: The file was cut.
        """
        self._file.check()
        values = torch.empty((len(rows), *self.tensor.shape[1:]), dtype=self.tensor.dtype, device="cpu")
        for part, out in zip(rows.split(_NUM_ANNOUNCED), values.split(_NUM_ANNOUNCED), strict=True):
            self._announce(part)
            np.take(_bits(self._scattered), part.numpy(), axis=0, out=_bits(out), mode="clip")
        return values

    def write(self, rows: Tensor, values: Tensor) -> None:
        """Replace rows.

        Raises:
            OSError: The file was cut.
        """
        self._file.check()
        for part, new in zip(rows.split(_NUM_ANNOUNCED), values.split(_NUM_ANNOUNCED), strict=True):
            self._announce(part)
            _bits(self._scattered)[part.numpy()] = _bits(new)

    def release_memory(self) -> None:
        """Release the memory of `tensor`; nothing is lost."""
        self._file.forget_pages()

    def new_rows(self, shape: Sequence[int], dtype: torch.dtype) -> HostRows:
        """Return rows of zeros in a file of the same folder, without a name: it ends with its last reader.

        Raises:
            OSError: The file cannot be made.
        """
        path = self._file.path.with_name(f".{secrets.token_hex(8)}")
        try:
            file = StateFile(path, math.prod(shape) * dtype.itemsize, direct=False, is_named=False)
        except OSError as error:
            error.add_note("The states of an optimizer are in files of the folder of its table.")
            raise
        return FileRows(file, shape, dtype)

    def _announce(self, rows: Tensor) -> None:
        """Let the system read the pages of rows."""
        begins = self._offset + rows.sort().values * self._row_bytes
        first = begins // PAGE
        stop = (begins + (self._row_bytes - 1)) // PAGE + 1
        is_new = torch.ones_like(first, dtype=torch.bool)
        is_new[1:] = first[1:] > stop[:-1]  # else a run of pages goes on
        is_last = is_new.roll(-1)
        runs = zip((first[is_new] * PAGE).tolist(), (stop[is_last] * PAGE).tolist(), strict=True)
        for begin, end in runs:
            self._mapping.madvise(mmap.MADV_WILLNEED, begin, end - begin)


def read_rows(table: HostRows, rows: Tensor) -> Tensor:
    """Return a copy of rows of a table, (n, ...)."""
    return table.read(rows)


def write_rows(table: HostRows, rows: Tensor, values: Tensor) -> None:
    """Replace rows of a table."""
    table.write(rows, values)


def _bits(tensor: Tensor) -> NDArray[Any]:
    """Return the memory of a tensor, (rows, ...), as integers, (rows, width): numpy has no bfloat16."""
    flat = tensor.detach().view(len(tensor), math.prod(tensor.shape[1:]))
    bits: NDArray[Any] = flat.view(BITS[tensor.element_size()]).numpy()
    return bits
