"""Line protocol over ssh: JSON messages and heartbeats between the controller and a process on a host.

Two kinds of processes use it: a host's agent, as long as a job runs (`_host_agent.py`), and the probe of
the pre-flight checks (`preflight/_probe.py`). `RemoteProcess` is the controller's end, an asyncio task for
each of the three streams of the ssh client; `ControllerLink` is the other end, with threads, since the rest
of that process blocks. A message is one line of JSON with a prefix that no shell prints, which
distinguishes it from output of a login script.

The file is sent to the hosts as source, like the probe: only the standard library, nothing newer than
Python 3.8.

[Note: heartbeats]
An open connection gives no sign of a dead link. So both ends send a heartbeat every `HEARTBEAT_S`, and an
endpoint that receives nothing for `SILENCE_S` declares its peer dead. Three cases must not look like silence:
- the login of ssh and the start of an interpreter: the controller counts from the first message on, and the
  wait for that message has a deadline of its own (`--timeout`, the contact time of the checks);
- a blocked terminal, which stops the controller's reads: `_is_busy`;
- an import or a computation of the other end's main thread: its heartbeats come from a thread.
"""

from __future__ import annotations

import asyncio
import json
import os
import queue
import select
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

HEARTBEAT_S = 2.0
SILENCE_S = 12.0  # long enough for a machine that swaps; with the grace of ending, well below 30 s

_MARK = b"\x1e"
_LONGEST_LINE = 1 << 22
_ERROR_LINES = 100  # of stderr: ssh's complaints, or a traceback
_CHUNK = 1 << 16


def encode(kind: str, **fields: Any) -> bytes:
    """Return the line of a message."""
    return _MARK + json.dumps({"kind": kind, **fields}).encode("ascii") + b"\n"


def decode(line: bytes) -> dict[str, Any] | None:
    """Return the message of a line, or None if it is something else."""
    if not line.startswith(_MARK):
        return None
    try:
        message: dict[str, Any] = json.loads(line[len(_MARK) :])
    except json.JSONDecodeError:
        return None  # cut off in the middle, by an end
    return message


_HEARTBEAT = encode("heartbeat")


def as_text(data: bytes) -> str:
    """Return bytes as text that JSON can carry; no byte is lost."""
    return data.decode("utf-8", errors="surrogateescape")


def as_bytes(text: str) -> bytes:
    """Undo `as_text`."""
    return text.encode("utf-8", errors="surrogateescape")


class RemoteProcess(ABC):
    """The controller's end: a process on a host, at the other end of an ssh client.

    Args:
        command: Starts it, with messages on its stdin and stdout.
        preamble: The first bytes of its stdin, before the first message; see [Note: variables over stdin] in
            `_environment.py`.
        heartbeat_s: Seconds between two heartbeats.
        silence_s: Seconds without a heartbeat or message after which the process is lost.

    Attributes:
        last_message_at: Time of its last message, in seconds since the epoch.
        errors: The last lines of its stderr.
    """

    def __init__(
        self,
        command: Sequence[str],
        preamble: bytes,
        *,
        heartbeat_s: float = HEARTBEAT_S,
        silence_s: float = SILENCE_S,
    ) -> None:
        self.last_message_at = time.time()
        self.errors: deque[bytes] = deque(maxlen=_ERROR_LINES)
        self._command, self._preamble = list(command), preamble
        self._heartbeat_s, self._silence_s = heartbeat_s, silence_s
        self._process: asyncio.subprocess.Process | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._last_alive = time.monotonic()
        self._has_greeted = False  # a message has come: from now on silence counts
        self._is_busy = False  # we are taking what it has said: it is not the other end that is silent

    @abstractmethod
    async def _handle(self, message: dict[str, Any]) -> None:
        """Take a message."""

    @abstractmethod
    async def _handle_output(self, line: bytes) -> None:
        """Handle a line of its stdout or stderr that is not a message."""

    @abstractmethod
    def _on_silence(self) -> None:
        """Called when nothing has come for `silence_s`, before the connection is ended."""

    @abstractmethod
    def _on_end(self, exit_code: int) -> None:
        """Called when the process has ended and all of its output has been handled."""

    async def start(self) -> None:
        """Start the process. It is in a session of its own: the terminal's Ctrl-C is for the controller.

        Raises:
            FileNotFoundError: The first word of the command is not a program of this machine.
        """
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
            limit=_LONGEST_LINE,
        )
        assert self._process.stdin is not None
        self._process.stdin.write(self._preamble)  # before the first heartbeat
        self._tasks = [asyncio.create_task(part) for part in (self._listen(self._process), self._beat())]

    def send(self, kind: str, **fields: Any) -> None:
        """Send a message; to an ended process it is lost, and `_on_end` reports that end."""
        assert self._process is not None
        assert self._process.stdin is not None
        if not self._process.stdin.is_closing():
            self._process.stdin.write(encode(kind, **fields))

    async def close(self, *, grace_s: float = 0.0) -> None:
        """End the process, and return when it has ended; the other end sees the end of its stdin.

        Args:
            grace_s: Seconds for it to end by itself, before the ssh client is killed.
        """
        process = self._process
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), grace_s)
        except TimeoutError:
            kill(process)
        listening, _ = self._tasks
        await asyncio.wait([listening], timeout=HEARTBEAT_S)  # the rest of its output
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await process.wait()

    async def _listen(self, process: asyncio.subprocess.Process) -> None:
        """Read both streams to their ends, then report the end of the process."""
        assert process.stdout is not None
        assert process.stderr is not None
        errors = asyncio.create_task(self._read_errors(process.stderr))
        while line := await _read_line(process.stdout):
            self._mark_alive()
            if line == _HEARTBEAT:
                continue
            message = decode(line)
            self._is_busy = True
            if message is None:
                await self._handle_output(line.rstrip(b"\r\n"))
            else:
                self._has_greeted = True
                await self._handle(message)
            self._is_busy = False
            self._mark_alive()
        exit_code = await process.wait()
        await asyncio.wait([errors], timeout=HEARTBEAT_S)  # a child of ssh (a ControlMaster) may hold it open
        errors.cancel()
        self._on_end(exit_code)

    async def _read_errors(self, stream: asyncio.StreamReader) -> None:
        while line := await _read_line(stream):
            self.errors.append(line.rstrip(b"\r\n"))
            if self._has_greeted:  # before the greeting the line is ssh's, and `explain_ssh` uses it
                await self._handle_output(line.rstrip(b"\r\n"))

    async def _beat(self) -> None:
        """Send heartbeats, and watch for the other end's; see [Note: heartbeats]."""
        assert self._process is not None
        assert self._process.stdin is not None
        while self._process.returncode is None and not self._process.stdin.is_closing():
            self._process.stdin.write(_HEARTBEAT)
            is_silent = self._has_greeted and time.monotonic() - self._last_alive > self._silence_s
            if is_silent and not self._is_busy:
                self._on_silence()
                kill(self._process)
                return
            await asyncio.sleep(self._heartbeat_s)

    def _mark_alive(self) -> None:
        self._last_alive, self.last_message_at = time.monotonic(), time.time()


def kill(process: asyncio.subprocess.Process) -> None:
    """End a process that may have ended by itself meanwhile."""
    with suppress(ProcessLookupError):
        process.kill()


async def _read_line(stream: asyncio.StreamReader) -> bytes:
    """Read a line, or the rest; empty at the end of the stream."""
    try:
        return await stream.readline()
    except ValueError:  # longer than any message: it is noise
        return b"(a line that is too long)\n"


class ControllerLink:
    """The other end: messages to and from the controller over stdin and stdout, and detection of its loss.

    After its construction the process's own stdin is empty, and its prints go to stderr.

    Args:
        handlers: Callables by kind of message, called in a separate thread; all other messages wait for
            `expect`.
        on_loss: Called in a thread of its own when the connection ends or nothing comes for `silence_s`.
        silence_s: Seconds without a heartbeat or message after which the controller is lost.
    """

    def __init__(
        self,
        handlers: Mapping[str, Callable[[dict[str, Any]], None]],
        *,
        on_loss: Callable[[], None],
        silence_s: float = SILENCE_S,
    ) -> None:
        self._in, self._out = os.dup(0), os.dup(1)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        os.dup2(2, 1)
        self._handlers, self._on_loss, self._silence_s = handlers, on_loss, silence_s
        self._send_lock = threading.Lock()
        self._inbox: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def start(self) -> None:
        """Begin to listen, and to send heartbeats."""
        for loop in (self._listen, self._beat):
            threading.Thread(target=loop, daemon=True, name=f"controller-link{loop.__name__}").start()

    def send(self, kind: str, **fields: object) -> None:
        """Send a message; if the controller is gone, the listening thread deals with that."""
        self._write(encode(kind, **fields))

    def expect(self, *kinds: str) -> dict[str, Any]:
        """Wait for the next message, which is one of `kinds`."""
        message = self._inbox.get()
        assert message["kind"] in kinds, f"{message['kind']} came instead of {kinds}"
        return message

    def _write(self, data: bytes) -> None:
        with self._send_lock:
            while data:
                try:
                    data = data[os.write(self._out, data) :]
                except OSError:
                    return

    def _listen(self) -> None:
        """Read, and never write: a write blocks when the link is dead, and this thread notices that."""
        rest, last_alive = b"", time.monotonic()
        while time.monotonic() - last_alive < self._silence_s:
            if not select.select([self._in], [], [], 1.0)[0]:
                continue
            chunk = os.read(self._in, _CHUNK)
            if not chunk:
                break
            last_alive = time.monotonic()
            *lines, rest = (rest + chunk).split(b"\n")
            for message in filter(None, map(decode, lines)):
                handler = self._handlers.get(message["kind"])
                if handler is not None:
                    threading.Thread(target=handler, args=(message,), daemon=True).start()
                elif message["kind"] != "heartbeat":
                    self._inbox.put(message)
        self._on_loss()  # without a word: stdout and stderr led to the controller, too

    def _beat(self) -> None:
        while True:
            self._write(_HEARTBEAT)
            time.sleep(HEARTBEAT_S)
