"""Buffers that differ from rank to rank (statistics of a batch norm) are saved from one rank, all of them."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from colossalai.checkpoint_io import TrainingState, load_training_state, save_training_state
from tests.ranks import run_ranks

pytestmark = pytest.mark.dist


def save(folder: Path) -> None:
    dist.init_process_group("gloo")
    model = nn.Sequential(*(nn.BatchNorm1d(5) for _ in range(3)))
    for buffer in model.buffers():
        buffer.fill_(dist.get_rank() + 1)
    save_training_state(folder, TrainingState(model=model), step=1)
    found = nn.Sequential(*(nn.BatchNorm1d(5) for _ in range(3)))
    load_training_state(folder / "step-00000001", TrainingState(model=found))
    assert all(buffer.eq(1).all() for buffer in found.buffers())
    dist.destroy_process_group()


def test_they_are_those_of_the_first_rank(tmp_path: Path) -> None:
    run_ranks(save, 2, tmp_path)


def disagree(folder: Path) -> str:
    dist.init_process_group("gloo")
    dtype = (torch.float16, torch.bfloat16)[dist.get_rank()]
    with pytest.raises(ValueError, match="weight is ") as caught:
        save_training_state(folder, TrainingState(model=nn.Linear(2, 2).to(dtype)), step=1)
    dist.destroy_process_group()
    return str(caught.value)


def test_ranks_that_do_not_agree_on_a_dtype(tmp_path: Path) -> None:
    for text in run_ranks(disagree, 2, tmp_path):
        assert "(2, 2) torch.float16 on rank 0 and (2, 2) torch.bfloat16 on rank 1" in text
    assert not list(tmp_path.iterdir())


def save_plain(folder: Path, num_ranks: int) -> None:
    dist.init_process_group("gloo")
    save_training_state(folder, TrainingState(model=nn.Linear(2, 2)), step=num_ranks)
    dist.destroy_process_group()


def error_of_one_rank(folder: Path) -> str:
    """One rank has other parameters than the checkpoint: all ranks are told, and none is changed."""
    dist.init_process_group("gloo")
    model = nn.Linear(2, 2, bias=dist.get_rank() == 0)
    nn.init.constant_(model.weight, -7.0)
    model.register_parameter("other", nn.Parameter(torch.zeros(1)) if dist.get_rank() == 1 else None)
    with pytest.raises(ValueError, match="1 missing in the checkpoint: other") as caught:
        load_training_state(folder / "step-00000003", TrainingState(model=model))
    assert model.weight.eq(-7.0).all()
    dist.destroy_process_group()
    return str(caught.value)


def test_an_error_of_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    run_ranks(save_plain, 3, tmp_path, 3)
    told = run_ranks(error_of_one_rank, 2, tmp_path)
    assert told[0].startswith("rank 1: ")
