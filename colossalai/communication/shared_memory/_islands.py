"""Rendezvous of the ranks of a group that share a machine: they map one segment.

When a group is made, its ranks rendezvous in its store. Each publishes its kernel. Ranks with the same kernel
are an island: the lowest one makes a segment, the others open it (see [Note: detection of shared machines] in
`_segment.py`), and each reserves its first memory there. If one rank fails, the whole group uses gloo.
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

MOST_RANKS = 128  # per machine; more would not fit into the first parts of the slots


@dataclass(frozen=True)
class Island:
    """Ranks of a group that share memory, from the view of one of them.

    Attributes:
        ranks: Group ranks of the island, in order.
        index: Index of this rank in `ranks`.
        machines: Group ranks of all islands, ordered by their lowest ones.
        segment: The shared segment; None if no ranks share a machine, or if a rank of the group failed.
        layout: Layout of the segment.
        pids: Process ids of the other ranks by index, without those in another PID namespace.
        arenas: Arenas of the other ranks by index; empty if a rank of the group could not map one.
        reason: Reason for a missing segment although some ranks share a machine.
    """

    ranks: tuple[int, ...]
    index: int
    machines: list[tuple[int, ...]]
    segment: Segment | None
    layout: SegmentLayout
    pids: dict[int, int]
    arenas: dict[int, Segment] = field(default_factory=dict)
    reason: str = ""


def form_island(
    store: dist.Store,
    rank: int,
    num_ranks: int,
    *,
    timeout: timedelta,
    budget: int,
    arenas: Arenas,
    arena_size: int,
) -> Island:
    """Form the islands of a group and return that of this rank; collective over the group.

    Args:
        store: Store of this group alone.
        rank: Rank of this process in the group.
        num_ranks: Number of ranks of the group.
        timeout: Time limit of the waits for other ranks.
        budget: Bytes that this rank may reserve.
        arenas: Arena of this process, and the mapped arenas of others.
        arena_size: Size of the arena of this process, if it has to be made.

    Returns:
        The island, with a segment if all ranks of the group succeed.

    Raises:
        DistStoreError: A rank does not arrive within `timeout`.
    """
    exchange = partial(_exchange, store, rank, num_ranks, timeout)
    arena = arenas.own(arena_size) if num_ranks > 1 else None
    # Step 1: kernel, PID namespace, process id and arena of every rank.
    locations = exchange("place", _location() | {"arena": arena and arena.offer()})
    machines = _by_kernel(locations)
    near = next(ranks for ranks in machines if rank in ranks)
    index, layout = near.index(rank), SegmentLayout(len(near))
    same_numbers = [
        other for other in near if locations[other]["pids"] == locations[rank]["pids"] and other != rank
    ]
    opened = {
        near.index(other): arenas.open(locations[other]["arena"]) if locations[other]["arena"] else None
        for other in near
        if other != rank
    }
    segment, reasons = None, [""]
    if len(machines) < num_ranks or num_ranks == 1:
        is_named = (
            len({locations[other]["pids"] for other in near}) > 1
        )  # /proc/PID differs between namespaces
        segment, reason = _new_segment(layout, is_named=is_named) if index == 0 else (None, "")
        # Step 2: the lowest rank of each island publishes its segment; the others wait for it.
        offer = exchange("offer", _offer(segment) if index == 0 else {})[near[0]]
        if index != 0 and offer:
            segment = open_segment(offer["paths"], bytes.fromhex(offer["token"]), layout.size)
            reason = "" if segment is not None else f"rank {rank} cannot map what rank {near[0]} shares"
        if segment is not None:
            reason = _reserve_first(segment, layout, index, budget)
        # Step 3: after it all ranks have mapped the segment, or all know that one has not.
        found = exchange("mapped", {"reason": reason, "arenas": all(opened.values())})
        reasons = [item["reason"] for item in found]
        if not all(item["arenas"] for item in found):
            opened = {}
    if segment is not None:
        # All ranks of the island have opened the file, so its name is not needed any more.
        segment.hide()
        if any(reasons):  # all ranks have the same reasons, so all of them use gloo
            segment.close()
            segment = None
    return Island(
        ranks=near,
        index=index,
        machines=machines,
        segment=segment,
        layout=layout,
        pids={near.index(other): locations[other]["pid"] for other in same_numbers},
        arenas={index: arena for index, arena in opened.items() if arena is not None},
        reason=next(filter(None, reasons), ""),
    )


def _exchange(
    store: dist.Store, rank: int, num_ranks: int, timeout: timedelta, what: str, own: dict[str, Any]
) -> list[dict[str, Any]]:
    """Return the values of all ranks, by rank; collective, through the store. Waits for the slowest rank."""
    if num_ranks == 1:
        return [own]
    # Joined by all ranks of the group, under a key per step and rank, so that the steps cannot mix.
    store.set(f"{what}/{rank}", json.dumps(own))
    keys = [f"{what}/{other}" for other in range(num_ranks)]
    store.wait(keys, timeout)
    return [json.loads(text) for text in store.multi_get(keys)]


def _location() -> dict[str, Any]:
    """Return the location of this process: kernel and user, PID namespace, process id."""
    kernel, pids = kernel_and_namespace("pid")
    return {"kernel": f"{kernel}/{os.geteuid()}" if kernel else "", "pids": pids, "pid": os.getpid()}


def _new_segment(layout: SegmentLayout, *, is_named: bool) -> tuple[Segment | None, str]:
    """Make a segment with initialized counters; return None and the reason if that fails."""
    reasons = []
    for named in (True,) if is_named else (False, True):
        try:
            segment = create_segment(layout.size, first=layout.first, named=named)
        except NoMemoryError as error:
            reasons.append(str(error))
            continue
        for index in range(layout.num_ranks):
            # Before the segment is offered: every rank starts from the same counters.
            segment.words[(layout.progress + LINE * index) // 4] = START
        return segment, ""
    return None, "; ".join(dict.fromkeys(reasons))


def _offer(segment: Segment | None) -> dict[str, Any]:
    if segment is None:
        return {}
    return {"paths": segment.offers(), "token": segment.token.hex()}


def _by_kernel(locations: Sequence[dict[str, Any]]) -> list[tuple[int, ...]]:
    """Return the ranks of each machine, by the lowest one; ranks that cannot share memory are alone."""
    machines: dict[Any, list[int]] = {}
    for rank, item in enumerate(locations):
        machines.setdefault(item["kernel"] or rank, []).append(rank)
    found: list[tuple[int, ...]] = []
    for ranks in machines.values():
        found += [tuple(ranks)] if len(ranks) <= MOST_RANKS else [(rank,) for rank in ranks]
    return sorted(found)


def _reserve_first(segment: Segment, layout: SegmentLayout, index: int, budget: int) -> str:
    """Reserve the initial slot of a rank; return the reason if that fails, else an empty text."""
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
