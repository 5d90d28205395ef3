"""A pipeline trains as one process does: every schedule, alone, with tensor and data parallelism."""

import os
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import colossalai
from colossalai.core import global_context as gpc
from colossalai.testing import check_parity
from tests.parity.subjects.doors import Block, Net, make_case
from tests.parity.subjects.pipeline import NUM_MICROBATCHES, slice_of_batch, through_booster, through_engine
from tests.ranks import run_ranks
from tests.tiers import further
from tests.turns import each_in_turn, grouped

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


# Number of ranks, schedule, accumulation, what the norm is clipped to.
CELLS: list[Any] = [
    *((2, "gpipe", 1, 0.1), (2, "interleaved", 1, 0.1)),
    *((2, "1f1b", 2, None), (2, "zb-v", 2, None), (4, "zb-h1", 1, 0.1)),
    *(further(2, schedule, 1, 0.1) for schedule in ("1f1b", "zb-h1", "zb-v")),
    *(further(4, schedule, 1, 0.1) for schedule in ("gpipe", "1f1b", "interleaved", "zb-v")),
]


@pytest.mark.parametrize(("num_ranks", "cells"), grouped(CELLS, lambda num_ranks, *_: num_ranks))
def test_a_schedule_is_one_process(num_ranks: int, cells: list[tuple[Any, ...]]) -> None:
    run_ranks(each_in_turn, num_ranks, by_engine, [options for _, *options in cells])


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


@pytest.mark.parametrize("schedules", [("interleaved",), further(("1f1b", "zb-v"))])
def test_the_plugin_door_is_one_process(schedules: tuple[str, ...]) -> None:
    chunks = {"1f1b": {}, "interleaved": {"num_model_chunks": 2}, "zb-v": {}}
    cells = [({"pp_size": 2, "schedule": schedule, **chunks[schedule]}, 0.1) for schedule in schedules]
    run_ranks(each_in_turn, 4, by_booster, cells)


def with_states_before_the_first_step() -> list[float]:
    colossalai.launch_from_torch({}, verbose=False)
    case = replace(case_of(), build_optimizer=partial(torch.optim.Adagrad, lr=0.05))
    options = {"pp_size": 2}
    losses = check_parity(case, partial(through_booster, case, options), **slice_of_batch_of(options))
    gpc.destroy()
    return losses


def test_a_stage_keeps_the_states_of_its_parameters() -> None:
    run_ranks(with_states_before_the_first_step, 2)
