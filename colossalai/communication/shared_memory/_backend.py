"""Which process group the backend "shared_memory" makes; torch knows it by `colossalai._torch_backend`."""

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from colossalai._torch_backend import NAME
from colossalai.communication.shared_memory._group import SharedMemoryGroup
from colossalai.communication.shared_memory._meeting import meet
from colossalai.communication.shared_memory._membership import Membership, members
from colossalai.logging import get_dist_logger
from colossalai.monitor import CallRecord


def how_ranks_talk(group: dist.ProcessGroup | None = None) -> str:
    """Say by what the ranks of a group communicate: "shared memory", or "gloo" and why not by the former.

    Args:
        group: One of this backend; default: the default group.
    """
    group = dist.group.WORLD if group is None else group
    return "shared memory" if isinstance(group, SharedMemoryGroup) else "gloo"


def make_group(options: Any) -> Any:
    """Make the process group that torch asks for; all of its ranks call this.

    Args:
        options: Of torch: store, rank, size, name and time limit.

    Returns:
        A group over shared memory; one of gloo where the ranks do not share any, with a line that says why.
    """
    rank, num_ranks, timeout = options.group_rank, options.group_size, options.timeout
    if not isinstance(timeout, timedelta):
        timeout = timedelta(seconds=timeout)
    store = dist.PrefixStore(NAME, options.store)
    islands = meet(store, rank, num_ranks, timeout=timeout, budget=members.budget(num_ranks))
    own = next(island for island in islands if rank in island.ranks)
    if len(islands) == 1 and own.segment is not None:
        ranks = list(options.global_ranks_in_group) or list(range(num_ranks))
        record = CallRecord(str(options.group_id))
        membership = Membership(
            own, ranks=ranks, where=lambda: record.where(ranks), timeout=timeout.total_seconds()
        )
        return SharedMemoryGroup(membership, store=options.store, timeout=timeout, record=record)
    if own.segment is not None:
        own.segment.close()
    if own.reason:
        get_dist_logger().log_once(
            f"the ranks of this machine talk over gloo, not through its memory: {own.reason}", level="WARNING"
        )
    return dist.ProcessGroupGloo(dist.PrefixStore("gloo", options.store), rank, num_ranks, timeout)
