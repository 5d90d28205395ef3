"""How processes end, and which signals a job heeds."""

import os
import signal
import subprocess
import sys

import pytest

from colossalai.cli._processes import exit_code_of, signals_to_heed

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("code", "expected"), [("", 0), ("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 9)", -9)]
)
def test_looking_at_an_end_leaves_it_for_its_owner(code: str, expected: int):
    process = subprocess.Popen([sys.executable, "-c", code])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert exit_code_of(process.pid) == expected
    assert process.wait() == expected


def test_a_running_process_has_no_exit_code():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert exit_code_of(process.pid) is None
    process.communicate(b"go on")


def test_a_job_under_nohup_outlives_its_terminal(monkeypatch: pytest.MonkeyPatch):
    assert "SIGINT" in signals_to_heed()
    monkeypatch.setattr(signal, "getsignal", lambda number: signal.SIG_DFL)
    assert "SIGHUP" in signals_to_heed()
    monkeypatch.setattr(signal, "getsignal", lambda number: signal.SIG_IGN)
    assert "SIGHUP" not in signals_to_heed()
