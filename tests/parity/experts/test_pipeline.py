"""Auxiliary losses of all stages of a pipeline are in its loss, and their gradients on their stages."""

from functools import partial
from typing import Any

import pytest
import torch

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import HybridParallelPlugin
from colossalai.context import MOE_CONTEXT
from colossalai.core import global_context as gpc
from colossalai.testing import Subject, check_parity
from tests.parity.experts.test_moe import MAX_NORM, make_case
from tests.parity.subjects import moe, pipeline, zero
from tests.parity.subjects.pipeline import slice_of_batch
from tests.ranks import run_ranks
from tests.tiers import further
from tests.turns import each_in_turn, grouped

MICROBATCHES = 2


def parity(schedule: str, router: str, ep_size: int, tp_size: int, more: dict[str, Any]) -> list[float]:
    build = partial(moe.Net, router, "ffn")
    num_chunks = {"NUM_CHUNKS": 2} if schedule == "interleaved" else {}
    if schedule in ("interleaved", "zb-v"):  # four stages
        build = partial(moe.Net, router, "ffn", num_blocks=4)
    parallel: dict[str, Any] = {
        "pipeline": {"size": 2, "schedule": schedule, "partition": "uniform"},
        "moe": {"size": ep_size},
    }
    if tp_size > 1:
        parallel["tensor"] = {"size": tp_size, "mode": "1d"}
    case = make_case(build, MICROBATCHES, ep_size, router)
    config = {"parallel": parallel, "NUM_MICRO_BATCHES": MICROBATCHES, "clip_grad_norm": MAX_NORM}
    colossalai.launch_from_torch({**config, **num_chunks, **more}, verbose=False)

    def apply(plain: Any) -> Subject:
        through = zero.through_pipeline if "zero" in more else pipeline.through_engine
        return through(case, moe.cut_copy(plain, build), moe.criterion())

    losses = check_parity(case, apply, **slice_of_batch())
    gpc.destroy()
    return losses


CELLS: list[Any] = [
    (4, "1f1b", "top1 capacity", 2, 1, {"zero": {"stage": 1}, "recompute": True}),
    further(4, "interleaved", "top3", 2, 1, {}),
    further(4, "zb-h1", "top2", 2, 1, {}),
    further(2, "1f1b", "top2", 1, 1, {}),
    further(4, "zb-v", "top2", 2, 1, {}),
    further(8, "1f1b", "top2", 2, 2, {}),
]


@pytest.mark.dist
@pytest.mark.parametrize(("world_size", "cells"), grouped(CELLS, lambda world_size, *_: world_size))
def test_all_stages(world_size: int, cells: list[tuple[Any, ...]]) -> None:
    for losses in run_ranks(each_in_turn, world_size, parity, [options for _, *options in cells])[0]:
        assert torch.tensor(losses).unique().numel() == 3


def losses_with_another_model() -> list[float]:
    """Return losses of a pipeline: by its criterion, and by one that runs another model before."""
    colossalai.launch_from_torch({}, verbose=False)
    torch.manual_seed(0)
    booster = Booster(plugin=HybridParallelPlugin(pp_size=2, num_microbatches=MICROBATCHES, precision="fp32"))
    model = moe.Net("top2", "ffn")
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    other = moe.Net("top2", "ffn", "one")
    criterion = moe.criterion()

    def behind_another(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        with MOE_CONTEXT.forward_of(other) as losses:
            logits = other(torch.ones(4, 3, 5))
        MOE_CONTEXT.assign(losses, [logits])
        assert MOE_CONTEXT.get_loss(logits) == MOE_CONTEXT.get_loss() != MOE_CONTEXT.get_loss(output)
        return criterion(output, label)

    found = []
    for each in (criterion, behind_another):
        result = booster.execute_pipeline(iter([moe.make_batches(1)[0]]), model, each, optimizer)
        found.append(result["loss"].item())
    assert all(param.grad is None for param in other.parameters())
    gpc.destroy()
    return found


@pytest.mark.dist
def test_the_criterion_of_a_pipeline_can_run_another_model_with_experts() -> None:
    for alone, behind_another in run_ranks(losses_with_another_model, 2):
        assert alone == behind_another
