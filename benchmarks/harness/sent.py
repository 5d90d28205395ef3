"""What a rank sends in a step: bytes and messages as on a ring, and what the kernel has seen of them.

Torch's own ways are seen where they hand collectives to a process group, ours by the ledger, as collectives
through shared memory never reach torch's groups. Both are counted by the same table, that of a ring of p
ranks. The kernel's count is of what goes through sockets (`/proc/self/io`): with `backend="gloo"` all of it
on both sides, else nothing of ours. Nothing else may write meanwhile.
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

_SETTLED_S = 0.2  # for threads that are still sending
# Of each of torch's operations: what the ledger calls it.
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
    "broadcast": lambda p: (p - 1) / p,  # the mean over the ranks, of which the last sends nothing on
    "all_to_all": lambda p: p - 1,
    "exchange": lambda p: p - 1,
}
_BYTES: dict[str, Callable[[int, int], float]] = {
    "all_reduce": lambda p, n: 2 * (p - 1) / p * n,
    "all_gather": lambda p, n: (p - 1) / p * n,  # of the output, the largest operand as everywhere
    "reduce_scatter": lambda p, n: (p - 1) / p * n,
    "broadcast": lambda p, n: (p - 1) / p * n,
    "all_to_all": lambda p, n: (p - 1) / p * n,  # of what goes out and comes in the larger: splits are uneven
}


@dataclass(frozen=True)
class Sent:
    """What a rank has sent.

    Attributes:
        num_bytes: As on a ring.
        num_messages: As on a ring.
        through_sockets: Bytes that the kernel has taken to sockets.
        of_all_to_all: The part of `num_bytes` that all-to-alls of torch's groups have sent.
    """

    num_bytes: float
    num_messages: float
    through_sockets: int
    of_all_to_all: float = 0.0


class _Collectives(TorchDispatchMode):
    """Notes the collectives of torch's process groups, those of a backward from C++ included."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []  # name, and bytes of the largest operand

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and note it."""
        name = func._schema.name.rpartition("::")[2]
        is_functional = func.namespace == "_c10d_functional" and name in _NAMES
        if not is_functional and func.namespace != "c10d":
            return func(*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        operands = [leaf for leaf in tree_leaves((args, result)) if isinstance(leaf, torch.Tensor)]
        self.seen.append((_NAMES.get(name, name), max(operand.nbytes for operand in operands)))
        return result


def count_sent(step: Callable[[], Any], *, is_ours: bool) -> Sent:
    """Run a step and return what this rank has sent in it.

    Args:
        step: The step.
        is_ours: Whether it communicates by `colossalai.communication`.
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
