"""The end of a job in a process: what is to be done before, and how gloo's threads come to rest.

[Note: gloo threads at exit]
A thread of a gloo group may still hold the last reference to an operation that this process has seen
complete, and with it tensors. To drop them it needs Python's lock, and a thread that asks for the lock while
the interpreter ends is ended by force, which aborts the process ("terminate called without an active
exception", exit code 134). A group joins its threads when it is freed, but anybody may hold a group (DDP
does). So before the interpreter ends we give up the lock until all of these threads sleep.

[Note: the exit code of an error at the end]
What Python calls when it ends (`atexit`) cannot change the exit code: an error there is printed, and the code
is 0 if the script got it so far. `os._exit` would cut off what others do after us. But if the last thing that
the interpreter does, to flush stdout and stderr, fails, then the exit code is 120 (`sys.exit` documents it).
So from then on stderr fails there, and only there.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from colossalai.logging import get_dist_logger

_THREAD_NAMES = ("pt_gloo", "gloo_")
_LIMIT_S = 2.0  # a thread that is busy for so long is not merely letting go of something
_PAUSE_S = 0.002

_before_end: list[Callable[[], object]] = []


def before_end(action: Callable[[], object]) -> None:
    """Have something done, once, before the groups of this job are destroyed."""
    if action not in _before_end:
        _before_end.append(action)


def prepare_end() -> None:
    """Do what was asked to be done before the end; an error in it is raised when all of it has been tried."""
    first: Exception | None = None
    while _before_end:
        try:
            _before_end.pop(0)()
        except Exception as error:
            first = first or error
    if first is not None:
        raise first


def fail_at_end(error: Exception) -> None:
    """Show an error that is known only while the interpreter ends, and let the exit code be 120.

    See [Note: the exit code of an error at the end]. After an error in the script, which has its own code, it
    is logged.
    """
    if getattr(sys, "last_type", None) is not None:
        get_dist_logger().error(f"and at the end of the script: {type(error).__name__}: {error}")
        return
    sys.stderr = _FailingAtEnd(sys.stderr)
    sys.excepthook(type(error), error, error.__traceback__)


class _FailingAtEnd:
    """A stream like another one, but for its last flush.

    Args:
        stream: The other one.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self) -> None:
        """Flush; raise if it is the interpreter that asks, at its end: it is silent about it."""
        self._stream.flush()
        if sys.is_finalizing():
            raise OSError("something at the end of the script has failed")


def let_gloo_threads_rest() -> None:
    """Wait until no gloo thread of this process is running; see [Note: gloo threads at exit]."""
    end = time.monotonic() + _LIMIT_S
    restful = 0
    while restful < 2 and time.monotonic() < end:
        time.sleep(_PAUSE_S)  # gives up the lock
        restful = 0 if any(state != "S" for state in _gloo_thread_states()) else restful + 1


def _gloo_thread_states() -> list[str]:
    """Return the states of the gloo threads, as Linux names them; none where it does not say."""
    states = []
    for task in Path("/proc/self/task").glob("*"):
        try:
            name = (task / "comm").read_text()
            stat = (task / "stat").read_text()
        except OSError:  # the thread has ended
            continue
        if name.startswith(_THREAD_NAMES):
            states.append(stat.rpartition(")")[2].split()[0])
    return states
