"""A node of a job as the controller sees it: the process that leads to its agent, and what that said."""

import asyncio
import signal
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from enum import IntEnum
from typing import Any

from colossalai.cluster import Host
from colossalai.launcher._failure import NodeLoss, RankError, RankState
from colossalai.launcher._output import Screen
from colossalai.launcher._protocol import BEAT_S, SILENCE_S, Message, as_bytes, decode, encode

_LONGEST_MESSAGE = 1 << 20
_ERROR_LINES = 20  # of ssh's and the agent's stderr, kept for the report


class Stage(IntEnum):
    """How far an agent has come; it only goes forward."""

    STARTING = 0
    HELLO = 1
    READY = 2
    LISTENING = 3
    STARTED = 4
    DONE = 5
    GONE = 6  # ended, refused or lost


_STAGE_OF = {
    "hello": Stage.HELLO,
    "ready": Stage.READY,
    "listening": Stage.LISTENING,
    "started": Stage.STARTED,
    "done": Stage.DONE,
}


class AgentHandle:
    """One node in one start of a job.

    Args:
        host: The machine.
        command: Starts its agent, with messages on stdin and stdout.
        variables: The first line for its stdin.
        screen: Where its lines go.
        on_change: Called when there is news.
    """

    def __init__(
        self, host: Host, command: list[str], variables: bytes, screen: Screen, on_change: Callable[[], None]
    ) -> None:
        self.host, self._command, self._screen, self._on_change = host, command, screen, on_change
        self._variables = variables
        self.stage = Stage.STARTING
        self.port = 0
        self.has_failed = False  # a rank has; which, it says when it has ended
        self.ranks: list[RankState] = []  # those that had failed when it ended
        self.loss: NodeLoss | None = None
        self.refusal: str | None = None
        self._errors: deque[bytes] = deque(maxlen=_ERROR_LINES)
        self._tasks: list[asyncio.Task[None]] = []
        self._heard_at = time.time()
        self._heard = time.monotonic()
        self._is_showing = False
        self._has_ended = False

    @property
    def is_in_trouble(self) -> bool:
        """Whether the job cannot go on with it."""
        return self.has_failed or self.loss is not None or self.refusal is not None

    async def start(self) -> None:
        """Start the process. It is in a session of its own: the terminal's Ctrl-C is for the controller."""
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
            limit=_LONGEST_MESSAGE,
        )
        assert self._process.stdin is not None
        self._process.stdin.write(self._variables)  # before the first beat
        self._tasks = [asyncio.create_task(part()) for part in (self._listen, self._beat)]

    def send(self, kind: str, **fields: Any) -> None:
        """Send a message; one to a node that is gone is lost."""
        stdin = self._process.stdin
        assert stdin is not None
        if not stdin.is_closing():
            stdin.write(encode(kind, **fields))

    def give_up(self) -> None:
        """Note that the agent did not end when it was asked to."""
        self.loss = self.loss or NodeLoss(
            host=self.host.name,
            what="its agent did not end when asked to, and was killed",
            time=self._heard_at,
        )

    async def close(self) -> None:
        """End the process; the agent notices that its connection has ended."""
        if self._process.returncode is None:
            self._process.kill()
        await asyncio.wait(self._tasks, timeout=BEAT_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._process.wait()

    async def _listen(self) -> None:
        """Read both streams to their ends, then say how the agent is gone."""
        assert self._process.stderr is not None
        errors = asyncio.create_task(self._read_errors(self._process.stderr))
        await self._read_messages()
        code = await self._process.wait()
        await asyncio.wait([errors], timeout=BEAT_S)  # a child of ssh (a ControlMaster) may hold it open
        errors.cancel()
        if not self._has_ended and self.loss is None:
            self._lose(self._describe_end(code))
        self._reach(Stage.GONE)

    async def _read_messages(self) -> None:
        assert self._process.stdout is not None
        while line := await _read_line(self._process.stdout):
            self._hear()
            message = decode(line)
            self._is_showing = True  # what waits behind a screen that is full is not missing
            if message is None:
                await self._screen.node_line(self.host.name, line.rstrip(b"\r\n"))
            elif message["kind"] == "line":
                text = as_bytes(message["text"])
                await self._screen.rank_line(self.host.name, message["rank"], message["stream"], text)
            else:
                self._take(message)
            self._is_showing = False
            self._hear()

    async def _read_errors(self, stream: asyncio.StreamReader) -> None:
        while line := await _read_line(stream):
            self._errors.append(line.rstrip(b"\r\n"))
            if self.stage > Stage.STARTING:  # before, it is ssh that speaks, and the report has it
                await self._screen.node_line(self.host.name, line.rstrip(b"\r\n"))

    def _take(self, message: Message) -> None:
        kind = message["kind"]
        if kind == "listening":
            self.port = message["port"]
        elif kind == "failed":
            self.has_failed = True
        elif kind == "refused":
            self.refusal = message["reason"]
        elif kind == "ended":
            # Times are by the node's clock, which may differ from ours.
            shift = time.time() - message["now"]
            self.ranks = [_read_rank(rank, self.host.name, shift) for rank in message["ranks"]]
        self._has_ended |= kind in ("ended", "refused")
        if kind != "beat":
            self._reach(_STAGE_OF.get(kind, self.stage))

    async def _beat(self) -> None:
        """Beat, and watch the other side's beats."""
        while self.stage < Stage.GONE:
            self.send("beat")
            is_silent = self.stage > Stage.STARTING and time.monotonic() - self._heard > SILENCE_S
            if is_silent and not self._is_showing:
                self._lose(f"nothing was heard of it for {SILENCE_S:g} s: its link or the machine is down")
                self._process.kill()
                return
            await asyncio.sleep(BEAT_S)

    def _hear(self) -> None:
        self._heard, self._heard_at = time.monotonic(), time.time()

    def _lose(self, what: str) -> None:
        self.loss = NodeLoss(host=self.host.name, what=what, time=self._heard_at)
        self._on_change()

    def _reach(self, stage: Stage) -> None:
        self.stage = max(self.stage, stage)
        self._on_change()

    def _describe_end(self, code: int) -> str:
        """Say how a process ended that should not have; ssh itself ends with 255."""
        told = "; ".join(line.decode(errors="replace") for line in self._errors)
        if self.stage == Stage.STARTING:
            return told or f"its agent could not be started (exit code {code})"
        if code < 0:
            return f"{self._command[0]}, which leads to it, was killed by {signal.Signals(-code).name}"
        if code == 255:
            return told or "its connection has ended"
        if code > 128:
            return f"its agent was killed by {signal.Signals(code - 128).name}"
        return f"its agent has ended with exit code {code}{': ' if told else ''}{told}"


async def _read_line(stream: asyncio.StreamReader) -> bytes:
    """Read a line, or the rest; empty at the end of the stream."""
    try:
        return await stream.readline()
    except ValueError:  # longer than any message: it is noise
        return b"(a line that is too long)\n"


def _read_rank(fields: Message, host: str, shift: float) -> RankState:
    error = RankError(**fields["error"]) if fields["error"] else None
    if error is not None:
        error = replace(error, time=error.time + shift)
    return RankState(**{**fields, "host": host, "error": error})
