"""How processes end, and which signals a job heeds."""

import os
import signal
import subprocess
import sys

import pytest

from colossalai.launcher import _controller
from colossalai.launcher._processes import GRACE_S, ending_signals, exit_code_of, ignored_sigint_note
from colossalai.launcher._protocol import HEARTBEAT_S, SILENCE_S

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


def test_a_job_heeds_no_signal_that_it_was_started_to_ignore(monkeypatch: pytest.MonkeyPatch):
    assert "SIGINT" in ending_signals()
    assert ignored_sigint_note() == ""
    for ignored in ([], ["SIGHUP"], ["SIGINT", "SIGQUIT"]):
        numbers = [signal.Signals[name] for name in ignored]
        monkeypatch.setattr(
            signal, "getsignal", lambda number, n=numbers: signal.SIG_IGN if number in n else signal.SIG_DFL
        )
        heeded = [name for name in ("SIGTERM", "SIGINT", "SIGQUIT", "SIGHUP") if name not in ignored]
        assert ending_signals() == heeded
    assert "Ctrl-C does not end the job, `kill" in ignored_sigint_note()


def test_the_deadlines_at_the_end_of_a_job_are_within_30_s():
    """See [Note: deadlines at the end of a job]: a host that is silent or stuck, and its sweep."""
    after_failure = GRACE_S + _controller._KILL_S
    assert SILENCE_S + HEARTBEAT_S + max(after_failure, _controller._SWEEP_S) < 30
    assert after_failure + _controller._SWEEP_S < 30
