"""Pipeline, tensor and data parallelism together train as one process does."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import colossalai
from colossalai.core import global_context as gpc
from colossalai.testing import ParityCase, Subject, check_parity
from tests.model_zoo.tiny import BATCH, build, criterion_of, make_batch
from tests.parity.subjects.pipeline import slice_of_batch, through_engine
from tests.ranks import run_ranks
from tests.tiers import further, in_soak
from tests.turns import each_in_turn, grouped

pytestmark = pytest.mark.dist

MAX_NORM = 0.3
TENSOR: dict[str, Any] = {
    "none": None,
    "1d": {"size": 2, "mode": "1d"},
    "2d": {"size": 4, "mode": "2d"},
    "2.5d": {"size": 4, "mode": "2.5d", "depth": 1},
}


def train(name: str, mode: str, schedule: str, pipeline: int, data: int) -> list[float]:
    """Train over data x pipeline x tensor ranks; the plain twin is built before there is a mode."""
    torch.set_default_dtype(torch.float64)
    num_chunks = 2 if schedule in ("interleaved", "zb-v") else 1
    sizes = {"num_layers": pipeline * num_chunks}  # a block for each chunk
    torch.manual_seed(3)
    plain, plain_criterion = build(name, **sizes), criterion_of(name)
    config: dict[str, Any] = {
        "parallel": {
            "pipeline": {"size": pipeline, "schedule": schedule, "partition": "uniform"},
            "tensor": TENSOR[mode],
        },
        "NUM_MICRO_BATCHES": 2,
        "clip_grad_norm": MAX_NORM,
    }
    colossalai.launch_from_torch(config, verbose=False)

    def apply(twin: nn.Module) -> Subject:
        torch.manual_seed(3)
        model = build(name, vocab_parallel_limit=1, **sizes)
        return through_engine(case, model, criterion_of(name))

    case = ParityCase(
        build_model=partial(copy.deepcopy, plain),
        build_optimizer=partial(torch.optim.AdamW, lr=0.01),
        compute_loss=lambda model, batch: plain_criterion(model(batch[0]), batch[1]),
        batches=[make_batch(name, 2 * BATCH * data, seed) for seed in range(3)],
        max_norm=MAX_NORM,
        seed=3,
    )
    losses = check_parity(case, apply, **slice_of_batch())
    gpc.destroy()
    return losses


CELLS: list[Any] = [
    further("gpt", "1d", "interleaved", 2, 1),
    ("gpt", "2.5d", "1f1b", 2, 1),
    further("gpt", "none", "1f1b", 2, 2),  # and of plain layers in test_pipeline.py
    further("bert", "1d", "1f1b", 2, 1),
    further("vit", "2d", "zb-h1", 2, 1),
    further("gpt", "1d", "1f1b", 2, 1),
    further("gpt", "1d", "zb-h1", 2, 2),
    further("gpt", "1d", "zb-v", 2, 1),
    further("gpt", "1d", "gpipe", 4, 1),
    further("gpt", "1d", "interleaved", 2, 2),
    in_soak("gpt", "2d", "1f1b", 2, 1),
    further("gpt", "2d", "zb-v", 2, 1),
    further("vit", "1d", "1f1b", 2, 2),
]


def num_ranks_of(name: str, mode: str, schedule: str, pipeline: int, data: int) -> int:
    return (TENSOR[mode] or {"size": 1})["size"] * pipeline * data


@pytest.mark.parametrize(("num_ranks", "cells"), grouped(CELLS, num_ranks_of))
def test_three_steps(num_ranks: int, cells: list[tuple[Any, ...]]) -> None:
    for losses in run_ranks(each_in_turn, num_ranks, train, cells)[0]:
        assert len(set(losses)) == 3
