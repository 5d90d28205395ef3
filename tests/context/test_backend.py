"""Which library a job communicates with: shared memory on CPU, gloo where that cannot be or is asked for."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

import colossalai
from colossalai.communication.shared_memory import transport_of
from colossalai.context import ParallelMode
from colossalai.context._launch_arguments import chosen_backend
from colossalai.core import global_context as gpc
from colossalai.monitor import PeerProcess
from tests.harness.clocks import Clock, process
from tests.ranks import run_ranks
from tests.tiers import further

CPU = torch.device("cpu")


def talks(backend: str, bound: str) -> tuple[str, bool, float]:
    if bound:
        os.environ["COLOSSALAI_SHARED_MEMORY"] = bound
    colossalai.launch_from_torch({"parallel": {"pipeline": 2}}, backend=backend, verbose=True)
    x = torch.ones(3)
    dist.all_reduce(x, group=gpc.get_group(ParallelMode.PIPELINE))
    is_one_group = gpc.get_cpu_group(ParallelMode.DATA) is gpc.get_group(ParallelMode.DATA)
    # A rank that ends at once would close connections that its peer still makes.
    dist.all_reduce(torch.ones(1), group=gpc.get_group(ParallelMode.DATA))
    said = transport_of()
    gpc.destroy()
    return said, is_one_group, x.sum().item()


@pytest.mark.dist
@pytest.mark.every_cell
@pytest.mark.parametrize(
    ("backend", "bound", "said"),
    [
        ("nccl", "", "shared memory"),
        ("auto", "64MiB", "shared memory"),
        ("shared_memory", "", "shared memory"),
        ("gloo", "", "gloo"),
        ("auto", "1000", "gloo"),
    ],
)
def test_a_job_on_cpu(backend: str, bound: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_ranks(talks, 4, backend, bound) == [(said, True, 6.0)] * 4
    printed = capsys.readouterr().out
    assert f"with {said} on cpu" in printed
    assert ("COLOSSALAI_SHARED_MEMORY; 32768 bytes more are needed" in printed) == (bound == "1000")


def makes_a_group_late(backend: str, folder: Path) -> bool:
    """Hold ranks 2 and 3 until ranks 0 and 1 are at their end; the store is rank 0's."""
    colossalai.launch_from_torch({"parallel": {"pipeline": 2}}, backend=backend, verbose=False)
    rank, released = dist.get_rank(), folder / "released"

    def sleep(seconds: float) -> None:
        if departure._missing(PeerProcess.current()) == [2, 3]:
            released.touch()
        time.sleep(seconds)

    departure = process.departure
    assert departure is not None
    process.departure = replace(departure, clock=Clock(sleep=sleep))
    while rank >= 2 and not released.exists():
        time.sleep(0.01)
    is_pair = dist.get_world_size(gpc.get_group(ParallelMode.PIPELINE)) == 2
    gpc.destroy()
    if rank == 0:
        released.touch()  # if rank 0 has not waited for them, they are to see it
    return is_pair


@pytest.mark.dist
@pytest.mark.parametrize("backend", ["gloo", further("auto")])
def test_the_store_stays_until_the_last_rank_has_made_its_groups(backend: str, tmp_path: Path) -> None:
    assert run_ranks(makes_a_group_late, 4, backend, tmp_path) == [True] * 4


def gets_a_group(backend: str) -> bool:
    """Return whether all members have a group as soon as this rank has it; rank 1 is last of its group."""
    colossalai.launch_from_torch({"parallel": {"pipeline": 2}}, backend=backend, verbose=False)
    store, rank = distributed_c10d._get_default_store(), dist.get_rank()
    original = dist.new_group

    def late(*args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)
        if rank == 1:  # until rank 0 waits for it, or does not
            while not store.add(f"met in {made.group_name}", 0) and not store.check(["rank 0 has left"]):
                time.sleep(0.01)
        store.set(f"has the group {rank}", "")
        return made

    dist.new_group = late  # type: ignore[assignment]
    try:
        group = gpc.get_group(ParallelMode.PIPELINE)
        is_there = store.check([f"has the group {each}" for each in dist.get_process_group_ranks(group)])
        store.set(f"rank {rank} has left", "")
    finally:
        dist.new_group = original
    gpc.destroy()
    return is_there


@pytest.mark.dist
@pytest.mark.parametrize("backend", ["auto", further("gloo")])
def test_a_group_is_there_when_all_members_have_it(backend: str) -> None:
    assert run_ranks(gets_a_group, 4, backend) == [True] * 4


def insists() -> str:
    os.environ["COLOSSALAI_SHARED_MEMORY"] = "1000"
    with pytest.raises(ValueError, match="the ranks cannot all share memory") as caught:
        colossalai.launch_from_torch({}, backend="shared_memory")
    assert not dist.is_initialized()
    return str(caught.value)


@pytest.mark.dist
def test_where_it_is_insisted_on_it_is_an_error() -> None:
    run_ranks(insists, 2)


@pytest.mark.unit
@pytest.mark.parametrize("bound", ["much", "-1", "1.5GiB", "3 apples"])
def test_a_bound_that_is_none(bound: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from colossalai.communication.shared_memory._membership import bound_of_machine

    with pytest.raises(ValueError, match=r"COLOSSALAI_SHARED_MEMORY is .* a number of bytes, such as"):
        bound_of_machine({"COLOSSALAI_SHARED_MEMORY": bound})
    assert bound_of_machine({"COLOSSALAI_SHARED_MEMORY": "3 MiB"}) == 3 << 20
    assert bound_of_machine({}) == pytest.approx(
        os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 16
    )


@pytest.mark.unit
def test_devices_are_refused_shared_memory() -> None:
    with pytest.raises(ValueError, match="shared memory carries tensors in host memory; leave backend out"):
        chosen_backend("shared_memory", torch.device("cuda"))
    assert chosen_backend("nccl", CPU) == chosen_backend("auto", CPU) == "shared_memory"
    assert chosen_backend("gloo", CPU) == "gloo"
