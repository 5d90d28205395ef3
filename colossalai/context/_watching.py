"""What watches over a launched job, from launch to its end: the watchdog and the debug mode."""

import atexit
import os
import sys
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from colossalai.context._config import Config
from colossalai.monitor import AxisOf, CollectiveCheck, DisagreementError, Watchdog, watchdog_options

DEBUG_VARIABLE = "COLOSSALAI_DEBUG"

_DEBUG_SHARE = 0.8  # of the watchdog's timeout: the debug mode's error says more
_COMMUNICATION_WORDS = ("gloo", "connection closed", "connection reset", "broken pipe", "nccl")

_watching: list[tuple[Watchdog | None, ExitStack]] = []


def start_watching(config: Config, store: dist.Store, *, rank: int, world_size: int, axis_of: AxisOf) -> None:
    """Switch on what config and environment ask for; the default process group exists.

    Args:
        config: Of the job.
        store: Where its ranks have met.
        rank: Global rank of this process.
        world_size: Number of ranks.
        axis_of: What is the mesh axis along some ranks?
    """
    limit = distributed_c10d._get_default_timeout(dist.get_backend()).total_seconds()
    options = watchdog_options(config.get("watchdog"), group_timeout=limit, world_size=world_size)
    with ExitStack() as stack:
        if is_debugging(config) and world_size > 1:
            timeout = _DEBUG_SHARE * (limit if options is None else options.timeout)
            check = CollectiveCheck(store, rank=rank, timeout=timeout, axis_of=axis_of)
            stack.enter_context(check.checking())
        watchdog = None
        if options is not None:
            watchdog = Watchdog(options, store, rank=rank, world_size=world_size, axis_of=axis_of)
            watchdog.start()
        _watching.append((watchdog, stack.pop_all()))
    atexit.unregister(stop_watching)
    atexit.register(stop_watching)
    if watchdog is not None and not isinstance(sys.excepthook, _ErrorHook):
        sys.excepthook = _ErrorHook(sys.excepthook)


def stop_watching() -> None:
    """Switch it off. At the end of a process it must be: a thread may not outlive the interpreter."""
    error = getattr(sys, "last_value", None)
    while _watching:
        watchdog, stack = _watching.pop()
        if watchdog is not None:  # the last to come is the first to go: both put wrappers around messages
            watchdog.stop(f"has ended: {type(error).__name__}: {error}" if error is not None else "")
        stack.close()
    if isinstance(sys.excepthook, _ErrorHook):
        sys.excepthook = sys.excepthook.previous


def is_in_job() -> bool:
    """Return whether a job was launched here and has not ended: its end does what `before_end` asks."""
    return bool(_watching)


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
        watchdog = _watching[-1][0] if _watching else None
        if watchdog is not None and watchdog.has_spoken:
            return  # the process is about to end, and what comes now comes from that
        text = str(error).lower()
        is_communication = isinstance(error, RuntimeError) and any(w in text for w in _COMMUNICATION_WORDS)
        if watchdog is not None and is_communication:
            for line in watchdog.troubles_soon():
                error.add_note(line)
            if line := watchdog.disagreement_soon():  # the loss of a connection is what came of it
                kind, cause, error = DisagreementError, error, DisagreementError(line)
                error.__cause__ = cause
        self.previous(kind, error, trace)
