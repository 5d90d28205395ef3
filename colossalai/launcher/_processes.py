"""Process tree below an agent: exit codes without reaping, and the end of all descendants."""

import ctypes
import os
import signal
import time
from collections.abc import Callable

import psutil

GRACE_S = 3.0  # time between SIGTERM and SIGKILL
PEER_ERRORS_S = 2.0  # time for the peers of a killed rank to report their errors
_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.02
_KILL_S = 5.0  # a killed process that lives longer is stuck in the kernel, where nothing reaches it


def ending_signals() -> list[str]:
    """Return the signals that end the job, except those that this process was started to ignore.

    `nohup` does so with SIGHUP, which a closed terminal sends; a script that starts it in the background with
    SIGINT and SIGQUIT, since a Ctrl-C there is for the script. The ranks inherit that.
    """
    names = ("SIGTERM", "SIGINT", "SIGQUIT", "SIGHUP")
    return [name for name in names if signal.getsignal(signal.Signals[name]) is not signal.SIG_IGN]


def ignored_sigint_note() -> str:
    """Return a sentence if Ctrl-C does not end this job, otherwise an empty one."""
    if "SIGINT" in ending_signals():
        return ""
    return (
        "SIGINT is ignored here and in the ranks, since this command was started so (by a script in the "
        f"background?): Ctrl-C does not end the job, `kill {os.getpid()}` does"
    )


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends, so that none gets out of sight."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # were it ignored, the system would forget exit codes


def exit_code_of(pid: int) -> int | None:
    """Return how a child of this process ended, -N for death by signal N, or None while it runs.

    The child is not reaped: its parent code can still read the exit code.
    """
    end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if end is None:
        return None
    return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status


def end_descendants(first_signal: signal.Signals, *, grace_s: float) -> None:
    """End all descendants of this process: send `first_signal`, kill the remaining ones after `grace_s`."""
    end_processes(lambda: psutil.Process().children(recursive=True), first_signal, grace_s=grace_s)


def end_processes(
    find: Callable[[], list[psutil.Process]], first_signal: signal.Signals, *, grace_s: float
) -> None:
    """End all processes that `find` returns, those that it finds later, too.

    Args:
        find: Called repeatedly, until it finds no running process.
        first_signal: Signal that is sent first.
        grace_s: Seconds until they are killed.
    """
    try:
        for process in _living(find):
            _send(process, first_signal)
        deadline = time.monotonic() + grace_s
        while _living(find) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
    finally:  # a second Ctrl-C interrupts the wait, and means: now
        deadline = time.monotonic() + _KILL_S
        while (living := _living(find)) and time.monotonic() < deadline:
            for process in living:
                _send(process, signal.SIGKILL)
            time.sleep(_POLL_S)


def _living(find: Callable[[], list[psutil.Process]]) -> list[psutil.Process]:
    return [process for process in find() if _lives(process)]


def _lives(process: psutil.Process) -> bool:
    try:
        return process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def _send(process: psutil.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return  # it has just ended, as intended
