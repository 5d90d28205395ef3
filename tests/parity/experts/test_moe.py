"""Models of `MoeLayer` train as one process does that routes each rank's part for itself."""

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import colossalai
from colossalai.booster.plugin import (
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from colossalai.core import global_context as gpc
from colossalai.testing import ParityCase, check_parity
from tests.parity.subjects import moe
from tests.parity.subjects.pipeline import slice_of_batch
from tests.ranks import run_ranks
from tests.tiers import further, pairwise
from tests.turns import each_in_turn, grouped

MAX_NORM = 0.3  # of a norm of about 1

CONFIGS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "recompute": {"recompute": True},
    "handler": {"gradient_handler": [{"type": "MoeGradientHandler"}]},
    "zero 1": {"zero": {"stage": 1}},
    "zero 2": {"zero": {"stage": 2}},
    "fsdp": {"zero": {"stage": 3}},
    "fsdp recompute": {"zero": {"stage": 3}, "recompute": True},
}
PLUGINS: dict[str, Callable[[], Any]] = {
    "ddp": TorchDDPPlugin,
    "zero 1": partial(LowLevelZeroPlugin, stage=1, precision="fp32"),
    "zero 2": partial(LowLevelZeroPlugin, stage=2, precision="fp32"),
    "fsdp": TorchFSDPPlugin,
}


def make_case(build: Callable[[], moe.Net], accumulation: int, num_parts: int, router: str) -> ParityCase:
    """Return the training run; the model of one process is built here, before anything is launched."""
    torch.manual_seed(7)
    plain = build()
    return ParityCase(
        build_model=lambda: plain,
        build_optimizer=partial(torch.optim.AdamW, lr=0.05),
        compute_loss=moe.make_loss(num_parts, accumulation, moe.z_weight_of(router)),
        batches=moe.make_batches(),
        max_norm=MAX_NORM,
    )


def parity(
    method: str, router: str, ep_size: int, tp_size: int, experts: str, skew: str, accumulation: int
) -> None:
    build = partial(moe.Net, router, experts, skew)
    parallel: dict[str, Any] = {"moe": {"size": ep_size}}
    if tp_size > 1:
        parallel["tensor"] = {"size": tp_size, "mode": "1d"}
    num_parts = int(os.environ["WORLD_SIZE"]) // tp_size
    case = make_case(build, accumulation, num_parts, router)
    options = {"gradient_accumulation": accumulation, "clip_grad_norm": MAX_NORM}
    colossalai.launch_from_torch({**CONFIGS[method], **options, "parallel": parallel}, verbose=False)
    losses = check_parity(case, partial(moe.through_engine, case, build), **slice_of_batch())
    if method in PLUGINS:
        plugin = PLUGINS[method]()
        if tp_size > 1:
            stage = CONFIGS[method].get("zero", {}).get("stage", 0)
            options = {"tp_size": tp_size, "pp_size": 1, "ep_size": ep_size, "zero_stage": stage}
            plugin = HybridParallelPlugin(**options, precision="fp32")
        apply = partial(moe.through_booster, case, build, plugin, accumulation)
        assert check_parity(case, apply, **slice_of_batch()) == losses
    gpc.destroy()


# Recomputation, FSDP, handlers and other routers: in the other files of this folder and in tests/nn.
CELLS: list[Any] = [
    (4, "zero 2", "top2", 4, 1, "any", "none", 2),
    further(4, "fsdp recompute", "top1 capacity", 2, 1, "ffn", "none", 1),
    (4, "ddp", "top3", 2, 2, "tp", "half", 1),
    further(2, "recompute", "top2", 2, 1, "ffn", "none", 2),
    further(4, "handler", "top2 capacity", 2, 2, "ffn", "none", 1),
    further(4, "ddp", "top1", 2, 1, "ffn", "one", 2),
    further(2, "ddp", "top1", 2, 1, "any", "none", 1),
    further(4, "ddp", "top3", 2, 1, "any", "none", 2),
    further(4, "zero 1", "top2", 4, 1, "any", "none", 2),
    further(4, "zero 2", "top3", 2, 1, "ffn", "none", 1),
    further(4, "fsdp", "top2", 2, 1, "any", "none", 1),
    further(4, "fsdp recompute", "top1 capacity", 4, 1, "ffn", "none", 1),
    further(4, "ddp", "top2 capacity", 2, 1, "any", "none", 2),
    further(4, "ddp", "top1", 2, 2, "any", "none", 1),
    further(4, "ddp", "top1", 2, 1, "ffn", "one", 1),
    further(4, "zero 1", "top2", 2, 1, "any", "half", 1),
    further(4, "ddp", "top2", 2, 1, "tp", "none", 1),
]


@pytest.mark.dist
@pytest.mark.parametrize(("world_size", "cells"), grouped(CELLS, lambda world_size, *_: world_size))
def test_both_doors(world_size: int, cells: list[tuple[Any, ...]]) -> None:
    run_ranks(each_in_turn, world_size, parity, [options for _, *options in cells])


METHODS = ("ddp", "recompute", "zero 1", "zero 2", "fsdp")
SIZES = ((1, 1), (2, 1), (4, 1), (1, 2), (2, 2))


PAIRS = [
    (method, router, ep_size, tp_size, *(("ffn", "none", 2) if ep_size == 2 else ("any", "none", 1)))
    for router, method, (ep_size, tp_size) in pairwise(list(moe.ROUTERS), METHODS, SIZES)
]


@pytest.mark.dist
@pytest.mark.parametrize(("num_ranks", "cells"), grouped((further(*cell) for cell in PAIRS), lambda *cell: 4))
def test_the_matrix(num_ranks: int, cells: list[tuple[Any, ...]]) -> None:
    run_ranks(each_in_turn, num_ranks, parity, cells)
