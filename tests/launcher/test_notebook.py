"""`notebook_launcher`, as a notebook uses it: from an interpreter whose `__main__` is no file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import colossalai
from tests.launcher.command import ROOT, START_S, is_gone, wait_until

CELLS = """
import os, signal, sys, time
import torch
import colossalai
import torch.distributed as dist
from colossalai.core import global_context as gpc

# The notebook has computed with several threads, and run a backward: a rank must not wait for these.
torch.set_num_threads(2)
x = torch.randn(400, 400, requires_grad=True)
(x @ x).sum().backward()

def train(factor, name="none"):
    colossalai.launch_from_torch({}, verbose=False)
    y = (x @ x).sum()
    y.backward()
    total = torch.tensor(float(factor * (gpc.get_global_rank() + 1)))
    dist.all_reduce(total)
    # One write, of the line with its end: the ranks share the file.
    os.write(1, f"{name}: {total.item():g} of {gpc.mesh.world_size}\\n".encode())

def fail():
    colossalai.launch_from_torch({}, verbose=False)
    if os.environ["RANK"] == "1":
        raise KeyError("no such thing")
    dist.barrier()

def die():
    if os.environ["RANK"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(3600)

def attempt(*args, **options):
    try:
        colossalai.notebook_launcher(*args, **options)
    except Exception as error:
        lines = str(error).strip().splitlines()
        print(type(error).__name__, "|", lines[0], "|", lines[-1], flush=True)

before = dict(os.environ)
attempt(train, (10, "two"), num_processes=2)
attempt(train, (10, "one"), num_processes=1)
attempt(train, [3], num_processes=1)
attempt(fail, num_processes=2)
attempt(fail, num_processes=1)
attempt(die, num_processes=2)
assert not gpc.is_launched and not dist.is_initialized()
assert dict(os.environ) == before
# Where a fork is not safe, a function of a notebook cannot be found.
torch.accelerator.current_accelerator = lambda: torch.device("xpu")
torch.get_device_module = lambda device: type("module", (), {"is_initialized": staticmethod(lambda: True)})
attempt(train, (10,), num_processes=2)
"""

HANGING = """
import os, subprocess, sys, time
import colossalai

def hang():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    # One write, of the line with its end: the ranks share the file, and `print` writes part by part if it is
    # not buffered (PYTHONUNBUFFERED).
    os.write(1, f"{os.getpid()} {child.pid}\\n".encode())
    time.sleep(3600)

try:
    colossalai.notebook_launcher(hang, num_processes=2)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def start(cells: str, folder: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
        process = subprocess.Popen(
            [sys.executable, "-"], stdin=subprocess.PIPE, stdout=out, stderr=err, text=True, env=environment
        )
    assert process.stdin is not None
    process.stdin.write(cells)
    process.stdin.close()
    return process


@pytest.mark.dist
def test_functions_of_a_notebook_run_on_ranks(tmp_path: Path) -> None:
    process = start(CELLS, tmp_path)
    try:
        code = process.wait(2 * START_S)
    finally:
        process.kill()
        process.wait()
    assert code == 0, (tmp_path / "err").read_text()
    lines = (tmp_path / "out").read_text().splitlines()
    assert lines[:4] == ["two: 30 of 2", "two: 30 of 2", "one: 10 of 1", "none: 3 of 1"]
    assert lines[4] == "ProcessRaisedException | -- rank 1 raised: | KeyError: 'no such thing'"
    killed = "rank 0 ended with signal SIGKILL"
    assert lines[5:7] == [f"ProcessExitedException | {killed} | {killed}", lines[-1]]
    assert lines[-1].startswith(
        "ValueError | this process has used the xpu device, which does not survive a fork"
    )
    assert "new interpreters cannot find train, which is of this notebook: restart the kernel" in lines[-1]


@pytest.mark.dist
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.long)])
def test_an_interruption_leaves_no_process(tmp_path: Path, number: signal.Signals) -> None:
    """The signal goes to the notebook alone, as a kernel gets it; a killed kernel takes its ranks along."""
    process = start(HANGING, tmp_path)
    pids: list[int] = []
    try:
        wait_until(lambda: len((tmp_path / "out").read_text().split()) == 4, START_S)
        pids = [int(word) for word in (tmp_path / "out").read_text().split()]
        process.send_signal(number)
        process.wait(START_S)
        ranks = [int(line.split()[0]) for line in (tmp_path / "out").read_text().splitlines()[:2]]
        wait_until(lambda: all(map(is_gone, pids if number == signal.SIGINT else ranks)), START_S)
    finally:
        for pid in [process.pid, *pids]:
            if not is_gone(pid):
                os.kill(pid, signal.SIGKILL)
        process.wait()
    if number == signal.SIGINT:
        assert (tmp_path / "out").read_text().splitlines()[-1] == "interrupted"


def _spawned(folder: Path) -> None:
    import torch.distributed as dist

    colossalai.launch_from_torch({}, verbose=False)
    names: list[Any] = [None, None]
    dist.all_gather_object(names, os.environ["RANK"])
    (folder / os.environ["RANK"]).write_text("".join(names))


@pytest.mark.dist
def test_functions_of_a_module_run_in_new_interpreters(tmp_path: Path) -> None:
    colossalai.notebook_launcher(_spawned, (tmp_path,), num_processes=2, start_method="spawn")
    assert [path.read_text() for path in sorted(tmp_path.iterdir())] == ["01", "01"]


@pytest.mark.unit
def test_mistakes_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    launch: Any = colossalai.notebook_launcher
    for options, message in (
        ({"fn": 3}, "fn is 3; it must be a function"),
        ({"fn": print, "args": 3}, r"args is 3; it must be a tuple, such as \(3,\)"),
        ({"fn": print, "num_processes": 0}, "num_processes is 0; it must be an integer of at least 1"),
        ({"fn": print, "num_processes": True}, "num_processes is True"),
        (
            {"fn": print, "start_method": "forkserver"},
            "start_method is 'forkserver'; it must be 'fork' or 'spawn'",
        ),
        (
            {"fn": lambda: None, "num_processes": 2, "start_method": "spawn"},
            "cannot be sent to new interpreters .*: take a function at the top level of a module",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            launch(**options)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(ValueError, match="this process is rank 1 of 2 already"):
        launch(print, num_processes=2)
