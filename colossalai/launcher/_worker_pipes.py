"""Worker pipes: the output of a host's ranks, line by line, each from named pipes of its own."""

import contextlib
import os
import selectors
import threading
from collections.abc import Callable
from pathlib import Path

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

_CHUNK = 1 << 16
_LONGEST_LINE = 1 << 16  # a longer one is cut: it must not fill the memory
_POLL_S = 0.2
_DRAIN_S = 2.0

OnLine = Callable[[int, str, bytes], None]
"""Called with the global rank, "out" or "err", and a line without its end."""


class LineBuffer:
    """Cuts a stream of bytes into lines; a carriage return ends one, too, so progress bars are seen."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that are complete now."""
        text = (self._rest + data).replace(b"\r\n", b"\n")
        if text.endswith(b"\r"):  # its "\n" may be in the next piece
            text, tail = text[:-1], b"\r"
        else:
            tail = b""
        *lines, rest = text.replace(b"\r", b"\n").split(b"\n")
        while len(rest) > _LONGEST_LINE:
            lines.append(rest[:_LONGEST_LINE])
            rest = rest[_LONGEST_LINE:]
        self._rest = rest + tail
        return lines

    def flush(self) -> list[bytes]:
        """Return the line that was not completed, if there is one."""
        rest, self._rest = self._rest.rstrip(b"\r"), b""
        return [rest] if rest else []


class WorkerPipes(LogsSpecs):
    """Pipes for the ranks' output, as torch's agent takes them, with a thread that reads them.

    Args:
        folder: A private folder for the pipes and for the ranks' error files.
        on_line: Called for each line; from one thread, so lines never mix.
    """

    def __init__(self, folder: Path, on_line: OnLine) -> None:
        super().__init__(log_dir=str(folder))
        self._folder, self._on_line = folder, on_line
        self._selector = selectors.DefaultSelector()
        self._buffers: dict[int, tuple[int, str, LineBuffer]] = {}  # by file descriptor
        self._thread = threading.Thread(target=self._read_all, daemon=True, name="rank-pipes")
        self._is_draining = threading.Event()

    @property
    def root_log_dir(self) -> str:
        """The folder."""
        return str(self._folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Make the pipes of all ranks; torch calls this before it starts them."""
        places = LogsDest()
        for local_rank, environment in envs.items():
            global_rank = int(environment["RANK"])
            places.stdouts[local_rank] = self._make_pipe(global_rank, "out")
            places.stderrs[local_rank] = self._make_pipe(global_rank, "err")
            error_file = str(self._folder / f"{global_rank}.error.json")
            places.error_files[local_rank] = environment["TORCHELASTIC_ERROR_FILE"] = error_file
        self._thread.start()
        return places

    def drain(self) -> None:
        """Read the remaining output of ranks that have ended."""
        self._is_draining.set()
        if self._thread.ident is not None:
            self._thread.join(_DRAIN_S)

    def _make_pipe(self, global_rank: int, stream: str) -> str:
        path = str(self._folder / f"{global_rank}.{stream}")
        os.mkfifo(path, 0o600)
        pipe = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # with a reader there, the writer does not block
        self._buffers[pipe] = (global_rank, stream, LineBuffer())
        self._selector.register(pipe, selectors.EVENT_READ)
        return path

    def _read_all(self) -> None:
        """Read until all writers are gone, or until nothing comes after the end of the ranks."""
        while self._selector.get_map():
            ready = self._selector.select(0.0 if self._is_draining.is_set() else _POLL_S)
            if not ready and self._is_draining.is_set():
                break
            for key, _ in ready:
                self._read(key.fd)
        for global_rank, stream, buffer in self._buffers.values():
            for line in buffer.flush():
                self._on_line(global_rank, stream, line)

    def _read(self, pipe: int) -> None:
        global_rank, stream, buffer = self._buffers[pipe]
        with contextlib.suppress(BlockingIOError):
            data = os.read(pipe, _CHUNK)
            if not data:
                self._selector.unregister(pipe)
            for line in buffer.feed(data):
                self._on_line(global_rank, stream, line)
