"""Data parallelism and ZeRO, stages 1 to 3, train as one process does, through both doors."""

import os
from functools import partial
from typing import Any

import pytest

import colossalai
from colossalai.booster.plugin import LowLevelZeroPlugin
from colossalai.core import global_context as gpc
from colossalai.testing import check_parity
from tests.parity.subjects.doors import both_doors, make_case
from tests.parity.subjects.pipeline import slice_of_batch
from tests.parity.subjects.zero import (
    pipeline_through_booster,
    through_booster,
    through_engine,
    through_pipeline,
)
from tests.parity.test_pipeline import case_of
from tests.ranks import run_ranks
from tests.tiers import further
from tests.turns import each_in_turn, grouped, in_turn

pytestmark = pytest.mark.dist


def by_engine(stage: int, accumulation: int, max_norm: float | None) -> list[float]:
    config: dict[str, Any] = {
        "zero": {"stage": stage},
        "gradient_accumulation": accumulation,
        "clip_grad_norm": max_norm or 0.0,
    }
    colossalai.launch_from_torch(config, verbose=False)
    case = make_case(max_norm=max_norm)
    losses = check_parity(case, partial(through_engine, case))
    gpc.destroy()
    return losses


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize(("accumulation", "max_norm"), [(1, None), (4, 0.1)])
def test_the_config_door_is_one_process(
    num_ranks: int, stage: int, accumulation: int, max_norm: float | None
) -> None:
    for losses in run_ranks(by_engine, num_ranks, stage, accumulation, max_norm):
        assert losses[-1] < losses[0]


def by_booster(stage: int, accumulation: int, max_norm: float | None, overlap: bool) -> list[float]:
    colossalai.launch_from_torch({}, verbose=False)
    case = make_case(max_norm=max_norm)
    plugin = LowLevelZeroPlugin(
        stage,
        precision="fp32",
        max_norm=max_norm or 0.0,
        reduce_bucket_size_in_m=0.0002,  # 26 elements: several buckets, one of them for a large parameter
        overlap_communication=overlap,
    )
    losses = check_parity(case, partial(through_booster, case, plugin, accumulation))
    gpc.destroy()
    return losses


CELLS: list[Any] = [
    *((2, 2, 4, True), (4, 1, 4, True), (2, 1, 2, False), (2, 2, 2, False)),
    *(further(2, 1, 1, True), further(4, 2, 1, True)),
]


@pytest.mark.parametrize(("num_ranks", "cells"), grouped(CELLS, lambda num_ranks, *_: num_ranks))
def test_the_plugin_door_is_one_process(num_ranks: int, cells: list[tuple[Any, ...]]) -> None:
    cells = [(stage, accumulation, 0.1, overlap) for _, stage, accumulation, overlap in cells]
    run_ranks(each_in_turn, num_ranks, by_booster, cells)


def in_pipeline(schedule: str, accumulation: int) -> list[float]:
    """Two stages on two replicas each; the embedding and the head are tied."""
    config: dict[str, Any] = {
        "zero": {"stage": 1},
        "parallel": {"pipeline": {"size": 2, "schedule": schedule, "partition": "balanced"}},
        "NUM_MICRO_BATCHES": 4,
        "gradient_accumulation": accumulation,
        "clip_grad_norm": 0.1,
    }
    colossalai.launch_from_torch(config, verbose=False)
    case = case_of(max_norm=0.1)
    losses = check_parity(case, partial(through_pipeline, case), **slice_of_batch())
    gpc.destroy()
    return losses


def by_hybrid_plugin() -> list[float]:
    colossalai.launch_from_torch({}, verbose=False)
    case = make_case(max_norm=0.1)
    place = {"slice_index": int(os.environ["RANK"]) // 2, "num_slices": 2}
    apply = partial(pipeline_through_booster, case, {"pp_size": 2, "zero_stage": 1})
    losses = check_parity(case, apply, **place)
    gpc.destroy()
    return losses


def test_stage_1_in_a_pipeline_is_one_process_through_both_doors() -> None:
    run_ranks(in_turn, 4, [(in_pipeline, "1f1b", 2), (by_hybrid_plugin,)])


@pytest.mark.long
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_stage_1_in_a_pipeline_without_accumulation_is_one_process(schedule: str) -> None:
    run_ranks(in_pipeline, 4, schedule, 1)


@pytest.mark.parametrize("method", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    ("world_size", "accumulation", "max_norm"),
    [
        (2, 1, None),
        (2, 4, 0.5),
        further(4, 2, None),
        further(2, 2, None),
        further(2, 1, 0.5),
        further(4, 4, 0.5),
    ],
)
def test_replicas_and_fsdp(method: str, world_size: int, accumulation: int, max_norm: float | None) -> None:
    for by_engine, by_booster in run_ranks(both_doors, world_size, method, accumulation, max_norm):
        assert by_engine == by_booster  # bit for bit
        assert by_engine[-1] < by_engine[0]
