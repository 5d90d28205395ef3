"""A pipeline trains as one process does: every schedule, alone, with tensor and data parallelism."""

import os
from functools import partial
from typing import Any

import pytest
from torch import nn

import colossalai
from colossalai.core import global_context as gpc
from colossalai.testing import check_parity
from tests.parity.subjects.doors import Block, Net, make_case
from tests.parity.subjects.pipeline import NUM_MICROBATCHES, slice_of_batch, through_booster, through_engine
from tests.ranks import run_ranks

pytestmark = pytest.mark.dist

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")


class DeepNet(Net):
    """Blocks enough for two chunks on each of four ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(8))


def case_of(max_norm: float | None = None):
    case = make_case(max_norm=max_norm)
    return type(case)(**{**vars(case), "build_model": DeepNet})


def by_engine(schedule: str, accumulation: int, max_norm: float | None) -> list[float]:
    config: dict[str, Any] = {
        "parallel": {
            "pipeline": {
                "size": 2 if os.environ["WORLD_SIZE"] == "2" else 4,
                "schedule": schedule,
                "partition": "balanced",
            }
        },
        "NUM_MICRO_BATCHES": NUM_MICROBATCHES,
        "NUM_CHUNKS": 2 if schedule in ("interleaved", "zb-v") else None,
        "gradient_accumulation": accumulation,
        "clip_grad_norm": max_norm or 0.0,
    }
    colossalai.launch_from_torch(config, verbose=False)
    case = case_of(max_norm)
    losses = check_parity(case, partial(through_engine, case), **slice_of_batch())
    gpc.destroy()
    return losses


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_schedule_is_one_process(schedule: str, num_ranks: int) -> None:
    run_ranks(by_engine, num_ranks, schedule, 1, 0.1)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_accumulation_is_one_large_batch(schedule: str) -> None:
    run_ranks(by_engine, 2, schedule, 2, None)


def by_booster(options: dict[str, Any], max_norm: float | None) -> list[float]:
    colossalai.launch_from_torch({}, verbose=False)
    case = case_of(max_norm)
    losses = check_parity(case, partial(through_booster, case, options), **slice_of_batch_of(options))
    gpc.destroy()
    return losses


def slice_of_batch_of(options: dict[str, Any]) -> dict[str, int]:
    """As `slice_of_batch`, before the plugin has laid the mesh."""
    inner = options.get("pp_size", 1)
    num_slices = int(os.environ["WORLD_SIZE"]) // inner
    return {"slice_index": int(os.environ["RANK"]) // inner, "num_slices": num_slices}


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-v"])
def test_the_plugin_door_is_one_process(schedule: str) -> None:
    chunks = {"num_model_chunks": 2} if schedule == "interleaved" else {}
    run_ranks(by_booster, 4, {"pp_size": 2, "schedule": schedule, **chunks}, 0.1)
