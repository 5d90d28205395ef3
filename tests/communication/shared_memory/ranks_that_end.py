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

from colossalai.communication.shared_memory import WaitOptions, transport_of

HOURS_S = 7200.0  # a wait that ends at such a time limit is a hang for `run_ranks`
FILE_S = 180.0


@contextmanager
def group(
    path: Path, *, timeout: float = HOURS_S, backend: str = "shared_memory", **waits: Any
) -> Iterator[int]:
    """Within the block, be a rank of a default group that meets in a file; gives the rank.

    Args:
        path: The file.
        timeout: Time limit of the group, in seconds.
        backend: Its backend.
        **waits: Its `WaitOptions`.
    """
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        backend,
        store=dist.FileStore(str(path), num_ranks),
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=timeout),
        pg_options=WaitOptions(**waits) if waits else None,
    )
    assert transport_of() == "shared memory"
    dist.barrier()
    try:
        yield rank
    finally:
        dist.destroy_process_group()


def in_a_child(function: Callable[..., Any], *args: Any) -> tuple[Any, int]:
    """Run a function in a forked child.

    Returns:
        What it returns or raises (None if it was killed), and the status of its process.
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
    with os.fdopen(reading, "rb") as pipe:
        found = None if status else pickle.loads(pipe.read())
    return found, os.waitstatus_to_exitcode(status)


def die() -> None:
    """End this process as a lack of memory does."""
    os.kill(os.getpid(), signal.SIGKILL)


def error_of(call: Callable[[], Any]) -> tuple[str, str]:
    """Return the type and text of what a call raises."""
    try:
        call()
    except BaseException as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def named(found: tuple[str, str], rank: int) -> str:
    """Say what is wrong with an error that was to name a rank that has died; empty: nothing."""
    kind, text = found
    wrong = []
    # Futures of C++ know of an error in Python its words alone.
    if kind != "DistBackendError" and not (kind == "RuntimeError" and "DistBackendError: " in text):
        wrong.append(f"it is {kind}")
    if f"rank {rank} has ended before the others were through with " not in text:
        wrong.append("it does not name the death of the rank")
    return f"{', '.join(wrong)}: {text}" if wrong else ""


def wait_for_file(path: Path, timeout: float = FILE_S) -> None:
    """Wait until there is a file."""
    end = time.monotonic() + timeout
    while not path.exists():
        assert time.monotonic() < end, f"no {path}"
        time.sleep(0.01)
