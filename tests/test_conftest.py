"""The rules of conftest.py: a test that leaks fails, and `gpu` tests are skipped without an accelerator."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from tests.ranks import ROOT

pytestmark = pytest.mark.unit


DISPOSITIONS = """
import signal, subprocess, sys
from tests.conftest import let_children_heed_signals
let_children_heed_signals()
signal.raise_signal(signal.SIGINT)
code = "import signal; print(signal.getsignal(signal.SIGINT).__name__, int(signal.getsignal(signal.SIGHUP)))"
subprocess.run([sys.executable, "-c", code], check=True)
"""


def test_children_of_a_suite_in_the_background_heed_signals() -> None:
    command = ["sh", "-c", 'trap "" INT HUP; exec "$0" -c "$1"', sys.executable, DISPOSITIONS]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout == "default_int_handler 0\n"


LEAKS = """
import os, threading, time
import pytest, torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

def test_leaks_variable():
    os.environ["LEAKED"] = "1"

def test_is_cleaned_up():
    assert "LEAKED" not in os.environ

def test_leaks_group():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)

def test_group_is_cleaned_up():
    assert not dist.is_initialized()

class TestThread:
    @pytest.fixture
    def thread_end_s(self):
        return 0.0

    def test_leaks_thread(self):
        threading.Thread(target=threading.Event().wait, name="leaked", daemon=True).start()

def test_short_thread():
    threading.Thread(target=time.sleep, args=(0.2,)).start()

def test_monkeypatch(monkeypatch):
    monkeypatch.setenv("NOT_LEAKED", "1")

@pytest.mark.gpu
def test_gpu():
    pass
"""


def _outcomes(folder: Path) -> dict[str, str]:
    """Run the planted tests in a pytest of their own; return what it says of each, "" for a pass."""
    (folder / "test_planted.py").write_text(LEAKS)
    options = [
        "-p",
        "tests.conftest",
        "-c",
        str(ROOT / "pyproject.toml"),
        f"--junitxml={folder / 'report.xml'}",
    ]
    command = [sys.executable, "-m", "pytest", *options, str(folder)]
    subprocess.run(command, cwd=ROOT, capture_output=True, timeout=120, check=False)
    cases = ElementTree.parse(folder / "report.xml").getroot().iter("testcase")
    return {case.get("name", ""): " ".join(child.get("message", "") for child in case) for case in cases}


@pytest.mark.long  # a session of pytest of its own
def test_leaks_fail(tmp_path: Path) -> None:
    outcomes = _outcomes(tmp_path)
    assert "the test leaks environment variable LEAKED: was None, is '1'" in outcomes.pop(
        "test_leaks_variable"
    )
    assert "the test leaks a process group" in outcomes.pop("test_leaks_group")
    assert "the test leaks a thread: <Thread(leaked" in outcomes.pop("test_leaks_thread")
    if not torch.accelerator.is_available():
        assert "torch.accelerator.is_available() is False" in outcomes.pop("test_gpu")
    assert len(outcomes) >= 4
    assert not any(outcomes.values())
