"""`spawn`: real processes with rank, world size and port; and what a failure in one of them looks like."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing import ProcessRaisedException

from colossalai.testing import spawn

pytestmark = pytest.mark.dist


def _meet(rank: int, world_size: int, port: int, folder: Path) -> None:
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    total = torch.tensor(rank + 1)
    dist.all_reduce(total)
    (folder / str(rank)).write_text(str(total.item()))
    dist.destroy_process_group()


def test_ranks_meet(tmp_path: Path) -> None:
    spawn(_meet, 2, folder=tmp_path)
    assert sorted((path.name, path.read_text()) for path in tmp_path.iterdir()) == [("0", "3"), ("1", "3")]


def _fail(rank: int, world_size: int, port: int) -> None:
    raise KeyError(f"rank {rank} of {world_size}")


def test_a_failure_is_raised_with_its_traceback() -> None:
    with pytest.raises(ProcessRaisedException, match=r"(?s)in _fail.*KeyError: 'rank 0 of 1'"):
        spawn(_fail)


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="nprocs is 0"):
        spawn(_fail, 0)
    with pytest.raises(
        ValueError, match=r"passes \['port'\] itself; give these arguments of _fail other names"
    ):
        spawn(_fail, 1, port=3)
