"""ZeRO with tensor and sequence parallelism, and with a pipeline beside it, trains as one process does."""

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
from tests.parity.subjects.pipeline import slice_of_batch
from tests.parity.subjects.zero import subject_of, through_engine, through_pipeline
from tests.parity.test_sequence_parallel import criterion, cut, make_case, with_ring
from tests.ranks import run_ranks
from tests.tiers import further
from tests.turns import each_in_turn, grouped

pytestmark = pytest.mark.dist

TENSOR = {
    "1d": {"size": 2, "mode": "1d"},
    "2d": {"size": 4, "mode": "2d"},
    "2.5d": {"size": 4, "mode": "2.5d", "depth": 1},
    "3d": {"size": 8, "mode": "3d"},
}


def train(mode: str, stage: int, pipeline: int) -> list[float]:
    """Train a GPT over two replicas; the plain twin is built before there is a mode."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(3)
    sizes = {"num_layers": pipeline}  # a block for each stage
    plain, plain_criterion = build("gpt", **sizes), criterion_of("gpt")
    config: dict[str, Any] = {
        "parallel": {"tensor": TENSOR[mode]},
        "zero": {"stage": stage},
        "clip_grad_norm": 0.3,
    }
    if pipeline > 1:
        config["parallel"]["pipeline"] = {"size": pipeline, "partition": "uniform"}
        config["NUM_MICRO_BATCHES"] = 2
    colossalai.launch_from_torch(config, verbose=False)

    def apply(twin: nn.Module) -> Subject:
        torch.manual_seed(3)
        model = build("gpt", vocab_parallel_limit=1, **sizes)
        through = through_pipeline if pipeline > 1 else through_engine
        return through(case, model, criterion_of("gpt"))

    case = ParityCase(
        build_model=partial(copy.deepcopy, plain),
        build_optimizer=partial(torch.optim.AdamW, lr=0.01),
        compute_loss=lambda model, batch: plain_criterion(model(batch[0]), batch[1]),
        batches=[make_batch("gpt", 2 * BATCH * 2, seed) for seed in range(3)],
        max_norm=0.3,
        seed=3,
    )
    losses = check_parity(case, apply, **slice_of_batch())
    gpc.destroy()
    return losses


CELLS: list[Any] = [
    ("1d", 2, 1),
    *(further("1d", 1, 2), further("2d", 1, 1), further("1d", 1, 1), further("2d", 2, 1)),
]


@pytest.mark.parametrize(
    ("num_ranks", "cells"),
    grouped(CELLS, lambda mode, stage, pipeline: TENSOR[mode]["size"] * 2 * pipeline),
)
def test_three_steps(num_ranks: int, cells: list[tuple[str, int, int]]) -> None:
    run_ranks(each_in_turn, num_ranks, train, cells)


@pytest.mark.long
@pytest.mark.parametrize(("mode", "stage"), [("2.5d", 1), ("3d", 2)])
def test_three_steps_in_the_other_modes(mode: str, stage: int) -> None:
    """On eight ranks: two replicas of four in 2.5d, one of eight in 3d, which has nothing to cut."""
    run_ranks(train, 8, mode, stage, 1)


def on_cut_sequences(stage: int, sequence: int) -> list[float]:
    """Slices run along the ranks that share a sequence, too: they hold the same weights."""
    parallel = {"tensor": {"size": sequence, "mode": "sequence"}}
    config = {"parallel": parallel, "clip_grad_norm": 0.3, "zero": {"stage": stage}}
    colossalai.launch_from_torch(config, verbose=False)
    case = make_case(0.3)

    def apply(model: nn.Module) -> Subject:
        optimizer = case.build_optimizer(model.parameters())
        engine, *_ = colossalai.initialize(model, optimizer, criterion, verbose=False)
        held = sum(param.numel() for group in optimizer.param_groups for param in group["params"])
        whole = sum(param.numel() for param in engine.model.parameters())
        assert held <= whole / 4 + 4

        def step(batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
            engine.zero_grad()
            ids, at, labels = cut(batch)
            loss = engine.criterion(engine(ids, at), labels)
            engine.backward(loss)
            engine.step()
            return loss.detach()

        return subject_of(engine.model, engine.optimizer, step)

    losses = check_parity(case, partial(with_ring, apply), **slice_of_batch())
    gpc.destroy()
    return losses


@pytest.mark.parametrize(("stage", "sequence"), [(1, 2), further(2, 4)])
def test_cut_sequences(stage: int, sequence: int) -> None:
    run_ranks(on_cut_sequences, 4, stage, sequence)
