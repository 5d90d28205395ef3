"""Supervision of a launched job until its end (watchdog, debug mode, kernels), and the end itself.

[Note: gloo threads at exit]
A thread of a gloo group can hold the last reference to a completed operation, and with it tensors. To drop
them it needs Python's lock, and a thread that waits for the lock while the interpreter ends is killed, which
aborts the process ("terminate called without an active exception", exit code 134). A group joins its threads
when it is freed, but any object can hold a group (DDP does): if the user drops a model after the end of the
job, the group is freed while Python's lock is held, and waits forever for a thread that waits for the lock.
So at the end of a job, and before the interpreter ends, we release the lock until all of these threads sleep.

[Note: the exit code of an error at the end]
Functions that Python calls at its end (`atexit`) cannot change the exit code: an error there is printed, and
the code is 0 if the script got that far. `os._exit` would skip the functions registered before ours. But if
the last action of the interpreter, flushing stdout and stderr, fails, then the exit code is 120 (documented
at `sys.exit`). So from then on stderr fails there, and only there. After a Ctrl-C at the end the process ends
there by SIGINT, as it does after one in the script: 130 in a shell.
"""

import atexit
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from colossalai._lazy import JOB_PARTS, find_name
from colossalai.context._config import Config
from colossalai.context._process import process
from colossalai.logging import get_dist_logger
from colossalai.monitor import (
    AxisOf,
    CollectiveCheck,
    DisagreementError,
    Watchdog,
    records,
    watchdog_options,
)

DEBUG_VARIABLE = "COLOSSALAI_DEBUG"

_DEBUG_SHARE = 0.8  # of the watchdog's timeout: the debug mode's error has more detail, so it comes first
_COMMUNICATION_WORDS = (
    "gloo",
    "connection closed",
    "connection reset",
    "broken pipe",
    "nccl",
    "ended before the others",  # an error of a group over shared memory
    "left the group",
)


_THREAD_NAMES = ("pt_gloo", "gloo_")
_LIMIT_S = 2.0  # a thread that is busy for so long is doing more than dropping references
_PAUSE_S = 0.002


def start_watching(
    config: Config,
    store: dist.Store,
    *,
    rank: int,
    world_size: int,
    axis_of: AxisOf,
    device: torch.device,
    verbose: bool,
) -> None:
    """Start the supervision that config and environment enable; the default process group exists.

    Args:
        config: Config of the job.
        store: Store of the job.
        rank: Global rank of this process.
        world_size: Number of ranks.
        axis_of: Returns the name of the mesh axis along some ranks.
        device: Device of this rank.
        verbose: Whether rank 0 logs the chosen kernels.
    """
    limit = distributed_c10d._get_default_timeout(dist.get_backend()).total_seconds()
    options = watchdog_options(config.get("watchdog"), group_timeout=limit, world_size=world_size)
    with ExitStack() as stack:
        stack.enter_context(records.naming(axis_of))
        matmul_of_job = find_name("colossalai", JOB_PARTS, "matmul_of_job")
        place: dict[str, Any] = {"rank": rank, "world_size": world_size, "device": device}
        stack.enter_context(matmul_of_job(config.get("matmul"), store, **place, verbose=verbose))
        if is_debugging(config) and world_size > 1:
            timeout = _DEBUG_SHARE * (limit if options is None else options.timeout)
            check = CollectiveCheck(store, rank=rank, timeout=timeout, axis_of=axis_of, clock=process.clock)
            stack.enter_context(check.checking())
        watchdog = None
        if options is not None:
            watchdog = Watchdog(
                options, store, rank=rank, world_size=world_size, axis_of=axis_of, clock=process.clock
            )
            watchdog.start()
        process.watching.append((watchdog, stack.pop_all()))
    atexit.unregister(stop_watching)
    atexit.register(stop_watching)
    if watchdog is not None and not isinstance(sys.excepthook, _ErrorHook):
        sys.excepthook = _ErrorHook(sys.excepthook)


def leave_store() -> Callable[[], object]:
    """Leave the store of the job, before its groups end; return a function to call after that."""
    departure, process.departure = process.departure, None
    if departure is None:
        return lambda: None
    departure.leave()
    return departure.keep_store


def stop_watching() -> None:
    """Stop the supervision; required at the end of a process, as a thread may not outlive the interpreter."""
    error = getattr(sys, "last_value", None)
    while process.watching:
        watchdog, stack = process.watching.pop()
        if watchdog is not None:  # in reverse order of their start: both wrap the messages
            watchdog.stop(f"has ended: {type(error).__name__}: {error}" if error is not None else "")
        stack.close()
    if isinstance(sys.excepthook, _ErrorHook):
        sys.excepthook = sys.excepthook.previous


def is_in_job() -> bool:
    """Return whether a job was launched here and has not ended; its end runs the actions of `before_end`."""
    return bool(process.watching)


def is_watched() -> bool:
    """Return whether the launched job has a watchdog."""
    return bool(process.watching) and process.watching[-1][0] is not None


def is_debugging(config: Config) -> bool:
    """Return whether the environment, or else the config, enables the debug mode.

    Raises:
        ValueError: The environment variable is neither 0 nor 1.
    """
    text = os.environ.get(DEBUG_VARIABLE, "")
    if text not in ("", "0", "1"):
        raise ValueError(f"the environment variable {DEBUG_VARIABLE} is {text!r}; it must be 0 or 1")
    return text == "1" if text else bool(config.get("debug", False))


class _ErrorHook:
    """A `sys.excepthook` that adds the lost rank to errors such as "connection closed by peer".

    Args:
        previous: The hook that then prints the error.
    """

    def __init__(self, previous: Any) -> None:
        self.previous = previous

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Add a note to an error of communication, and call the previous hook."""
        watchdog = process.watching[-1][0] if process.watching else None
        if watchdog is not None and watchdog.has_shown_error:
            return  # the process is about to end, and this error is a consequence
        text = str(error).lower()
        is_communication = isinstance(error, dist.DistNetworkError) or (
            isinstance(error, RuntimeError) and any(w in text for w in _COMMUNICATION_WORDS)
        )
        if watchdog is not None and is_communication:
            for line in watchdog.find_ended_ranks():
                error.add_note(line)
            if line := watchdog.find_disagreement():  # the cause of the lost connection
                kind, cause, error = DisagreementError, error, DisagreementError(line)
                error.__cause__ = cause
        self.previous(kind, error, trace)


def before_end(action: Callable[[], object]) -> None:
    """Register an action to run once, before the groups of this job are destroyed."""
    if action not in process.before_end:
        process.before_end.append(action)


def prepare_end() -> None:
    """Run the actions of `before_end`; the first error is raised after all of them have run."""
    first: Exception | None = None
    while process.before_end:
        try:
            process.before_end.pop(0)()
        except Exception as error:
            first = first or error
    if first is not None:
        raise first


def fail_at_end(error: Exception) -> None:
    """Print an error at the end of the interpreter, and make the exit code 120.

    See [Note: the exit code of an error at the end]. After an error in the script, which has its own code, it
    is logged.
    """
    if getattr(sys, "last_type", None) is not None:
        get_dist_logger().error(f"and at the end of the script: {type(error).__name__}: {error}")
        return
    sys.stderr = _FailingAtEnd(sys.stderr, _raise_at_end)
    sys.excepthook(type(error), error, error.__traceback__)


def interrupt_at_end() -> None:
    """Make the process end by SIGINT, after all other actions at its end.

    See [Note: the exit code of an error at the end].
    """
    sys.stderr = _FailingAtEnd(sys.stderr, _interrupt)


def _raise_at_end() -> None:
    raise OSError("something at the end of the script has failed")


def _interrupt() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.raise_signal(signal.SIGINT)


class _FailingAtEnd:
    """A stream that fails in its last flush, and otherwise works as another one.

    Args:
        stream: The other stream.
        fail: Function to call after that flush.
    """

    def __init__(self, stream: Any, fail: Callable[[], object]) -> None:
        self._stream = stream
        self._fail = fail

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self) -> None:
        """Flush; call `fail` if the interpreter flushes at its end, without a message of its own."""
        self._stream.flush()
        if sys.is_finalizing():
            self._fail()


def let_gloo_threads_rest() -> None:
    """Wait until no gloo thread of this process is running; see [Note: gloo threads at exit]."""
    end = time.monotonic() + _LIMIT_S
    restful = 0
    while restful < 2 and time.monotonic() < end:
        time.sleep(_PAUSE_S)  # releases the lock
        restful = 0 if any(state != "S" for state in _gloo_thread_states()) else restful + 1


def _gloo_thread_states() -> list[str]:
    """Return the states of the gloo threads in Linux's letters; empty on other systems."""
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
