"""Groups take nothing that they do not give back: memory, descriptors, threads."""

import gc
import os
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from colossalai.communication.shared_memory import transport_of
from colossalai.communication.shared_memory._membership import open_groups
from tests.communication.shared_memory.ranks_that_end import group
from tests.ranks import run_ranks
from tests.tiers import further, in_soak

pytestmark = pytest.mark.dist
THREAD_END_S = 2.0
SECONDS = 60.0  # for making groups, of which as many are made as there is time for
# Bytes for each of many groups: torch keeps some names, and rank 0 the store with what was said at meetings.
KEPT, STORED = 2000, 6000
SLACK = 4 << 20  # memory comes in arenas, of which few groups may just need some more; many show what leaks


def taken(expected=None):
    """Return how many descriptors, threads (of Python, and in all) and shared mappings this process has.

    A thread that has been joined may not have left the kernel yet: what differs from `expected` gets time.
    """
    gc.collect()
    deadline = time.monotonic() + THREAD_END_S
    found, last = _taken_now(), {}
    while found != (expected or last) and time.monotonic() < deadline:
        time.sleep(0.02)
        last, found = found, _taken_now()
    return found


def _taken_now():
    maps = Path("/proc/self/maps").read_text()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "tasks": len(os.listdir("/proc/self/task")),
        "segments": maps.count("memfd:colossalai"),
        "open": len(list(open_groups._open)),
    }


def resident():
    """Return the bytes of memory of its own that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def use(pg, rank):
    """Use all that a group has: its slots, its thread, both mailboxes and their threads."""
    tensor = torch.ones(40_000)
    work = dist.all_reduce(tensor, group=pg, async_op=True)
    received = torch.zeros(2 << 20)
    pending = dist.irecv(received, 1 - rank, group=pg)
    sending = dist.isend(torch.full((2 << 20,), float(rank)), 1 - rank, group=pg)
    work.wait()
    pending.wait()
    sending.wait()
    return tensor[-1].item() == 2.0 and received[-1].item() == 1 - rank


def make_use_and_destroy(path):
    with group(path / "before"):
        pass
    before = taken()
    with group(path / "all") as rank:
        is_right = use(None, rank) and use(dist.new_group(), rank)
        during = taken()
    return is_right, before, during, taken(before)


def test_nothing_is_left_of_a_group_that_is_destroyed(tmp_path):
    for is_right, before, during, after in run_ranks(make_use_and_destroy, 2, tmp_path):
        assert is_right
        assert during["segments"] == before["segments"] + 2 + 1  # and the arena of the other process
        assert during["open"] == 2
        assert during["threads"] == before["threads"] + 4
        assert after == before


def make_many_at_once(path, count):
    with group(path / "before"):
        pass
    before = taken()
    with group(path / "many") as rank:
        groups = [dist.new_group() for _ in range(count)]
        talk = {transport_of(pg) for pg in groups}
        tensors = [torch.full((100,), float(number)) for number in range(count)]
        works = [
            dist.all_reduce(tensor, group=pg, async_op=True)
            for pg, tensor in zip(groups, tensors, strict=True)
        ]
        for work in reversed(works) if rank else works:
            work.wait()
        is_right = all(tensor.eq(2.0 * number).all() for number, tensor in enumerate(tensors))
        during = taken()
        del groups, works
    return talk, is_right, before, during, taken(before)


@pytest.mark.parametrize("count", [50, further(200)])
def test_many_groups_at_once(tmp_path, count):
    for talk, is_right, before, during, after in run_ranks(make_many_at_once, 2, tmp_path, count):
        assert talk == {"shared memory"}
        assert is_right
        assert during["segments"] == before["segments"] + count + 1 + 1  # and the arena of the other process
        # Two for each segment, as Python's mmap has its own one; that of the other process is shared by all,
        # and so is its arena, which is mapped by one.
        assert during["descriptors"] <= before["descriptors"] + 2 * (count + 1) + 2
        assert after == before


def make_many_one_after_another(most, seconds):
    """Return how many were made, and what was taken and used after the first tenth and in the end."""
    dist.init_process_group("shared_memory")
    rank, found, sizes, begun = dist.get_rank(), [], [], time.monotonic()
    is_over = torch.zeros(1)
    for number in range(most):
        pg = dist.new_group()
        tensor = torch.ones(2)
        if number % 10:
            dist.all_reduce(tensor, group=pg)
        else:
            dist.all_reduce(tensor, group=pg, async_op=True).wait()
            dist.isend(tensor, 1 - rank, group=pg)
            dist.recv(torch.zeros(2), 1 - rank, group=pg)
        dist.destroy_process_group(pg)
        if number % (most // 10) == most // 10 - 1:
            found.append(taken(found[0] if found else None))
            sizes.append(resident())
            is_over[0] = float(time.monotonic() - begun > seconds)
            dist.all_reduce(is_over, dist.ReduceOp.MAX)
            if is_over.item():
                break
    dist.destroy_process_group()
    return number + 1, found, sizes


@pytest.mark.parametrize("most", [100, further(1_000), in_soak(10_000)])
def test_groups_made_and_destroyed_leave_nothing(most):
    results = run_ranks(make_many_one_after_another, 2, most, SECONDS)
    for rank, (count, found, sizes) in enumerate(results):
        assert len(found) > 2, "too few to compare"
        assert all(taken == found[0] for taken in found[1:]), found
        of_each = (sizes[-1] - sizes[1]) / (count - 2 * most // 10)
        print(f"{count} groups; bytes of memory of each: {of_each:.0f}: {sizes}")
        assert of_each < (STORED if rank == 0 else KEPT) + SLACK / most, sizes
