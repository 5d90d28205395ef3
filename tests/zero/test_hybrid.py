"""Checkpoints and precisions of ZeRO with a pipeline or tensor parallelism."""

from pathlib import Path
from typing import Any

import pytest
import torch

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import HybridParallelPlugin, TorchDDPPlugin
from colossalai.checkpoint_io import TrainingState, load_training_state, save_training_state
from colossalai.core import global_context as gpc
from tests.model_zoo.tiny import build, criterion_of, make_batch
from tests.ranks import run_ranks
from tests.tiers import further
from tests.zero.training import adamw, part_of

pytestmark = pytest.mark.dist

Options = dict[str, Any]


class Run:
    """A GPT that is trained with some plugin; the same from the same seed whatever that is."""

    def __init__(self, options: Options, dtype: torch.dtype = torch.float64) -> None:
        colossalai.launch_from_torch({}, verbose=False)
        torch.set_default_dtype(dtype)
        plugin = HybridParallelPlugin(**options) if options else TorchDDPPlugin()
        self.booster = Booster(plugin=plugin)
        self.in_pipeline = options.get("pp_size", 1) > 1
        torch.manual_seed(3)
        model = build("gpt", vocab_parallel_limit=1) if gpc.tensor_mode else build("gpt")
        self.criterion = criterion_of("gpt")
        self.model, self.optimizer, *_ = self.booster.boost(model, adamw(model))
        self.state = TrainingState(model=self.model.unwrap(), optimizer=self.optimizer)

    def train(self, steps: range) -> list[float]:
        losses = []
        for step in steps:
            self.optimizer.zero_grad()
            batch = tuple(part_of(tensor) for tensor in make_batch("gpt", 8, step))
            loss = self._in_stages(batch) if self.in_pipeline else self._whole(batch)
            self.optimizer.step()
            mean = loss.detach().clone()
            torch.distributed.all_reduce(mean)
            losses.append(mean.item() / torch.distributed.get_world_size())
        return losses

    def _in_stages(self, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        result = self.booster.execute_pipeline(iter([batch]), self.model, self.criterion, self.optimizer)
        return result["loss"]

    def _whole(self, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        loss = self.criterion(self.model(batch[0]), batch[1])
        self.booster.backward(loss, self.optimizer)
        return loss


def save(options: Options, folder: Path) -> list[float]:
    run = Run(options)
    losses = run.train(range(2))
    save_training_state(folder, run.state, step=2)
    losses += run.train(range(2, 4))
    gpc.destroy()
    return losses


def load(options: Options, folder: Path) -> list[float]:
    run = Run(options)
    load_training_state(folder / "step-00000002", run.state)
    losses = run.train(range(2, 4))
    gpc.destroy()
    return losses


PIPELINE = {"pp_size": 2, "num_microbatches": 2, "zero_stage": 1, "max_norm": 0.5}
TENSOR = {"tp_size": 2, "zero_stage": 2, "max_norm": 0.5}
ALONE = {"max_norm": 0.5}


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [((PIPELINE, 4), (ALONE, 1)), further((TENSOR, 4), (PIPELINE, 4)), further((ALONE, 1), (TENSOR, 4))],
)
def test_a_run_goes_on(saved: tuple[Options, int], loaded: tuple[Options, int], tmp_path: Path) -> None:
    """Save under one way of parallelism, load under another: the same losses."""
    expected = run_ranks(save, saved[1], saved[0], tmp_path)[0]
    resumed = run_ranks(load, loaded[1], loaded[0], tmp_path)[0]
    assert resumed == pytest.approx(expected[2:], rel=1e-10)


def low(options: Options) -> list[list[float]]:
    """Return the losses without ZeRO, and with stage 1."""
    found = []
    for stage in (0, 1):
        found.append(Run({**options, "zero_stage": stage}, torch.float32).train(range(4)))
        gpc.destroy()
    return found


@pytest.mark.long
@pytest.mark.parametrize("precision", ["fp16", "bf16_master", "fp16_naive", "bf16"])
def test_stage_1_in_a_pipeline_in_every_precision(precision: str) -> None:
    """As without ZeRO; gradients have 16 bits with 16-bit weights, and float32 there: 2^-9 of an update."""
    options = {"pp_size": 2, "num_microbatches": 2, "precision": precision}
    expected, actual = run_ranks(low, 4, options)[0]
    assert actual == pytest.approx(expected, rel=0.03)


def test_stage_2_in_a_pipeline_is_refused() -> None:
    with pytest.raises(ValueError, match=r"pipeline and ZeRO 2 cannot be combined.* use stage 1"):
        HybridParallelPlugin(pp_size=2, num_microbatches=2, zero_stage=2)
