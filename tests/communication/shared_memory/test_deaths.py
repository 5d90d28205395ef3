"""A rank that dies is named by all others within 2 s, whatever they are doing then."""

import os
import random
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

from colossalai.communication.shared_memory._watch import ProcessEnds, Watch
from tests.communication.shared_memory.ranks_that_end import (
    die,
    error_of,
    group,
    in_a_child,
    named,
    wait_for_file,
)
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
    if rank == VICTIM:
        threading.Timer(0.1, die).start()
    tensor = torch.zeros(1 << 20)
    while True:
        dist.all_reduce(tensor)


def train(rank, path, victim=VICTIM, seconds=0.3):
    if rank == victim:
        threading.Timer(seconds, die).start()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 200), nn.ReLU(), nn.Linear(200, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    while True:
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
    if rank == VICTIM:
        die()
    while True:
        dist.send(torch.ones(1), VICTIM)
        time.sleep(0.01)


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
            found[case.__name__] = in_a_child(be_a_rank_until_one_dies, case, path)[1]
        else:
            found[case.__name__] = be_a_rank_until_one_dies(case, path)
    return found


def test_a_rank_that_dies_is_named_by_all_others(tmp_path):
    *survivors, died = run_ranks(lose_ranks, 3, tmp_path)
    wrong = [
        f"{case} on rank {rank}: {said}"
        for rank, found in enumerate(survivors)
        for case, error in found.items()
        if (said := named(died[case], error, VICTIM))
    ]
    assert not wrong, "\n".join(wrong)


def lose_ranks_at_random(folder, count):
    """Every rank of each training is a child, of which one dies."""
    chance, wrong = random.Random(count), []
    for number in range(count):
        path, victim, seconds = Path(folder) / f"{number}", chance.randrange(3), 0.5 * chance.random()
        found, ended, status = in_a_child(be_a_rank_until_one_dies, train, path, victim, seconds)
        if int(os.environ["RANK"]) == victim:
            path.with_suffix(".died").write_text(f"{ended} {status}")
            continue
        wait_for_file(path.with_suffix(".died"))
        time.sleep(0.01)
        died, how = path.with_suffix(".died").read_text().split()
        said = named(float(died), found, victim) if how == "-9" else f"its status is {how}"
        wrong += [f"kill {number} after {seconds:.3f} s: {said}"] * bool(said)
    return wrong


@pytest.mark.long  # one at a given moment is above
@pytest.mark.parametrize("count", [15, in_soak(50)])
def test_kills_at_random_moments_of_a_training(tmp_path, count):
    before = {path for path in Path("/dev/shm").iterdir() if path.name.startswith("colossalai-")}
    wrong = run_ranks(lose_ranks_at_random, 3, tmp_path, count)
    assert not any(wrong), "\n".join(line for lines in wrong for line in lines)
    assert {path for path in Path("/dev/shm").iterdir() if path.name.startswith("colossalai-")} <= before


def test_threads_that_wait_may_look_at_the_same_time() -> None:
    layout = SimpleNamespace(broken=0)
    watch = Watch(
        None,  # type: ignore[arg-type]
        layout,  # type: ignore[arg-type]
        0,
        ranks=[0, 1],
        pids={1: os.getpid()},
        ends=ProcessEnds(),
        where=str,
    )
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
