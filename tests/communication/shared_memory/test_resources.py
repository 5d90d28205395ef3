"""Groups take nothing that they do not give back: memory, descriptors, threads."""

import ctypes
import gc
import os
import sys
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
# For each of many groups: torch keeps some names, and rank 0 the store with what was said at meetings.
KEPT_BYTES, STORED_BYTES, BLOCKS = 2000, 6000, 20
GIVE_BACK_S = 120.0
NO_THREADS = {"further threads": 0}
SLACK_BYTES = 512 << 10  # buffers that happen to be in use; many groups show what leaks


def taken():
    """Return how many descriptors, threads and shared mappings this process has, and the ids of its threads.

    The ids also of those that are not Python's.
    """
    gc.collect()
    maps = Path("/proc/self/maps").read_text()
    found = {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "segments": maps.count("memfd:colossalai"),
        "open": len(list(open_groups._open)),
    }
    return found, set(os.listdir("/proc/self/task"))


def taken_after(before):
    """Return what this process has when that is as before, or has not become so in minutes.

    A thread that is joined may not have left the kernel yet, nor a connection of torch's store.
    """
    end = time.monotonic() + GIVE_BACK_S
    while True:
        (counts, threads), (counts_before, threads_before) = taken(), before
        counts["further threads"] = len(threads - threads_before)
        if counts == counts_before | NO_THREADS or time.monotonic() > end:
            return counts
        time.sleep(0.01)


class MallocInfo(ctypes.Structure):
    """Memory of `malloc`, of all its arenas: `struct mallinfo2` of glibc."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def in_use():
    """Return how many bytes of `malloc` are in use (0 without glibc 2.33), and how many blocks of Python."""
    gc.collect()
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", MallocInfo)
    mallinfo.restype = MallocInfo
    info = mallinfo()
    return info.uordblks + info.hblkhd, sys.getallocatedblocks()


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
    return is_right, before[0], during[0], taken_after(before)


def test_nothing_is_left_of_a_group_that_is_destroyed(tmp_path):
    for is_right, before, during, after in run_ranks(make_use_and_destroy, 2, tmp_path):
        assert is_right
        assert during["segments"] == before["segments"] + 2 + 1  # and the arena of the other process
        assert during["open"] == 2
        assert during["threads"] == before["threads"] + 4
        assert after == before | NO_THREADS


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
    return talk, is_right, before[0], during[0], taken_after(before)


@pytest.mark.parametrize("count", [50, further(200)])
def test_many_groups_at_once(tmp_path, count):
    for talk, is_right, before, during, after in run_ranks(make_many_at_once, 2, tmp_path, count):
        assert talk == {"shared memory"}
        assert is_right
        assert during["segments"] == before["segments"] + count + 1 + 1  # and the arena of the other process
        # Two for each segment, as Python's mmap has its own one; that of the other process is shared by all,
        # and so is its arena, which is mapped by one.
        assert during["descriptors"] <= before["descriptors"] + 2 * (count + 1) + 2
        assert after == before | NO_THREADS


def make_many_one_after_another(count):
    """Return what was taken and in use after each tenth."""
    dist.init_process_group("shared_memory")
    rank, before, found, used = dist.get_rank(), None, [], []
    for number in range(count):
        pg = dist.new_group()
        tensor = torch.ones(2)
        if number % 10:
            dist.all_reduce(tensor, group=pg)
        else:
            dist.all_reduce(tensor, group=pg, async_op=True).wait()
            dist.isend(tensor, 1 - rank, group=pg)
            dist.recv(torch.zeros(2), 1 - rank, group=pg)
        dist.destroy_process_group(pg)
        if before is None:
            dist.barrier()
            before = taken()
        if number % (count // 10) == count // 10 - 1:
            found.append(taken_after(before))
            used.append(in_use())
            dist.barrier()  # at its end the other rank closes its connection to the store
    dist.destroy_process_group()
    return before[0], found, used


@pytest.mark.parametrize("count", [100, further(1_000), in_soak(10_000)])
def test_groups_made_and_destroyed_leave_nothing(count):
    results = run_ranks(make_many_one_after_another, 2, count)
    for rank, (before, found, used) in enumerate(results):
        assert found == [before | NO_THREADS] * 10
        num_bytes, num_blocks = (last - first for first, last in zip(used[1], used[-1], strict=True))
        num_groups = count * 8 // 10
        assert num_bytes < (STORED_BYTES if rank == 0 else KEPT_BYTES) * num_groups + SLACK_BYTES, used
        assert num_blocks < BLOCKS * num_groups, used
