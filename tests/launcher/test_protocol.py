"""What controller, agents and probes say to one another, and the ranks' lines on their way."""

import asyncio
import subprocess
import sys
from typing import Any

import pytest

from colossalai.launcher._protocol import RemoteProcess, as_bytes, as_text, decode, encode, kill
from colossalai.launcher._worker_pipes import LineBuffer
from tests.launcher.command import START_S

pytestmark = pytest.mark.unit


def test_a_message_is_one_line_and_keeps_every_byte():
    raw = bytes(range(256))
    line = encode("line", rank=3, text=as_text(raw))
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    message = decode(line)
    assert message is not None
    assert (message["kind"], message["rank"], as_bytes(message["text"])) == ("line", 3, raw)


@pytest.mark.parametrize("line", [b"Welcome to node1\n", b'{"kind": "ended"}\n', encode("ended")[:-4], b""])
def test_what_a_login_script_prints_is_no_message(line: bytes):
    assert decode(line) is None


@pytest.mark.parametrize(
    ("pieces", "lines"),
    [
        ([b"a", b"b\nc", b"\n"], [b"ab", b"c"]),
        ([b"10%\r20%", b"\r", b"\nend\n"], [b"10%", b"20%", b"end"]),
        ([b"\n\n"], [b"", b""]),
        ([b"no end"], [b"no end"]),
        ([b"x" * 70_000 + b"\n"], [b"x" * 70_000]),
    ],
)
def test_lines_are_put_together(pieces: list[bytes], lines: list[bytes]):
    buffer = LineBuffer()
    found = [line for piece in pieces for line in buffer.feed(piece)]
    assert found + buffer.flush() == lines


def test_a_line_without_end_does_not_fill_the_memory():
    buffer = LineBuffer()
    found = [line for _ in range(20) for line in buffer.feed(b"x" * 10_000)]
    assert sum(map(len, found + buffer.flush())) == 200_000
    assert all(len(line) == 65_536 for line in found)
    assert len(found) == 3


class Peer(RemoteProcess):
    """A process that runs a program of this test."""

    def __init__(self, program: str, **limits: float) -> None:
        super().__init__([sys.executable, "-c", program], b"", **limits)
        self.messages: list[dict[str, Any]] = []
        self.noise: list[bytes] = []
        self.is_silent = False
        self.exit_code: int | None = None
        self.ended = asyncio.Event()

    async def _handle(self, message: dict[str, Any]) -> None:
        self.messages.append(message)
        self.send("bye")

    async def _handle_output(self, line: bytes) -> None:
        self.noise.append(line)

    def _on_silence(self) -> None:
        self.is_silent = True

    def _on_end(self, exit_code: int) -> None:
        self.exit_code = exit_code
        self.ended.set()


async def talk(program: str, **limits: float) -> Peer:
    """Run a program to its end; it says one message, and hears one."""
    peer = Peer(program, **limits)
    await peer.start()
    try:
        await asyncio.wait_for(peer.ended.wait(), START_S)
    finally:
        await peer.close()
    return peer


LINK = """
import os, sys, time
from colossalai.launcher._protocol import ControllerLink
link = ControllerLink({}, on_loss=lambda: os._exit(4))
link.start()
"""


def test_two_ends_talk_and_what_is_printed_is_no_message():
    program = f"print('Welcome to node1', flush=True){LINK}print('printed', flush=True)\n"
    program += "link.send('hello', n=1); link.expect('bye'); os._exit(3)"
    peer = asyncio.run(talk(program))
    assert (peer.messages, peer.exit_code) == ([{"kind": "hello", "n": 1}], 3)
    assert peer.noise[0] == b"Welcome to node1"
    assert list(peer.errors) == [b"printed"]
    assert not peer.is_silent


def test_a_silent_process_is_given_up():
    program = f"import os, time; os.write(1, {encode('hello')!r}); time.sleep(3600)"
    peer = asyncio.run(talk(program, heartbeat_s=0.1, silence_s=0.3))
    assert peer.is_silent
    assert peer.exit_code == -9


def test_a_process_whose_controller_is_silent_ends_by_itself():
    """The connection stays open, as it does when the link to a machine is dead."""
    program = LINK.replace("on_loss", "silence_s=0.3, on_loss") + "link.send('hello')\ntime.sleep(3600)"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as peer:
        try:
            assert peer.wait(START_S) == 4
        finally:
            peer.kill()


def test_close_waits_for_a_process_that_ends_by_itself():
    async def run() -> Peer:
        peer = Peer(f"{LINK}link.send('hello')\ntime.sleep(3600)")
        await peer.start()
        while not peer.messages:
            await asyncio.sleep(0.01)
        # Its stdin ends, and so does it, long before the grace is over.
        await asyncio.wait_for(peer.close(grace_s=3600.0), START_S)
        return peer

    assert asyncio.run(run()).exit_code == 4


def test_what_has_ended_is_killed_without_an_error():
    """It can end between the time limit and the kill."""

    async def run() -> None:
        process = await asyncio.create_subprocess_exec("true")
        await process.wait()
        with pytest.raises(ProcessLookupError):
            process.kill()
        kill(process)

    asyncio.run(run())


def test_a_job_on_several_hosts_is_controlled_without_torch():
    names = "RunOptions, find_hosts, run, _controller, preflight"
    program = f"import sys; from colossalai.launcher import {names}; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=START_S, check=True
    )
    assert done.stdout == "False\n"
