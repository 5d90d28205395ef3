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


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system, which takes root")
def test_a_small_disk(tmp_path: Path) -> None:
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", tmp_path], check=False)
    if mounted.returncode:
        pytest.skip("mounting is not permitted here")
    try:
        told = run_ranks(save_too_much, 2, tmp_path)
        for text in told:
            assert f"cannot write {tmp_path}/step-00000002: " in text
            assert "143" in text.split(" bytes needed")[0].rpartition(" ")[2][:3]  # 512 x 700 x 4 and some
        assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
        assert latest_training_state(tmp_path) == tmp_path / "step-00000001"
        load_training_state(tmp_path / "step-00000001", TrainingState(model=nn.Linear(512, 700)))
    finally:
        subprocess.run(["umount", tmp_path], check=True)


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
