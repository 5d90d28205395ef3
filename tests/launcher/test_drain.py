"""A job that ends by itself (`Job.drain_s`): its rank 0 alone hears of signals, and has time for the end."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.launcher.command import ROOT, Command, is_gone, wait_until

pytestmark = pytest.mark.dist

# Rank 0 ends the job when it is asked as often as the argument says; a rank that is asked says so.
JOB = """
import os, signal, sys, time
rank, asks = os.environ["RANK"], int(sys.argv[1])
def ask(number, frame):
    global asks
    asks -= 1
    os.write(1, f"asked-{rank}\\n".encode())
signal.signal(signal.SIGTERM, ask)
os.write(1, f"{rank}:{os.getpid()}\\n".encode())
while asks > 0 and not os.path.exists("end"):
    time.sleep(0.02)
open("end", "w").close()
"""
DRIVER = """
import sys
from colossalai.launcher import RunOptions, run
asks, drain_s, max_restarts = sys.argv[1:]
sys.exit(run(RunOptions(target="job.py", args=(asks,), num_procs=2, drain_s=float(drain_s),
                        max_restarts=int(max_restarts) or None)))
"""


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[..., tuple[Command, dict[str, int]]]]:
    with ExitStack() as ends:

        def begin(asks: int, drain_s: float, max_restarts: int) -> tuple[Command, dict[str, int]]:
            (tmp_path / "job.py").write_text(JOB)
            (tmp_path / "driver.py").write_text(DRIVER)
            words = [sys.executable, "driver.py", str(asks), str(drain_s), str(max_restarts)]
            environment = {**os.environ, "PYTHONPATH": str(ROOT)}
            with (tmp_path / "stdout").open("wb") as out, (tmp_path / "stderr").open("wb") as err:
                process = subprocess.Popen(words, cwd=tmp_path, env=environment, stdout=out, stderr=err)
            command = Command(process, tmp_path)
            ends.callback(command.end)
            wait_until(lambda: len(pids_of(command)) == 2 or process.poll() is not None)
            return command, pids_of(command)

        yield begin


def pids_of(command: Command) -> dict[str, int]:
    """Return the processes of the ranks that have begun."""
    words = [word.split(":") for word in command.out.split() if word[0].isdigit() and ":" in word]
    return {rank: int(pid) for rank, pid in words if rank in "01"}


@pytest.mark.long  # so ends the service of tests/serving/test_serve_command.py
@pytest.mark.parametrize("max_restarts", [1, 0])
def test_the_first_rank_ends_the_job(begin: Callable[..., tuple[Command, dict[str, int]]], max_restarts: int):
    command, pids = begin(2, 600.0, max_restarts)
    command.process.terminate()
    wait_until(lambda: command.out.count("asked-0") == 1)
    assert command.process.poll() is None
    command.process.terminate()
    assert command.wait() == 0, command.err
    assert command.out.count("asked-0") == 2
    assert "asked-1" not in command.out
    assert all(map(is_gone, pids.values()))
    assert "restart" not in command.err


@pytest.mark.long
@pytest.mark.parametrize("max_restarts", [0, 1])
@pytest.mark.parametrize("is_late", [True, False])
def test_a_late_end_and_a_third_signal_end_all(
    begin: Callable[..., tuple[Command, dict[str, int]]], max_restarts: int, is_late: bool
):
    command, pids = begin(99, 1.0 if is_late else 600.0, max_restarts)
    command.process.terminate()
    if not is_late:
        wait_until(lambda: command.out.count("asked-0") == 1)
        command.process.terminate()
        wait_until(lambda: command.out.count("asked-0") == 2)
        command.process.terminate()
    assert command.wait() == 128 + signal.SIGTERM, command.err
    assert "stopped by SIGTERM" in command.err
    assert "restart" not in command.err
    assert all(map(is_gone, pids.values()))
