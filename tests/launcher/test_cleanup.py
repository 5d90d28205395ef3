"""The folder of a job goes with its process; if the process is killed, with the next one that starts."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from colossalai.launcher._cleanup import JobFolder, remove_abandoned_folders
from colossalai.launcher._protocol import decode
from tests.launcher.command import ROOT

pytestmark = pytest.mark.unit

# A process with a folder, and a child that lives on.
HOLDS = """
import subprocess, sys, time
from colossalai.launcher._cleanup import JobFolder
folder = JobFolder("node")
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], stdout=subprocess.DEVNULL)
print(child.pid, folder.path, flush=True)
time.sleep(600)
"""


@pytest.fixture
def tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for temporary folders, here and in processes that are started."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield tmp_path
    tempfile.tempdir = None


def test_a_folder_is_removed_by_its_process(tmp: Path) -> None:
    folder = JobFolder("node")
    (folder.path / "0.out").touch()
    assert folder.path.stat().st_mode & 0o77 == 0
    remove_abandoned_folders()
    assert (folder.path / "0.out").exists()
    folder.remove()
    assert list(tmp.iterdir()) == []


def test_the_folder_of_a_killed_process_is_removed_though_its_child_lives(tmp: Path) -> None:
    (tmp / "colossalai_node_mine").mkdir()  # no lock in it: somebody else's
    with subprocess.Popen([sys.executable, "-c", HOLDS], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child, path = process.stdout.readline().split()
        try:
            remove_abandoned_folders()
            assert Path(path).exists()
            process.kill()
            process.wait()
            remove_abandoned_folders()
            assert [each.name for each in tmp.iterdir()] == ["colossalai_node_mine"]
        finally:
            os.kill(int(child), signal.SIGKILL)


def test_an_agent_that_is_asked_to_end_before_it_has_ranks_leaves_no_folder(tmp: Path) -> None:
    words = ["--run-id", "x", "--timeout", "9", "--", "job.py"]
    with subprocess.Popen(
        [sys.executable, "-m", "colossalai.launcher._host_agent", *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as agent:
        assert agent.stdout is not None
        kinds = []
        while "hello" not in kinds:
            kinds.append((decode(agent.stdout.readline()) or {"kind": ""})["kind"])
        assert len(list(tmp.glob("colossalai_node_*"))) == 1
        agent.send_signal(signal.SIGTERM)
        said = [decode(line) for line in agent.stdout]
    refused = [message["reason"] for message in said if message and message["kind"] == "refused"]
    assert refused == ["its agent was stopped by SIGTERM"]
    assert list(tmp.iterdir()) == []
