"""Jobs that hang, in the pool of ranks: where the watchdog only reports, they can go on."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

import colossalai
from colossalai.communication import all_reduce
from colossalai.context import ParallelMode
from colossalai.context._process import process
from colossalai.core import global_context as gpc

TP = ParallelMode.PARALLEL_1D
TIMEOUT_S = 0.6
_MEET_S = _WAIT_S = 30.0


def launch(
    folder: Path, *, action: str = "report", timeout: float = TIMEOUT_S, backend: str = "auto", **options: Any
) -> int:
    """Launch this rank with a watchdog, let it meet the others once, and return it."""
    config = {
        "parallel": {"tensor": {"size": int(os.environ["WORLD_SIZE"]), "mode": "1d"}},
        "watchdog": {"timeout": timeout, "action": action, "folder": str(folder), **options},
    }
    colossalai.launch_from_torch(config, backend=backend, verbose=False)
    meet()
    all_reduce(torch.ones(2), TP)
    return gpc.get_global_rank()


def meet() -> None:
    """Wait for the other ranks, and not in a collective: on a busy machine that would be a hang by itself."""
    store = distributed_c10d._get_default_store()
    store.set(f"meet/{dist.get_rank()}", "1")
    store.wait([f"meet/{rank}" for rank in range(dist.get_world_size())], timedelta(seconds=_MEET_S))


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
    end = time.monotonic() + _WAIT_S
    while not is_so():
        assert time.monotonic() < end, "it does not become so"
        time.sleep(0.02)
