"""Bytes and messages that a rank sends in a step: counted as on a ring, and as reported by the kernel.

Torch's collectives are counted where they are passed to a process group. Ours are counted by the ledger, as
collectives through shared memory do not use torch's groups. One table, for a ring of p ranks, applies to
both. The kernel counts bytes through sockets (`/proc/self/io`): with `backend="gloo"` all bytes of both
sides, else none of ours. The process must not write anything else meanwhile.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from colossalai.communication import ledger

_SETTLED_S = 0.2  # wait for threads that are still sending
# Names of torch's operations in the ledger.
_NAMES = {
    "allreduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "broadcast_": "broadcast",
    "alltoall_base_": "all_to_all",
    "all_to_all_single": "all_to_all",
}
_MESSAGES: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda p: 2 * (p - 1),
    "all_gather": lambda p: p - 1,
    "reduce_scatter": lambda p: p - 1,
    "broadcast": lambda p: (p - 1) / p,  # mean over the ranks: the last one does not forward
    "all_to_all": lambda p: p - 1,
    "exchange": lambda p: p - 1,
}
_BYTES: dict[str, Callable[[int, int], float]] = {
    "all_reduce": lambda p, n: 2 * (p - 1) / p * n,
    "all_gather": lambda p, n: (p - 1) / p * n,  # n is the size of the output, the largest operand
    "reduce_scatter": lambda p, n: (p - 1) / p * n,
    "broadcast": lambda p, n: (p - 1) / p * n,
    "all_to_all": lambda p, n: (p - 1) / p * n,  # n is the larger of input and output: splits are uneven
}


@dataclass(frozen=True)
class Sent:
    """Traffic of a rank.

    Attributes:
        num_bytes: Number of sent bytes, as on a ring.
        num_messages: Number of sent messages, as on a ring.
        through_sockets: Number of bytes written to sockets, by the kernel.
        of_all_to_all: Part of `num_bytes` from all-to-alls of torch's groups.
    """

    num_bytes: float
    num_messages: float
    through_sockets: int
    of_all_to_all: float = 0.0


class _Collectives(TorchDispatchMode):
    """Record of the collectives of torch's process groups, including those that C++ issues in a backward."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []  # name, and bytes of the largest operand

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and record it."""
        name = func._schema.name.rpartition("::")[2]
        is_functional = func.namespace == "_c10d_functional" and name in _NAMES
        if not is_functional and func.namespace != "c10d":
            return func(*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        operands = [leaf for leaf in tree_leaves((args, result)) if isinstance(leaf, torch.Tensor)]
        self.seen.append((_NAMES.get(name, name), max(operand.nbytes for operand in operands)))
        return result


def count_sent(step: Callable[[], Any], *, is_ours: bool) -> Sent:
    """Run a step and return this rank's traffic.

    Args:
        step: Step to run.
        is_ours: Whether the step communicates by `colossalai.communication`.
    """
    dist.barrier()
    time.sleep(_SETTLED_S)
    before = _through_sockets()
    with ledger() as book, _Collectives() as collectives:
        step()
        time.sleep(_SETTLED_S)
    through_sockets = _through_sockets() - before
    num_ranks = dist.get_world_size()
    if is_ours:
        names = [entry.op for entry in book.entries]
        num_bytes = book.num_bytes()
    else:
        names = [name for name, _ in collectives.seen]
        num_bytes = math.fsum(_BYTES[name](num_ranks, size) for name, size in collectives.seen)
    return Sent(
        num_bytes,
        math.fsum(_MESSAGES[name](num_ranks) for name in names),
        through_sockets,
        math.fsum(_BYTES[name](num_ranks, size) for name, size in collectives.seen if name == "all_to_all"),
    )


def _through_sockets() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("wchar"))
