"""Meeting: the ranks of a group that share a machine find one another and map one segment.

They meet in the store of the group, when it is made. Each says where it runs. Those with the same kernel are
an island: the lowest one makes a segment, the others open it, see [Note: who shares a machine] in
`_segment.py`, and each reserves its first memory there. Where one rank cannot, the whole group does without.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from colossalai.communication.shared_memory._counters import LINE
from colossalai.communication.shared_memory._layout import FIRST_ROOM, START, SegmentLayout
from colossalai.communication.shared_memory._segment import (
    Arenas,
    NoMemoryError,
    Segment,
    create_segment,
    open_segment,
)
from colossalai.monitor import kernel_and_namespace

MOST_RANKS = 128  # on one machine; more would not fit into the first parts of the slots


@dataclass(frozen=True)
class Island:
    """Ranks of a group that share memory, as one of them sees it.

    Attributes:
        ranks: Their ranks in the group, in order.
        index: The place of this rank among them.
        machines: The ranks of this island and of all others of the group, by their lowest ones.
        segment: What they share; None where all ranks are alone, or one of the group cannot.
        layout: Of the segment.
        pids: Of the processes of the others, by index; of those in another PID namespace none.
        arenas: Of the others, by index; empty where a rank of the group cannot map one, and lends nothing.
        reason: Why there is no segment though some ranks share a machine.
    """

    ranks: tuple[int, ...]
    index: int
    machines: list[tuple[int, ...]]
    segment: Segment | None
    layout: SegmentLayout
    pids: dict[int, int]
    arenas: dict[int, Segment] = field(default_factory=dict)
    reason: str = ""


def meet(
    store: dist.Store,
    rank: int,
    num_ranks: int,
    *,
    timeout: timedelta,
    budget: int,
    arenas: Arenas,
    arena_size: int,
) -> Island:
    """Find the island of this rank in a group; all of its ranks call this.

    Args:
        store: Of this group alone.
        rank: This rank.
        num_ranks: How many there are.
        timeout: How long the others may take.
        budget: Bytes that this rank may take.
        arenas: Of this process, and those it has mapped.
        arena_size: Of that of this process, if it has to be made.

    Returns:
        The island, with a segment if all ranks of the group can do their part.

    Raises:
        DistStoreError: A rank does not come within `timeout`.
    """
    exchange = partial(_exchange, store, rank, num_ranks, timeout)
    arena = arenas.own(arena_size) if num_ranks > 1 else None
    told = exchange("place", _place() | {"arena": arena and arena.offer()})
    machines = _by_kernel(told)
    near = next(ranks for ranks in machines if rank in ranks)
    index, layout = near.index(rank), SegmentLayout(len(near))
    same_numbers = [other for other in near if told[other]["pids"] == told[rank]["pids"] and other != rank]
    opened = {
        near.index(other): arenas.open(told[other]["arena"]) if told[other]["arena"] else None
        for other in near
        if other != rank
    }
    segment, reasons = None, [""]
    if len(machines) < num_ranks or num_ranks == 1:
        is_named = len({told[other]["pids"] for other in near}) > 1  # /proc/PID means another process there
        segment, reason = _new_segment(layout, is_named=is_named) if index == 0 else (None, "")
        offer = exchange("offer", _offer(segment) if index == 0 else {})[near[0]]
        if index != 0 and offer:
            segment = open_segment(offer["paths"], bytes.fromhex(offer["token"]), layout.size)
            reason = "" if segment is not None else f"rank {rank} cannot map what rank {near[0]} shares"
        if segment is not None:
            reason = _reserve_first(segment, layout, index, budget)
        found = exchange("mapped", {"reason": reason, "arenas": all(opened.values())})
        reasons = [item["reason"] for item in found]
        if not all(item["arenas"] for item in found):
            opened = {}
    if segment is not None:
        segment.hide()
        if any(reasons):  # the same is seen by all ranks: then the group is gloo's as a whole
            segment.close()
            segment = None
    return Island(
        ranks=near,
        index=index,
        machines=machines,
        segment=segment,
        layout=layout,
        pids={near.index(other): told[other]["pid"] for other in same_numbers},
        arenas={index: arena for index, arena in opened.items() if arena is not None},
        reason=next(filter(None, reasons), ""),
    )


def _exchange(
    store: dist.Store, rank: int, num_ranks: int, timeout: timedelta, what: str, own: dict[str, Any]
) -> list[dict[str, Any]]:
    """Return a value of each rank, by rank; all of them call this. Waits for the slowest one."""
    if num_ranks == 1:
        return [own]
    store.set(f"{what}/{rank}", json.dumps(own))
    keys = [f"{what}/{other}" for other in range(num_ranks)]
    store.wait(keys, timeout)
    return [json.loads(text) for text in store.multi_get(keys)]


def _place() -> dict[str, Any]:
    """Return where this process runs: the kernel, the numbering of processes, and the user."""
    kernel, pids = kernel_and_namespace("pid")
    return {"kernel": f"{kernel}/{os.geteuid()}" if kernel else "", "pids": pids, "pid": os.getpid()}


def _new_segment(layout: SegmentLayout, *, is_named: bool) -> tuple[Segment | None, str]:
    """Make a segment whose counters are where all begin; return why not, if it cannot be made."""
    reasons = []
    for named in (True,) if is_named else (False, True):
        try:
            segment = create_segment(layout.size, first=layout.first, named=named)
        except NoMemoryError as error:
            reasons.append(str(error))
            continue
        for index in range(layout.num_ranks):
            segment.words[(layout.progress + LINE * index) // 4] = START
        return segment, ""
    return None, "; ".join(dict.fromkeys(reasons))


def _offer(segment: Segment | None) -> dict[str, Any]:
    if segment is None:
        return {}
    return {"paths": segment.offers(), "token": segment.token.hex()}


def _by_kernel(told: Sequence[dict[str, Any]]) -> list[tuple[int, ...]]:
    """Return the ranks of each machine, by their lowest; those that cannot share memory are alone."""
    machines: dict[Any, list[int]] = {}
    for rank, item in enumerate(told):
        machines.setdefault(item["kernel"] or rank, []).append(rank)
    found: list[tuple[int, ...]] = []
    for ranks in machines.values():
        found += [tuple(ranks)] if len(ranks) <= MOST_RANKS else [(rank,) for rank in ranks]
    return sorted(found)


def _reserve_first(segment: Segment, layout: SegmentLayout, index: int, budget: int) -> str:
    """Reserve what every rank of a group has; return why it cannot be had."""
    if budget < 2 * FIRST_ROOM:
        return (
            f"the groups of this process would take more than its share of COLOSSALAI_SHARED_MEMORY; "
            f"{2 * FIRST_ROOM} bytes more are needed"
        )
    try:
        for half in range(2):
            segment.reserve(layout.slot(index, half), FIRST_ROOM)
    except NoMemoryError as error:
        return str(error)
    return ""
