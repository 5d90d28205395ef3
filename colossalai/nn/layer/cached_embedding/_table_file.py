"""A table in a file of the safetensors format, which is trained in place.

[Note: marks]
A row is written when it is evicted, so between two steps the file is older than the cache, or has rows of
several steps. A mark in the metadata has it, from the first step on until all rows are written. The header is
a page, which is written at once.
"""

import errno
import gc
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from colossalai.logging import get_dist_logger
from colossalai.nn.layer.cached_embedding._host_rows import FileRows
from colossalai.nn.optimizer import PAGE, StateFile

KEY = "weight"
"""Name of the table in the file."""

_FILLING, _CHANGING, _FINISHED = "filling", "changing", "finished"
_LENGTH_BYTES = 8  # of the header's length, which is not counted by it
_DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


class TableFile(FileRows):
    """The rows of a table in a file; see [Note: marks] and [Note: rows in a file].

    Args:
        path: The file. It is made, with its folder, if it is not there.
        shape: Shape of the table, (rows, dim).
        dtype: Its data type.

    Raises:
        ValueError: The file is not a table of this shape and data type.
        RuntimeError: Another table, of this process or another, uses the file.
        OSError: The file cannot be made or opened; with the path, the bytes needed and the bytes free.

    Attributes:
        path: The file.
        is_new: Whether it has no values yet.
        is_unfinished: Whether it has rows of different steps.
    """

    def __init__(self, path: str | Path, shape: Sequence[int], dtype: torch.dtype) -> None:
        self.path: Path = Path(path).resolve()
        self._shape, self._dtype = tuple(shape), dtype
        if dtype not in _DTYPES:
            raise ValueError(f"a table in a file cannot be of type {dtype}; it can be one of {[*_DTYPES]}")
        if min(shape) < 1:
            raise ValueError(f"a table in a file cannot have the shape {self._shape}; it has no rows")
        size = PAGE + shape[0] * shape[1] * dtype.itemsize
        if self.path.is_file() and _is_blank(self.path, size):
            self.path.unlink()
        is_made = not self.path.exists()
        if is_made:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        else:
            self._check_file()
            self._check_header()
        file = StateFile(self.path, size, direct=False, is_new=is_made, mode=0o666)
        self._owner, self._is_released = os.getpid(), False
        self._lock(file)
        super().__init__(file, shape, dtype, offset=PAGE)
        mark = _FILLING if is_made else self._read_mark()
        self.is_new = self._is_discardable = mark == _FILLING
        self.is_unfinished = mark not in (_FILLING, _FINISHED)
        self._mark = "" if is_made else mark
        self._set_mark(mark)

    @property
    def is_own(self) -> bool:  # type: ignore[override]
        """Whether this process has opened the file and not released it, and not a parent of it."""
        return os.getpid() == self._owner and not self._is_released

    def write(self, rows: Tensor, values: Tensor) -> None:
        """Replace rows, of which others may be older from now on.

        Raises:
            OSError: The file was cut.
        """
        self._check_own("the table")
        self.begin_change()
        super().write(rows, values)

    def load(self, source: Tensor) -> None:
        """Replace all rows, a block at a time."""
        with self.loading():
            super().load(source)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Context in which all rows are replaced; they are unfinished after an error."""
        self._check_own("the table")
        self._file.check()
        self.is_unfinished = True
        self.begin_change()
        yield
        self.is_unfinished = False
        self.finish()

    def begin_change(self) -> None:
        """Note that rows are of an earlier step than others, or than the cache."""
        if not self.is_new:
            self._set_mark(_CHANGING)

    def finish(self) -> None:
        """Note that all rows are of the same step."""
        if not self.is_unfinished:
            self.is_new = False
            self._set_mark(_FINISHED)

    def check_readable(self, name: str) -> None:
        """Check that the rows can be used.

        Raises:
            RuntimeError: The file was released, a parent of this process has opened it, or it has rows of
                different steps.
            OSError: The file was cut.
        """
        self._check_own(name)
        if self.is_unfinished:
            raise RuntimeError(
                f"{self.path} has rows of different steps, since the process that trained {name} was killed "
                "or load_state_dict interrupted: load a checkpoint with load_state_dict, or delete the file "
                "for a new table"
            )
        self._file.check()

    def check_lasting(self, name: str) -> None:
        """Check that the file has not been deleted.

        Raises:
            FileNotFoundError: The file was deleted, or replaced by another one.
        """
        if self._file.is_deleted:
            raise FileNotFoundError(
                errno.ENOENT,
                f"the file of {name} was deleted or replaced in training: save the state_dict() of the "
                "module, and load it into one with a new file",
                str(self.path),
            )

    def warn_if_deleted(self, name: str) -> None:
        """Warn if the file has been deleted."""
        if self._file.is_deleted:
            get_dist_logger().warning(f"{self.path}, the file of {name}, was deleted: its table is lost")

    def release(self) -> None:
        """Let others use the file."""
        if self.is_own:
            self._file.unlock()
            self._is_released = True

    def discard(self) -> None:
        """Release the file, and delete it if it had no values when it was opened."""
        if self._is_discardable:
            self.path.unlink(missing_ok=True)
        self.release()

    def _check_own(self, name: str) -> None:
        """Check that this process has opened the file.

        Raises:
            RuntimeError: The file was released, or a parent of this process has opened it.
        """
        if not self.is_own:
            reason = "was closed" if self._is_released else "was opened by another process, which uses it"
            raise RuntimeError(
                f"{self.path}, the file of {name}, {reason}: make a module for it in this process, when no "
                "other one uses it"
            )

    def _lock(self, file: StateFile) -> None:
        """Lock the file.

        Raises:
            RuntimeError: Another table uses it.
        """
        try:
            file.lock()
        except BlockingIOError:
            gc.collect()  # a module of this process, in a cycle
            try:
                file.lock()
            except BlockingIOError:
                raise RuntimeError(
                    f"{self.path} is used by another table, of this process or another: give each a "
                    "weight_path of its own, or call close() of the other module (after a kill, wait some "
                    "seconds for the end of its data loader's workers)"
                ) from None

    def _check_file(self) -> None:
        """Check that an existing file can be read and written.

        Raises:
            OSError: The path names a folder, a device or a pipe, or this user may not write the file.
        """
        if self.path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "weight_path is a folder", str(self.path))
        if not self.path.is_file():
            raise OSError(errno.EINVAL, "weight_path is a device or a pipe, and no file", str(self.path))
        if not os.access(self.path, os.R_OK | os.W_OK):
            reason = "a table in a file must be readable and writable, also for evaluation"
            raise PermissionError(errno.EACCES, reason, str(self.path))

    def _set_mark(self, mark: str) -> None:
        if mark == self._mark:
            return
        self._check_own("the table")
        shape = [*self._shape]
        entry = {
            "dtype": _DTYPES[self._dtype],
            "shape": shape,
            "data_offsets": [0, shape[0] * shape[1] * self._dtype.itemsize],
        }
        text = json.dumps({"__metadata__": {"format": "pt", "rows": mark}, KEY: entry}).encode()
        length = PAGE - _LENGTH_BYTES
        header = length.to_bytes(_LENGTH_BYTES, "little") + text.ljust(length)
        self._file.write(memoryview(header), 0)
        self._mark = mark

    def _read_mark(self) -> str:
        with safe_open(self.path, "pt") as opened:
            mark: str = opened.metadata()["rows"]
        return mark

    def _check_header(self) -> None:
        """Check that the file is a table of the right shape and data type.

        Raises:
            ValueError: The file has another table, or none.
        """
        try:
            with self.path.open("rb") as file:
                length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            with safe_open(self.path, "pt") as opened:
                is_own = [*opened.keys()] == [KEY] and "rows" in (opened.metadata() or {})
                is_own = is_own and length == PAGE - _LENGTH_BYTES  # not a copy that another program made
                entry = opened.get_slice(KEY) if is_own else None
                found = entry and (tuple(entry.get_shape()), entry.get_dtype())
        except SafetensorError:
            found = None
        if found is None:
            raise ValueError(
                f"{self.path} is not a table that was made with weight_path: give the name of a new file, "
                "and load other files with load_state_dict"
            )
        wanted = (self._shape, _DTYPES[self._dtype])
        if found != wanted:
            (rows, dim), kind = found
            raise ValueError(
                f"{self.path} has a table of {rows} x {dim} of type {kind}, and this one is "
                f"{self._shape[0]} x {self._shape[1]} of type {wanted[1]}: give the name of another file, or "
                "delete it for a new table"
            )


def _is_blank(path: Path, size: int) -> bool:
    """Return whether a file is empty, or a table whose process was killed before it had a header."""
    found = path.stat().st_size
    if found == size and os.access(path, os.R_OK):
        with path.open("rb") as file:
            return not any(file.read(PAGE))
    return found == 0
