"""The coordinator: who am I, and who goes first, on real gloo ranks."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from colossalai.cluster import DistCoordinator, _dist_coordinator, priority_execution
from colossalai.cluster._plain_values import broadcast_value
from colossalai.monitor._sections import is_wait_expected
from tests.ranks import run_ranks


def _in_a_job(body: Callable[..., Any], *args: Any) -> Any:
    """Run `body` between init and destroy of a gloo group."""
    dist.init_process_group("gloo")
    result = body(*args)
    dist.barrier()  # a rank that leaves now would fail another one that still connects a group
    dist.destroy_process_group()
    return result


def _places() -> list[Any]:
    coordinator = DistCoordinator()
    odd = dist.new_group([1, 2])
    mine = odd if coordinator.rank > 0 else None
    return [
        coordinator.rank,
        coordinator.world_size,
        coordinator.local_rank,
        coordinator.is_master(),
        coordinator.is_node_master(),
        coordinator.is_last_process(),
        coordinator.is_master(mine),
        coordinator.is_last_process(mine),
        coordinator.on_master_only()(lambda value: value + 1)(1),
        coordinator.on_master_only(mine)(lambda value: value + 1)(1),
    ]


@pytest.mark.dist
def test_places():
    assert run_ranks(_in_a_job, 3, _places) == [
        [0, 3, 0, True, True, False, True, False, 2, 2],
        [1, 3, 1, False, False, False, True, False, None, 2],
        [2, 3, 2, False, False, True, False, True, None, None],
    ]


def _take_turns(folder: Path, executor_rank: int) -> bool:
    """Hold the executor in the block until each other rank waits for it, or is in the block."""
    coordinator = DistCoordinator()
    marker, rank = folder / "done", coordinator.rank

    def noted(*args: Any, **kwargs: Any) -> Any:
        (folder / f"is here {rank}").touch()
        return broadcast_value(*args, **kwargs)

    _dist_coordinator.broadcast_value = noted
    with coordinator.priority_execution(executor_rank):
        found = marker.exists()
        (folder / f"is here {rank}").touch()
        if rank == executor_rank:
            while len([*folder.glob("is here *")]) < coordinator.world_size:
                time.sleep(0.01)
            marker.touch()
    coordinator.block_all()
    return found


@pytest.mark.dist
def test_the_executor_goes_first(tmp_path: Path):
    assert run_ranks(_in_a_job, 3, _take_turns, tmp_path, 1) == [True, False, True]


def _fail_first() -> str:
    group = dist.new_group([1, 2])  # its first rank is global rank 1
    if dist.get_rank() == 0:
        return "not in the group"
    try:
        with priority_execution(process_group=group):
            if dist.get_rank() == 1:
                raise KeyError("disk full")
            return "ran although the executor failed"
    except (KeyError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.dist
def test_a_failing_executor_does_not_leave_the_others_waiting():
    assert run_ranks(_in_a_job, 3, _fail_first) == [
        "not in the group",
        "KeyError: 'disk full'",
        "RuntimeError: rank 0, which went first, failed in this block: KeyError: 'disk full'",
    ]


def _misuse() -> list[str]:
    group = dist.new_group([0])
    messages = []
    for executor_rank, process_group in ((2, None), (0, group)):
        try:
            with priority_execution(executor_rank, process_group):
                messages.append("ran")
        except ValueError as error:
            messages.append(str(error))
    return messages


@pytest.mark.dist
def test_misuse_is_refused():
    no_such_rank = "executor_rank=2 is not a rank of a group of 2; use a number from 0 to 1"
    assert run_ranks(_in_a_job, 2, _misuse) == [
        [no_such_rank, "ran"],
        [no_such_rank, "global rank 1 is not in process_group; call this on the ranks of the group only"],
    ]


def _print_on_master() -> None:
    coordinator = DistCoordinator()
    coordinator.print_on_master(f"master {coordinator.rank}")
    os.environ["LOCAL_RANK"] = "0"  # as on the first rank of a second machine
    coordinator.print_on_node_master(f"node master {coordinator.rank}")
    os.environ["LOCAL_RANK"] = str(coordinator.rank)


@pytest.mark.dist
def test_printing(capfd: pytest.CaptureFixture[str]):
    run_ranks(_in_a_job, 2, _print_on_master)
    out = capfd.readouterr().out
    assert [out.count(line) for line in ("master 0\n", "node master 0\n", "node master 1\n")] == [2, 1, 1]


@pytest.mark.unit
def test_without_a_process_group_the_error_says_what_to_call():
    for make in (DistCoordinator, lambda: priority_execution().__enter__()):
        with pytest.raises(
            RuntimeError, match=r"not initialised; before this, call colossalai\.launch_from_torch"
        ):
            make()


@pytest.mark.unit
@pytest.mark.parametrize(
    ("environment", "local_rank"),
    [
        ({}, 0),
        ({"LOCAL_RANK": "3", "SLURM_LOCALID": "1"}, 3),
        ({"SLURM_LOCALID": "1"}, 1),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "2"}, 2),
    ],
)
def test_the_local_rank_comes_from_the_launcher(
    environment: dict[str, str], local_rank: int, monkeypatch: pytest.MonkeyPatch
):
    for variable in ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    assert DistCoordinator().local_rank == local_rank


def test_the_wait_for_the_executor_is_an_expected_one(monkeypatch: pytest.MonkeyPatch) -> None:
    expected: list[bool] = []
    monkeypatch.setattr(_dist_coordinator, "_require_initialized", lambda: None)
    monkeypatch.setattr(_dist_coordinator, "_group_rank", lambda group: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(
        _dist_coordinator, "_agree_on_failure", lambda *args: expected.append(is_wait_expected())
    )
    with _dist_coordinator.priority_execution():
        expected.append(is_wait_expected())
    assert expected == [True, False]
