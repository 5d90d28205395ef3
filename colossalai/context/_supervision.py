"""Supervision: what goes with a launched job until its end (watchdog, debug mode, kernels), and the end.

[Note: gloo threads at exit]
A thread of a gloo group may still hold the last reference to an operation that this process has seen
complete, and with it tensors. To drop them it needs Python's lock, and a thread that asks for the lock while
the interpreter ends is ended by force, which aborts the process ("terminate called without an active
exception", exit code 134). A group joins its threads when it is freed, but anybody may hold a group (DDP
does): when the user lets a model go after the end of the job, the group is freed while Python's lock is held,
and waits for ever for a thread that asks for it. So at the end of a job, and before the interpreter ends, we
give up the lock until all of these threads sleep.

[Note: the exit code of an error at the end]
What Python calls when it ends (`atexit`) cannot change the exit code: an error there is printed, and the code
is 0 if the script got it so far. `os._exit` would cut off what others do after us. But if the last thing that
the interpreter does, to flush stdout and stderr, fails, then the exit code is 120 (`sys.exit` documents it).
So from then on stderr fails there, and only there. After a Ctrl-C at the end the process ends there by
SIGINT, as it does after one in the script: 130 in a shell.
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

_DEBUG_SHARE = 0.8  # of the watchdog's timeout: the debug mode's error says more
_COMMUNICATION_WORDS = (
    "gloo",
    "connection closed",
    "connection reset",
    "broken pipe",
    "nccl",
    "ended before the others",  # of a group over shared memory
    "left the group",
)


_THREAD_NAMES = ("pt_gloo", "gloo_")
_LIMIT_S = 2.0  # a thread that is busy for so long is not merely letting go of something
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
    """Switch on what config and environment ask for; the default process group exists.

    Args:
        config: Of the job.
        store: Where its ranks have met.
        rank: Global rank of this process.
        world_size: Number of ranks.
        axis_of: Returns the name of the mesh axis along some ranks.
        device: Where this rank computes.
        verbose: Whether rank 0 says which kernels it takes.
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
            check = CollectiveCheck(store, rank=rank, timeout=timeout, axis_of=axis_of)
            stack.enter_context(check.checking())
        watchdog = None
        if options is not None:
            watchdog = Watchdog(options, store, rank=rank, world_size=world_size, axis_of=axis_of)
            watchdog.start()
        process.watching.append((watchdog, stack.pop_all()))
    atexit.unregister(stop_watching)
    atexit.register(stop_watching)
    if watchdog is not None and not isinstance(sys.excepthook, _ErrorHook):
        sys.excepthook = _ErrorHook(sys.excepthook)


def leave_store() -> Callable[[], object]:
    """Leave the store of the job, before its groups end; return what is to be done after it."""
    departure, process.departure = process.departure, None
    if departure is None:
        return lambda: None
    departure.leave()
    return departure.keep_store


def stop_watching() -> None:
    """Switch it off. At the end of a process it must be: a thread may not outlive the interpreter."""
    error = getattr(sys, "last_value", None)
    while process.watching:
        watchdog, stack = process.watching.pop()
        if watchdog is not None:  # the last to come is the first to go: both put wrappers around messages
            watchdog.stop(f"has ended: {type(error).__name__}: {error}" if error is not None else "")
        stack.close()
    if isinstance(sys.excepthook, _ErrorHook):
        sys.excepthook = sys.excepthook.previous


def is_in_job() -> bool:
    """Return whether a job was launched here and has not ended: its end does what `before_end` asks."""
    return bool(process.watching)


def is_watched() -> bool:
    """Return whether the job that was launched here has a watchdog."""
    return bool(process.watching) and process.watching[-1][0] is not None


def is_debugging(config: Config) -> bool:
    """Whether the environment, or else the config, asks for the debug mode.

    Raises:
        ValueError: The environment variable is neither 0 nor 1.
    """
    text = os.environ.get(DEBUG_VARIABLE, "")
    if text not in ("", "0", "1"):
        raise ValueError(f"the environment variable {DEBUG_VARIABLE} is {text!r}; it must be 0 or 1")
    return text == "1" if text else bool(config.get("debug", False))


class _ErrorHook:
    """A `sys.excepthook` that adds to "connection closed by peer" which rank is gone.

    Args:
        previous: The hook that shows the error then.
    """

    def __init__(self, previous: Any) -> None:
        self.previous = previous

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Add a note, if it looks as if a rank is gone, and go on."""
        watchdog = process.watching[-1][0] if process.watching else None
        if watchdog is not None and watchdog.has_spoken:
            return  # the process is about to end, and what comes now comes from that
        text = str(error).lower()
        is_communication = isinstance(error, dist.DistNetworkError) or (
            isinstance(error, RuntimeError) and any(w in text for w in _COMMUNICATION_WORDS)
        )
        if watchdog is not None and is_communication:
            for line in watchdog.troubles_soon():
                error.add_note(line)
            if line := watchdog.disagreement_soon():  # the loss of a connection is what came of it
                kind, cause, error = DisagreementError, error, DisagreementError(line)
                error.__cause__ = cause
        self.previous(kind, error, trace)


def before_end(action: Callable[[], object]) -> None:
    """Have something done, once, before the groups of this job are destroyed."""
    if action not in process.before_end:
        process.before_end.append(action)


def prepare_end() -> None:
    """Do what was asked to be done before the end; an error in it is raised when all of it has been tried."""
    first: Exception | None = None
    while process.before_end:
        try:
            process.before_end.pop(0)()
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
    sys.stderr = _FailingAtEnd(sys.stderr, _raise_at_end)
    sys.excepthook(type(error), error, error.__traceback__)


def interrupt_at_end() -> None:
    """Let the process end by SIGINT, when all that is to be done at its end has been done.

    See [Note: the exit code of an error at the end].
    """
    sys.stderr = _FailingAtEnd(sys.stderr, _interrupt)


def _raise_at_end() -> None:
    raise OSError("something at the end of the script has failed")


def _interrupt() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.raise_signal(signal.SIGINT)


class _FailingAtEnd:
    """A stream like another one, but for its last flush.

    Args:
        stream: The other one.
        fail: What is done after that flush.
    """

    def __init__(self, stream: Any, fail: Callable[[], object]) -> None:
        self._stream = stream
        self._fail = fail

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self) -> None:
        """Flush; fail if it is the interpreter that asks, at its end: it is silent about it."""
        self._stream.flush()
        if sys.is_finalizing():
            self._fail()


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
