"""A rank that dies is named by all others, whatever they are doing then, and at the next look at it."""

import itertools
import os
import random
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from colossalai._clock import Clock
from colossalai.communication.shared_memory._counters import SLICE_S
from colossalai.communication.shared_memory._layout import SegmentLayout
from colossalai.communication.shared_memory._watch import ProcessEnds, WaitLimit, Watch
from tests.communication.shared_memory.ranks_that_end import (
    HOURS_S,
    die,
    error_of,
    group,
    in_a_child,
    named,
    wait_for_file,
)
from tests.harness.clocks import FakeClock
from tests.ranks import run_ranks
from tests.tiers import in_soak

pytestmark = pytest.mark.dist
VICTIM = 2


def blocking(rank, path):
    if rank == VICTIM:
        die()
    dist.all_reduce(torch.ones(10))


def asynchronous(rank, path):
    if rank == VICTIM:
        die()
    dist.all_reduce(torch.ones(10), async_op=True).wait()


def of_a_future(rank, path):
    if rank == VICTIM:
        die()
    dist.all_reduce(torch.ones(10), async_op=True).get_future().wait()


def functionally(rank, path):
    if rank == VICTIM:
        die()
    functional.wait_tensor(functional.all_reduce(torch.ones(10), "sum", dist.group.WORLD))


def within_collectives(rank, path):
    tensor = torch.zeros(1 << 20)
    for number in itertools.count():
        if rank == VICTIM and number == 10:
            threading.Timer(0.02, die).start()
        dist.all_reduce(tensor)


def train(rank, path, victim=VICTIM, num_steps=10, seconds=0.02):
    """Train; the victim dies some seconds after a step, or after the beginning, which is step -1."""

    def die_after(step):
        if rank == victim and step == num_steps:
            threading.Timer(seconds, die).start()

    die_after(-1)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 200), nn.ReLU(), nn.Linear(200, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in itertools.count():
        die_after(step)
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()


def receive_in_a_chain(rank, path):
    if rank == VICTIM:
        die()
    dist.recv(torch.ones(10), rank + 1)


def receive_from_any(rank, path):
    if rank == VICTIM:
        die()
    dist.recv(torch.ones(10))


def send_much(rank, path):
    if rank == VICTIM:
        die()
    dist.send(torch.ones(16 << 20), VICTIM)


def send_little(rank, path):
    """There is room for the messages: a send looks at the other rank if the last look was some time ago."""
    if rank == VICTIM:
        die()
    dist.send(torch.ones(1), VICTIM)
    wait_for_file(path.with_suffix(".died"))
    for _ in range(3):
        time.sleep(2 * SLICE_S)
        dist.send(torch.ones(1), VICTIM)


def wait_within_another_group(rank, path):
    """Rank 0 waits for 1, which computes."""
    pair = dist.new_group([0, 1])
    if rank == VICTIM:
        die()
    if rank == 1:
        wait_for_file(path.with_suffix(".told"))
    try:
        dist.all_reduce(torch.ones(1), group=pair)
    finally:
        path.with_suffix(".told").touch()


CASES = (
    blocking,
    asynchronous,
    of_a_future,
    functionally,
    within_collectives,
    train,
    receive_in_a_chain,
    receive_from_any,
    send_much,
    send_little,
    wait_within_another_group,
)


def be_a_rank_until_one_dies(case, path, *args):
    with group(path) as rank:
        return error_of(lambda: case(rank, path, *args))


def lose_ranks(folder):
    found = {}
    for case in CASES:
        path = Path(folder) / case.__name__
        if int(os.environ["RANK"]) == VICTIM:
            in_a_child(be_a_rank_until_one_dies, case, path)
            path.with_suffix(".died").touch()
        else:
            found[case.__name__] = be_a_rank_until_one_dies(case, path)
    return found


def test_a_rank_that_dies_is_named_by_all_others(tmp_path):
    *survivors, _ = run_ranks(lose_ranks, 3, tmp_path)
    wrong = [
        f"{case} on rank {rank}: {said}"
        for rank, found in enumerate(survivors)
        for case, error in found.items()
        if (said := named(error, VICTIM))
    ]
    assert not wrong, "\n".join(wrong)


def lose_ranks_at_random(folder, count):
    """Every rank of each training is a child, of which one dies."""
    chance, wrong = random.Random(count), []
    for number in range(count):
        path, victim = Path(folder) / f"{number}", chance.randrange(3)
        when = max(-1, chance.randrange(-5, 50)), 0.01 * chance.random()
        found, status = in_a_child(be_a_rank_until_one_dies, train, path, victim, *when)
        is_victim = int(os.environ["RANK"]) == victim
        said = ("" if status == -9 else f"its status is {status}") if is_victim else named(found, victim)
        wrong += [f"kill {number} {when[1]:.4f} s after step {when[0]}: {said}"] * bool(said)
    return wrong


@pytest.mark.long  # one at a given moment is above
@pytest.mark.parametrize("count", [15, in_soak(50)])
def test_kills_at_random_moments_of_a_training(tmp_path, count):
    before = {path for path in Path("/dev/shm").iterdir() if path.name.startswith("colossalai-")}
    wrong = run_ranks(lose_ranks_at_random, 3, tmp_path, count)
    assert not any(wrong), "\n".join(line for lines in wrong for line in lines)
    assert {path for path in Path("/dev/shm").iterdir() if path.name.startswith("colossalai-")} <= before


def watch_of(pid: int, rank: int, ends: ProcessEnds, clock: Clock) -> Watch:
    """Return the watch of rank 0 in a group with the rank that is a process."""
    layout = SegmentLayout(2)
    segment = SimpleNamespace(words=[0] * (layout.first // 4))
    return Watch(
        segment,  # type: ignore[arg-type]
        layout,
        0,
        ranks=[0, rank],
        pids={1: pid},
        ends=ends,
        where=str,
        clock=clock,
    )


def wait_limit_of(watch: Watch) -> WaitLimit:
    return WaitLimit(watch, lambda: {1}, describe=lambda: "a call", timeout=HOURS_S)


def test_a_death_ends_a_wait_at_the_next_look_or_for_another_group_after_a_second() -> None:
    """Rank 1 dies; rank 0 waits for it in one group, and for rank 2, which lives, in another."""
    time_, ends = FakeClock(), ProcessEnds()
    process = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    watch = watch_of(process.pid, 1, ends, time_.clock)
    other = watch_of(os.getpid(), 2, ends, time_.clock)
    try:
        limit, other_limit = wait_limit_of(watch), wait_limit_of(other)
        for _ in range(10):
            limit.check()
            time_.sleep(SLICE_S)
        process.kill()
        process.communicate()
        died = time_.seconds
        said = "rank 1 has ended before the others were through with a call"
        with pytest.raises(dist.DistBackendError, match=said):
            limit.check()
        while not (found := error_of(other_limit.check)[1]):
            time_.sleep(SLICE_S)
        assert re.match(said, found)
        assert 1.0 < time_.seconds - died < 1.0 + 2 * SLICE_S
    finally:
        watch.close()
        other.close()


def test_threads_that_wait_may_look_at_the_same_time() -> None:
    watch = watch_of(os.getpid(), 1, ProcessEnds(), Clock())
    found: list[object] = []

    def look() -> None:
        try:
            found.append([watch.ended_ranks() for _ in range(20_000)] == [set()] * 20_000)
        except RuntimeError as error:
            found.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=look) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
        watch.close()
    assert found == [True, True]
