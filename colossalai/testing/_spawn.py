"""`spawn`: run a function on several ranks of this machine, one process per rank."""

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing as mp

from colossalai.cluster import free_port


def spawn(func: Callable[..., Any], nprocs: int = 1, **kwargs: Any) -> None:
    """Call `func(rank=..., world_size=nprocs, port=..., **kwargs)` in `nprocs` new processes, and wait.

    The function launches the job itself, with the rank, the world size and the (free) port of its arguments.
    Each process is a new interpreter, so a script must call `spawn` under `if __name__ == "__main__":`. The
    processes share the cores of the machine, unless OMP_NUM_THREADS sets the number of threads of each.

    Args:
        func: A function at the top level of a module.
        nprocs: Number of processes.
        **kwargs: Further arguments of `func`, picklable.

    Raises:
        ValueError: `nprocs` is below 1, or `kwargs` holds an argument that `spawn` passes itself.
        torch.multiprocessing.ProcessRaisedException: A process raised (the message has its traceback); the
            other processes are terminated.
        torch.multiprocessing.ProcessExitedException: A process was killed or exited with an error code.
    """
    if nprocs < 1:
        raise ValueError(f"nprocs is {nprocs}; it must be at least 1")
    given = {"rank", "world_size", "port"} & set(kwargs)
    if given:
        raise ValueError(
            f"spawn passes {sorted(given)} itself; give these arguments of {func.__name__} other names"
        )
    mp.spawn(_call, args=(func, nprocs, free_port(), kwargs), nprocs=nprocs)


def _call(rank: int, func: Callable[..., Any], world_size: int, port: int, kwargs: dict[str, Any]) -> None:
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // world_size))
    func(rank=rank, world_size=world_size, port=port, **kwargs)
