"""Output of the ranks: lines on the screen with "[host:rank]" before them, and a log file per rank.

A line is one write, so lines never mix. A screen that does not take any more (a pager, a paused terminal)
must not keep the controller from beating: a write that would block waits in a thread.
"""

import asyncio
import os
import queue
import select
import threading
from pathlib import Path
from typing import BinaryIO

STDOUT, STDERR = 1, 2
_PIPE_BUF = select.PIPE_BUF


class Screen:
    """Writes lines.

    Args:
        log_dir: A folder that gets the file rank_N.log for each rank; None for no files.
    """

    def __init__(self, log_dir: Path | None) -> None:
        self._log_dir = log_dir
        self._files: dict[int, BinaryIO] = {}
        self._jobs: queue.SimpleQueue[tuple[int, bytes, asyncio.Future[None]] | None] = queue.SimpleQueue()
        self._lock = asyncio.Lock()
        if log_dir is not None:
            log_dir.mkdir(parents=True, exist_ok=True)
        threading.Thread(target=self._write_slowly, daemon=True, name="screen").start()

    async def rank_line(self, host: str, global_rank: int, stream: str, line: bytes) -> None:
        """Show a line of a rank, and put it into the rank's file."""
        if self._log_dir is not None:
            if global_rank not in self._files:
                self._files[global_rank] = (self._log_dir / f"rank_{global_rank}.log").open("wb", buffering=0)
            self._files[global_rank].write(line + b"\n")
        await self._show(
            STDERR if stream == "err" else STDOUT, b"[%s:%d] %s\n" % (host.encode(), global_rank, line)
        )

    async def node_line(self, host: str, line: bytes) -> None:
        """Show output of ssh or a login script about a node."""
        await self._show(STDERR, b"[%s] %s\n" % (host.encode(), line))

    async def launcher_line(self, text: str) -> None:
        """Show a line of our own."""
        await self._show(STDERR, f"colossalai run: {text}\n".encode())

    def close(self) -> None:
        """Close the files, and end the thread, unless a screen holds it: then it ends with the process."""
        self._jobs.put(None)
        for file in self._files.values():
            file.close()
        self._files.clear()

    async def _show(self, stream: int, line: bytes) -> None:
        async with self._lock:
            if len(line) <= _PIPE_BUF and select.select([], [stream], [], 0)[1]:
                _write(stream, line)
                return
            written = asyncio.get_running_loop().create_future()
            self._jobs.put((stream, line, written))
            await written

    def _write_slowly(self) -> None:
        while (job := self._jobs.get()) is not None:
            stream, line, written = job
            _write(stream, line)
            written.get_loop().call_soon_threadsafe(_finish, written)


def _finish(written: "asyncio.Future[None]") -> None:
    if not written.done():
        written.set_result(None)


def _write(stream: int, data: bytes) -> None:
    while data:
        try:
            data = data[os.write(stream, data) :]
        except OSError:
            return  # the reader is gone (`| head`); the job continues, as with a file of its own
