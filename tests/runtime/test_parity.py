"""Compiled blocks, and segments of blocks that are recomputed, train as one process does, on ranks."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import (
    GeminiPlugin,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from colossalai.core import global_context as gpc
from colossalai.runtime import RecomputeSegment, Segments
from tests.parity.table import MODES
from tests.parity.tasks import NET, Net, zoo
from tests.parity.training import Run, check_runs, grouped_runs, train
from tests.ranks import run_ranks
from tests.tiers import further
from tests.turns import each_in_turn

pytestmark = pytest.mark.dist

REDUCED = partial(LowLevelZeroPlugin, stage=2, precision="fp32")
NO_KERNELS = {"backend": "aot_eager"}  # everything but the code generator, which takes most of the time


def has_own_names(model: Any) -> None:
    assert not any("_orig_mod" in name for name in model.state_dict())


def compiled(num_ranks: int = 2, options: Any = NO_KERNELS, **run: Any) -> Run:
    """Return a run of compiled blocks."""
    if run.get("config") is not None:
        run["config"] = {"compile": options, **run["config"]}
    given = {"task": NET, "booster": {"compile": options}, "check": has_own_names}
    return Run(num_ranks=num_ranks, **given | run)


COMPILED = [
    compiled(plugin=REDUCED),
    further(compiled(plugin=partial(TorchDDPPlugin, recompute=True), config={"recompute": True})),
    further(compiled(plugin=TorchFSDPPlugin, config={"zero": {"stage": 3}})),
    further(
        compiled(
            task=zoo("gpt", num_layers=2),
            plugin=partial(HybridParallelPlugin, tp_size=2),
            config={"parallel": {"tensor": MODES["1d"]}},
        )
    ),
    further(compiled(1, True, plugin=TorchDDPPlugin)),  # with generated kernels
]


def train_compiled(run: Run) -> None:
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    train(run)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > before


@pytest.mark.parametrize(("num_ranks", "runs"), grouped_runs(COMPILED))
def test_compiled_runs_are_one_process(
    num_ranks: int, runs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    run_ranks(each_in_turn, num_ranks, train_compiled, runs)


FOUR_BLOCKS = replace(NET, build=partial(Net, 4))
NAMES = tuple(f"blocks.{number}" for number in range(4))
NESTED = Segments(
    (RecomputeSegment(0, 4, (RecomputeSegment(0, 3, (RecomputeSegment(0, 2),)),)),),
    NAMES,
)


TWO = Segments((RecomputeSegment(0, 2), RecomputeSegment(2, 4)), NAMES)
STAGES = {"tp_size": 1, "pp_size": 2, "num_microbatches": 4}
CHUNKS = {"precision": "fp32", "min_chunk_size_mb": 0.00003, "search_range_mb": 0, "hidden_dim": 1}
RECOMPUTED = [
    # Nested segments, where parameters are gathered by hooks of the blocks, or as they are used.
    *(
        Run(task=FOUR_BLOCKS, num_ranks=2, plugin=partial(plugin, recompute=NESTED))
        for plugin in (REDUCED, TorchFSDPPlugin, partial(GeminiPlugin, **CHUNKS))
    ),
    # Each stage has a segment, and several microbatches between their forward and their backward.
    Run(task=FOUR_BLOCKS, num_ranks=2, plugin=partial(HybridParallelPlugin, recompute=TWO, **STAGES)),
]


@pytest.mark.parametrize(("num_ranks", "runs"), grouped_runs(RECOMPUTED))
def test_recomputed_segments_are_one_process(num_ranks: int, runs: list[Any]) -> None:
    check_runs(num_ranks, runs)


def across_stages() -> None:
    colossalai.launch_from_torch({}, verbose=False)
    segments = Segments((RecomputeSegment(1, 3),), NAMES)
    booster = Booster(plugin=HybridParallelPlugin(recompute=segments, **STAGES))
    with pytest.raises(ValueError, match=r"from 'blocks\.1' to 'blocks\.2' has blocks of several stages"):
        booster.boost(Net(4))
    gpc.destroy()


def test_a_segment_across_stages_is_refused() -> None:
    run_ranks(across_stages, 2)
