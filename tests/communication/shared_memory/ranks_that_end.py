"""Groups of which some ranks end too early, in children of ranks: the pool takes a death for a failure."""

from __future__ import annotations

import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from colossalai.communication.shared_memory import transport_of

NAMED_WITHIN_S = 2.0  # after the death of a rank, all others have named it
TIMEOUT_S = 30.0  # of groups; nobody is to wait so long


@contextmanager
def group(path: Path, *, timeout: float = TIMEOUT_S, backend: str = "shared_memory") -> Iterator[int]:
    """Within the block, be a rank of a default group that meets in a file; gives the rank."""
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        backend,
        store=dist.FileStore(str(path), num_ranks),
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=timeout),
    )
    assert transport_of() == "shared memory"
    dist.barrier()
    try:
        yield rank
    finally:
        dist.destroy_process_group()


def in_a_child(function: Callable[..., Any], *args: Any) -> tuple[Any, float, int]:
    """Run a function in a forked child.

    Returns:
        What it returns or raises (None if it was killed), when its process ended, and the status of that.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            found = function(*args)
        except BaseException as error:  # its parent is told
            found = f"{type(error).__name__}: {error}"
        os.write(writing, pickle.dumps(found))
        os._exit(0)
    os.close(writing)
    _, status = os.waitpid(pid, 0)
    ended = time.monotonic()
    with os.fdopen(reading, "rb") as pipe:
        found = None if status else pickle.loads(pipe.read())
    return found, ended, os.waitstatus_to_exitcode(status)


def die() -> None:
    """End this process as a lack of memory does."""
    os.kill(os.getpid(), signal.SIGKILL)


def error_of(call: Callable[[], Any]) -> tuple[str, str, float]:
    """Return the type and text of what a call raises, and when."""
    try:
        call()
    except BaseException as error:
        return type(error).__name__, str(error), time.monotonic()
    return "nothing", "", time.monotonic()


def named(died: float, found: tuple[str, str, float], rank: int) -> str:
    """Say what is wrong with an error that was to name a rank soon after its death; empty: nothing."""
    kind, text, at = found
    wrong = []
    # Futures of C++ know of an error in Python its words alone.
    if kind != "DistBackendError" and not (kind == "RuntimeError" and "DistBackendError: " in text):
        wrong.append(f"it is {kind}")
    if f"rank {rank} " not in text:
        wrong.append("it does not name the rank")
    if at - died > NAMED_WITHIN_S:
        wrong.append(f"it came after {at - died:.1f} s")
    return f"{', '.join(wrong)}: {text}" if wrong else ""


def wait_for_file(path: Path, timeout: float = TIMEOUT_S) -> None:
    """Wait until there is a file."""
    end = time.monotonic() + timeout
    while not path.exists():
        assert time.monotonic() < end, f"no {path}"
        time.sleep(0.01)
