"""Lines on the screen: whole, and never in the way of the head."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from colossalai.launcher import _output
from colossalai.launcher._output import Screen

pytestmark = pytest.mark.unit


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A pipe in the place of stdout; its end for reading."""
    reading, writing = os.pipe()
    monkeypatch.setattr(_output, "STDOUT", writing)
    yield reading
    os.close(reading)
    os.close(writing)


def test_the_ranks_lines_and_files(pipe: int, tmp_path: Path):
    async def show() -> None:
        screen = Screen(tmp_path / "logs")
        await screen.rank_line("host1", 0, "out", b"a")
        await screen.rank_line("host2", 1, "out", b"b\xff")
        screen.close()

    asyncio.run(show())
    assert os.read(pipe, 100) == b"[host1:0] a\n[host2:1] b\xff\n"
    assert (tmp_path / "logs" / "rank_0.log").read_bytes() == b"a\n"
    assert (tmp_path / "logs" / "rank_1.log").read_bytes() == b"b\xff\n"


def test_a_screen_that_takes_no_more_does_not_stop_the_head(pipe: int):
    async def show() -> int:
        screen, beats, size = Screen(None), 0, 300_000  # more than a pipe holds
        showing = asyncio.create_task(screen.rank_line("h", 0, "out", b"x" * size))
        for _ in range(5):
            await asyncio.sleep(0.01)
            beats += 1
        assert not showing.done()
        data = b""
        while len(data) < size + len("[h:0] \n"):
            data += os.read(pipe, 1 << 16)
            await asyncio.sleep(0)
        await showing
        screen.close()
        assert data == b"[h:0] " + b"x" * size + b"\n"
        return beats

    assert asyncio.run(show()) == 5


def test_the_job_goes_on_when_nobody_reads_any_more(monkeypatch: pytest.MonkeyPatch):
    reading, writing = os.pipe()
    monkeypatch.setattr(_output, "STDOUT", writing)
    os.close(reading)

    async def show() -> None:
        screen = Screen(None)
        await screen.rank_line("h", 0, "out", b"a")
        screen.close()

    asyncio.run(show())
    os.close(writing)
