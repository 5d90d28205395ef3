"""Language models whose loss is in chunks train as one process does over whole logits, in float64."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import colossalai
from colossalai.core import global_context as gpc
from colossalai.model_zoo.gpt import GPT, GPTConfig
from colossalai.testing import ParityCase, Subject, check_parity
from tests.parity.subjects import pipeline, zero
from tests.parity.subjects.pipeline import slice_of_batch
from tests.ranks import run_ranks

pytestmark = pytest.mark.dist

SIZES = {"vocab_size": 21, "max_position_embeddings": 8, "hidden_size": 8, "num_attention_heads": 2}
RATES = dict.fromkeys(("embedding_dropout", "dropout", "attention_dropout"), 0.0)
PIPELINE = {"size": 2, "partition": "balanced"}
TENSOR = {"size": 2, "mode": "1d"}
# Beside each other method, in float32: in test_pairs.py.
CELLS: dict[str, dict[str, Any]] = {
    "tensor 1d, recomputed": {"parallel": {"tensor": TENSOR}, "recompute": True},
    "pipeline": {"parallel": {"pipeline": PIPELINE}, "NUM_MICRO_BATCHES": 4},
}
FURTHER: dict[str, dict[str, Any]] = {
    "data parallel, accumulated": {"gradient_accumulation": 2},
    "ZeRO 1": {"zero": {"stage": 1}},
    "ZeRO 3": {"zero": {"stage": 3}},
    "sequence": {"parallel": {"sequence": {"size": 2}}},
    "ZeRO 2": {"zero": {"stage": 2}},
    "zero bubble": {"parallel": {"pipeline": PIPELINE | {"schedule": "zb-h1"}}, "NUM_MICRO_BATCHES": 4},
}
FOUR_RANKS: dict[str, dict[str, Any]] = {
    "tensor 1d and a pipeline": {
        "parallel": {"tensor": TENSOR, "pipeline": PIPELINE},
        "NUM_MICRO_BATCHES": 4,
    },
    "tensor 1d and ZeRO 3": {"parallel": {"tensor": TENSOR}, "zero": {"stage": 3}},
}


def gpt() -> nn.Module:
    """Return a GPT whose vocabulary is cut where there are tensor-parallel ranks, which do not divide it."""
    return GPT(GPTConfig(**SIZES, **RATES, num_layers=2, init_std=0.3, vocab_parallel_limit=8))


def whole_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    logits = model(batch[0])
    logits = getattr(logits, "logits", logits)
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[1][:, 1:].flatten())


def train(cell: dict[str, Any], build: Any, vocabulary: int) -> list[float]:
    """Train under a config without a criterion; the plain twin is built before there is a mode."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(3)
    plain = build()
    config = {"clip_grad_norm": 0.5, "fused_loss": True, **copy.deepcopy(cell)}
    colossalai.launch_from_torch(config, verbose=False)
    ids = torch.randint(vocabulary, (3, 16, 8), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[:, :, 2] = -100  # as many on each rank and in each microbatch
    case = ParityCase(
        build_model=partial(copy.deepcopy, plain),
        build_optimizer=partial(torch.optim.AdamW, lr=0.01),
        compute_loss=whole_loss,
        batches=[*zip(ids, labels, strict=True)],
        max_norm=0.5,
    )

    def apply(twin: nn.Module) -> Subject:
        torch.manual_seed(3)
        if cell.get("zero", {}).get("stage") in (1, 2):
            return zero.through_pipeline(case, build(), None)
        return pipeline.through_engine(case, build(), None)

    losses = check_parity(case, apply, **slice_of_batch())
    gpc.destroy()
    return losses


def train_all(cells: list[dict[str, Any]], build: Any, vocabulary: int) -> list[list[float]]:
    """Train under each config; one start of ranks serves them all."""
    return [train(cell, build, vocabulary) for cell in cells]


@pytest.mark.parametrize(
    ("num_ranks", "cells"),
    [
        (2, CELLS),
        pytest.param(2, FURTHER, marks=pytest.mark.long),
        pytest.param(4, FOUR_RANKS, marks=pytest.mark.long),
    ],
)
def test_a_model_of_the_zoo(num_ranks: int, cells: dict[str, dict[str, Any]]) -> None:
    losses = run_ranks(train_all, num_ranks, [*cells.values()], gpt, SIZES["vocab_size"])
    assert all(len(set(of_cell)) == 3 for of_cell in losses[0])
