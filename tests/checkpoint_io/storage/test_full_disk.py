"""A disk that is full, or a folder that may not be written to: told on all ranks, and nothing is lost."""

import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch.distributed as dist
from torch import nn

from colossalai.checkpoint_io import (
    TrainingState,
    latest_training_state,
    load_training_state,
    save_training_state,
    wait_for_saves,
)
from tests.checkpoint_io.killed_ranks import state_of, told_by
from tests.ranks import run_ranks

pytestmark = pytest.mark.dist


@contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    """Let files of this process grow no further, within the block only."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def save_and_wait(folder: Path, save_async: bool) -> None:
    save_training_state(folder, state_of(2), step=2, save_async=save_async)
    wait_for_saves()


def save_with_limit(folder: Path, rank: int, save_async: bool) -> str:
    dist.init_process_group("gloo")
    save_training_state(folder, state_of(1), step=1)
    with file_size_limit(4096 if dist.get_rank() == rank else 1 << 30):
        with pytest.raises(OSError, match="cannot write") as caught:
            save_and_wait(folder, save_async)
        dist.barrier()
    names = [path.name for path in folder.iterdir()]
    assert names == ["step-00000001"], names
    dist.barrier()
    save_training_state(folder, state_of(3), step=3)
    dist.destroy_process_group()
    return str(caught.value)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("save_async", [False, True])
def test_a_disk_that_fills_up(rank: int, save_async: bool, tmp_path: Path) -> None:
    told = run_ranks(save_with_limit, 2, tmp_path, rank, save_async)
    for text in told:
        assert f"cannot write {tmp_path}/step-00000002: " in text
        assert " bytes needed, " in text
        assert " bytes free" in text
    assert told[1 - rank].startswith(f"rank {rank}: ")
    assert told_by(tmp_path) == 3


def save_too_much(folder: Path) -> str:
    """The second state would fit on the disk alone, and not beside the first."""
    dist.init_process_group("gloo")
    save_training_state(folder, TrainingState(model=nn.Linear(512, 700)), step=1)
    with pytest.raises(OSError, match="No space left") as caught:
        save_training_state(folder, TrainingState(model=nn.Linear(512, 700)), step=2)
    dist.destroy_process_group()
    return str(caught.value)


@contextmanager
def small_disk(path: Path, size: str) -> Iterator[None]:
    """Mount a file system that takes no more than `size`; skip the test where that is not permitted."""
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path], check=False)
    if mounted.returncode:
        pytest.skip("mounting is not permitted here")
    try:
        yield
    finally:
        subprocess.run(["umount", path], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system, which takes root")
def test_a_small_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path, "2m"):
        told = run_ranks(save_too_much, 2, tmp_path)
        for text in told:
            assert f"cannot write {tmp_path}/step-00000002: " in text
            assert "143" in text.split(" bytes needed")[0].rpartition(" ")[2][:3]  # 512 x 700 x 4 and some
        assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
        assert latest_training_state(tmp_path) == tmp_path / "step-00000001"
        load_training_state(tmp_path / "step-00000001", TrainingState(model=nn.Linear(512, 700)))


def save_beside_surplus_states(folder: Path, num_ballast_bytes: int, save_async: bool) -> None:
    """Two states and the ballast fill the disk; with `keep_last=1` the first state is surplus."""
    dist.init_process_group("gloo")
    for step in (1, 2):
        save_training_state(folder, TrainingState(model=nn.Linear(512, 700)), step=step)
    if dist.get_rank() == 0:
        (folder / "ballast").write_bytes(bytes(num_ballast_bytes))
    dist.barrier()
    save_training_state(
        folder, TrainingState(model=nn.Linear(512, 700)), step=3, keep_last=1, save_async=save_async
    )
    wait_for_saves()
    dist.destroy_process_group()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system, which takes root")
@pytest.mark.parametrize(("num_ballast_bytes", "save_async"), [(160_000, False), (1_000_000, True)])
def test_surplus_states_make_room(num_ballast_bytes: int, save_async: bool, tmp_path: Path) -> None:
    """The disk is full while the ranks write the third state, or before its first byte."""
    with small_disk(tmp_path, "4500k"):
        run_ranks(save_beside_surplus_states, 2, tmp_path, num_ballast_bytes, save_async)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["ballast", "step-00000003"]
        assert latest_training_state(tmp_path) == tmp_path / "step-00000003"


def save_without_permission(folder: Path) -> str:
    os.setuid(65534)
    dist.init_process_group("gloo")
    with pytest.raises(OSError, match="cannot write") as caught:
        save_training_state(folder, state_of(2), step=2)
    dist.destroy_process_group()
    return str(caught.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="gives up root, which takes root")
def test_a_folder_that_may_not_be_written_to(tmp_path: Path) -> None:
    save_training_state(tmp_path / "run", state_of(1), step=1)
    for folder in tmp_path.parents:
        if folder.owner() == "root" and folder != Path("/tmp"):
            folder.chmod(folder.stat().st_mode | 0o055)
    tmp_path.chmod(0o755)
    told = run_ranks(save_without_permission, 2, tmp_path / "run")
    for text in told:
        assert f"cannot write {tmp_path}/run/step-00000002: Permission denied" in text
        assert " bytes needed, " in text
    assert told_by(tmp_path / "run") == 1
