"""Jobs that hang, in the pool of ranks: where the watchdog only reports, they can go on."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

import colossalai
from colossalai.communication import all_reduce
from colossalai.context import ParallelMode
from colossalai.core import global_context as gpc
from tests.harness.clocks import process
from tests.monitor.watch_clock import WatchClock, write

TP = ParallelMode.PARALLEL_1D
TIMEOUT_S, POLL_S = 60.0, 5.0  # of the watchdogs' clocks
LIMIT_S = 300.0


def launch(
    folder: Path,
    *,
    action: str = "report",
    timeout: float = TIMEOUT_S,
    backend: str = "auto",
    waiting: Iterable[int] = (),
    silent: Iterable[int] = (),
    is_patient: bool = True,
    **options: Any,
) -> int:
    """Launch this rank with a watchdog, let it meet the others once, and return it.

    Args:
        folder: Folder of the report, and of the clock's files.
        action: The watchdog's.
        timeout: The watchdog's, by its clock.
        backend: Of the job.
        waiting: The ranks that wait for others when time passes.
        silent: The ranks that will not answer.
        is_patient: Whether the deadlines of an alarm and of an error are minutes.
        **options: More of the watchdog's.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    num_answers = world_size - len(set(silent)) if silent else 0
    clock = WatchClock(folder / "clock", rank, num_answers=num_answers, is_patient=is_patient)
    process.clock = clock.clock  # of this rank's process, which ends with the test
    config = {
        "parallel": {"tensor": {"size": world_size, "mode": "1d"}},
        "watchdog": {"timeout": timeout, "action": action, "folder": str(folder), **options},
    }
    colossalai.launch_from_torch(config, backend=backend, verbose=False)
    meet()
    all_reduce(torch.ones(2), TP)
    meet()
    clock.begin(waiting)
    return gpc.get_global_rank()


def let_time_pass(folder: Path) -> None:
    """Let the seconds of the watchdogs count, while all ranks wait that shall."""
    (folder / "clock" / "late").touch()


def pass_time(folder: Path, seconds: float) -> None:
    """Let so many seconds of the watchdogs pass, and no more; return when they have."""
    before = max(map(_seconds, _clocks(folder)), default=0.0)
    write(folder / "clock" / f"granted-{dist.get_rank()}", str(before + seconds))
    wait_for(lambda: len(_clocks(folder)) == dist.get_world_size())
    wait_for(lambda: all(_seconds(path) > before + seconds - POLL_S for path in _clocks(folder)))


def _clocks(folder: Path) -> list[Path]:
    return list((folder / "clock").glob("seconds-*"))


def _seconds(path: Path) -> float:
    return float(path.read_text())


def meet() -> None:
    """Wait for the other ranks, and not in a collective: on a busy machine that would be a hang by itself."""
    store = distributed_c10d._get_default_store()
    number = store.add(f"meet/{dist.get_rank()}", 1)
    keys = [f"meet/{rank}/{number}" for rank in range(dist.get_world_size())]
    store.set(keys[dist.get_rank()], "1")
    store.wait(keys, timedelta(seconds=LIMIT_S))


def num_notices() -> int:
    """Return how often the ranks have been asked for reports while the job goes on."""
    (watchdog,) = (watchdog for watchdog, _ in process.watching)
    assert watchdog is not None
    return watchdog._notices


def note_known(folder: Path) -> None:
    """Wait until the watchdog of this rank knows where the others run, and say so."""
    (watchdog,) = (watchdog for watchdog, _ in process.watching)
    assert watchdog is not None
    wait_for(lambda: bool(watchdog._all_processes))
    (folder / f"knows-{dist.get_rank()}").touch()


def wait_until_known(folder: Path) -> None:
    """Wait until all other ranks have noted that they know where this one runs."""
    wait_for(lambda: len(list(folder.glob("knows-*"))) == dist.get_world_size() - 1)


def report(folder: Path) -> str:
    """Return the one report there is."""
    (path,) = folder.glob("hang-*.txt")
    return path.read_text()


def hold(folder: Path) -> None:
    """Let time pass, and stay here until there is a report."""
    let_time_pass(folder)
    wait_for_report(folder)


def hold_the_lock(folder: Path) -> None:
    """Hold Python's lock, which gives no other thread of this process a chance, until there is a report."""
    until = f"for i in $(seq 6000); do ls {folder}/hang-*.txt && break; sleep 0.05; done"
    ctypes.PyDLL(None).system(f"(touch {folder}/clock/late; {until}) > /dev/null 2>&1".encode())


def continue_after_report(folder: Path, pid: int) -> None:
    """In a thread, let time pass when a process has stopped, and let it go on when there is a report."""

    def go() -> None:
        try:
            wait_for(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
            hold(folder)
        finally:
            os.kill(pid, signal.SIGCONT)

    threading.Thread(target=go, daemon=True).start()


def wait_for_report(folder: Path) -> None:
    """Wait until there is a report, and fail if there is none."""
    wait_for(lambda: any(folder.glob("hang-*.txt")))


@contextmanager
def notices(folder: Path) -> Iterator[Callable[[], list[str]]]:
    """Within the block, write what goes to stderr into a file; give the notices in the files of all ranks."""
    (folder / "stderr").mkdir(exist_ok=True)
    before = os.dup(2)
    with (folder / "stderr" / os.environ["RANK"]).open("wb") as file:
        os.dup2(file.fileno(), 2)
        try:
            yield lambda: [
                line
                for path in (folder / "stderr").iterdir()
                for line in path.read_text().splitlines()
                if line.startswith("colossalai watchdog: rank")
            ]
        finally:
            os.dup2(before, 2)
            os.close(before)


def wait_for(is_so: Callable[[], bool]) -> None:
    """Wait until something is so, and fail if it does not become so."""
    end = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < end, "it does not become so"
        time.sleep(0.02)
