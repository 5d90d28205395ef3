"""Auxiliary losses of all stages of a pipeline are in its loss, and their gradients on their stages."""

from functools import partial
from typing import Any

import pytest
import torch

import colossalai
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
