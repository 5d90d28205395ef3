"""Meeting: the ranks of a group that share a machine find one another and map one segment.

They meet in the store of the group, when it is made. Each says where it runs; the lowest of those with the
same kernel makes a segment, and the others try to open it: see [Note: who shares a machine] in `_segment.py`.
Those that can are an island. Then each reserves its first memory there; where one has none, nobody on the
island uses it.
"""

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from colossalai.communication.shared_memory._counters import LINE
from colossalai.communication.shared_memory._layout import FIRST_ROOM, START, SegmentLayout
from colossalai.communication.shared_memory._segment import (
    NoMemoryError,
    Segment,
    create_segment,
    open_segment,
)

MOST_RANKS = 128  # on one machine; more would not fit into the first parts of the slots


@dataclass(frozen=True)
class Island:
    """Ranks of a group that share memory.

    Attributes:
        ranks: Their ranks in the group, in order.
        index: The place of this rank among them.
        segment: What they share; None on an island of one, or where there is no memory.
        layout: Of the segment.
        pids: Of the processes of the others, by index; of those in another PID namespace none.
        reason: Why there is no segment though there are several ranks.
    """

    ranks: tuple[int, ...]
    index: int
    segment: Segment | None
    layout: SegmentLayout
    pids: dict[int, int]
    reason: str = ""


def meet(store: dist.Store, rank: int, num_ranks: int, *, timeout: timedelta, budget: int) -> list[Island]:
    """Find the islands of a group; all of its ranks call this.

    Args:
        store: Of this group alone.
        rank: This rank.
        num_ranks: How many there are.
        timeout: How long the others may take.
        budget: Bytes that this rank may take.

    Returns:
        The islands by their lowest ranks; that of this rank has a segment, if there is one.

    Raises:
        DistStoreError: A rank does not come within `timeout`.
    """
    if num_ranks == 1:
        return [_alone(budget)]
    table = _Table(store, rank, num_ranks, timeout)
    told = table.exchange("place", _place())
    near = [other for other in range(num_ranks) if told[other]["kernel"] == told[rank]["kernel"]]
    if not told[rank]["kernel"] or len(near) > MOST_RANKS:
        near = [rank]
    is_named = len({told[other]["pids"] for other in near}) > 1  # /proc/PID means another process there
    segment, reason = _offered(near, rank, is_named=is_named)
    offered = table.exchange("offer", _offer(segment) if near[0] == rank else {})
    if near[0] != rank:
        offer = offered[near[0]]
        if offer.get("size") == SegmentLayout(len(near)).size:
            segment = open_segment(offer["paths"], bytes.fromhex(offer["token"]), offer["size"])
    if segment is not None:
        reason = _reserve_first(segment, SegmentLayout(len(near)), near.index(rank), budget)
    found = table.exchange("mapped", {"with": near[0] if segment is not None else rank, "reason": reason})
    islands = _islands([item["with"] for item in found])
    ranks = next(island for island in islands if rank in island)
    index = ranks.index(rank)
    if any(set(island) < set(other) for island in islands for other in _by_kernel(told)):
        # Some could not map what those with the same kernel have, so that places are others now.
        if segment is not None:
            reason = reason or _reserve_first(segment, SegmentLayout(len(ranks)), index, budget)
        found = table.exchange("again", {"reason": reason})
    if segment is not None:
        segment.hide()
    reason = next((found[other]["reason"] for other in ranks if found[other]["reason"]), "")
    if segment is not None and (len(ranks) == 1 or reason):
        segment.close()
        segment = None
    same_numbers = [other for other in ranks if told[other]["pids"] == told[rank]["pids"] and other != rank]
    return [
        Island(
            ranks=island,
            index=index if rank in island else -1,
            segment=segment if rank in island else None,
            layout=SegmentLayout(len(island)),
            pids={ranks.index(other): told[other]["pid"] for other in same_numbers} if rank in island else {},
            reason=reason if rank in island else "",
        )
        for island in islands
    ]


class _Table:
    """What all ranks say of themselves, in rounds."""

    def __init__(self, store: dist.Store, rank: int, num_ranks: int, timeout: timedelta) -> None:
        self._store, self._rank, self._num_ranks, self._timeout = store, rank, num_ranks, timeout

    def exchange(self, what: str, own: dict[str, Any]) -> list[dict[str, Any]]:
        """Say something and return what all have said, by rank."""
        self._store.set(f"{what}/{self._rank}", json.dumps(own))
        keys = [f"{what}/{other}" for other in range(self._num_ranks)]
        self._store.wait(keys, self._timeout)
        return [json.loads(text) for text in self._store.multi_get(keys)]


def _place() -> dict[str, Any]:
    """Say where this process runs: which kernel, which numbering of processes, whose it is."""
    kernel = pids = ""
    with suppress(OSError):
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        pids = os.readlink("/proc/self/ns/pid")
    return {"kernel": f"{kernel}/{os.geteuid()}" if kernel else "", "pids": pids, "pid": os.getpid()}


def _offered(near: Sequence[int], rank: int, *, is_named: bool) -> tuple[Segment | None, str]:
    """Make the segment, if that is for this rank to do."""
    if near[0] != rank or len(near) == 1:
        return None, ""
    layout, reasons = SegmentLayout(len(near)), []
    for named in (True,) if is_named else (False, True):
        try:
            return _new_segment(layout, named=named), ""
        except NoMemoryError as error:
            reasons.append(str(error))
    return None, "; ".join(dict.fromkeys(reasons))


def _alone(budget: int) -> Island:
    layout = SegmentLayout(1)
    try:
        segment = _new_segment(layout, named=False)
    except NoMemoryError as error:
        return Island(ranks=(0,), index=0, segment=None, layout=layout, pids={}, reason=str(error))
    reason = _reserve_first(segment, layout, 0, budget)
    return Island(
        ranks=(0,), index=0, segment=None if reason else segment, layout=layout, pids={}, reason=reason
    )


def _new_segment(layout: SegmentLayout, *, named: bool) -> Segment:
    """Make a segment whose counters are where all begin."""
    segment = create_segment(layout.size, first=layout.first, named=named)
    for index in range(layout.num_ranks):
        segment.words[(layout.progress + LINE * index) // 4] = START
    return segment


def _offer(segment: Segment | None) -> dict[str, Any]:
    if segment is None:
        return {}
    return {"paths": segment.offers(), "token": segment.token.hex(), "size": segment.size}


def _by_kernel(told: Sequence[dict[str, Any]]) -> list[tuple[int, ...]]:
    kernels = dict.fromkeys(item["kernel"] for item in told if item["kernel"])
    found = (tuple(rank for rank, item in enumerate(told) if item["kernel"] == name) for name in kernels)
    return [ranks for ranks in found if len(ranks) <= MOST_RANKS]


def _islands(leaders: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the groups of ranks that have mapped the segment of the same one."""
    found: dict[int, list[int]] = {}
    for rank, leader in enumerate(leaders):
        found.setdefault(leader, []).append(rank)
    return sorted(map(tuple, found.values()))


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
