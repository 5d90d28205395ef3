"""Two optimizers of one model under ZeRO in float16: one loss scale, one decision, as in float32."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

import colossalai
from colossalai.core import global_context as gpc
from colossalai.zero import zero_model_wrapper, zero_optim_wrapper
from tests.amp.twins import TwinsOfSeveral
from tests.ranks import run_ranks
from tests.tiers import further
from tests.zero.training import SMALL, Net, batch_of, part_of

pytestmark = pytest.mark.dist

SCALE = 2.0**8
TOLERANCE = 0.004  # some twenty operations, each rounded by 2^-11


class Run(TwinsOfSeveral):
    """The model cut over the ranks in float16, and its twin on the whole batch in float32."""

    def __init__(self, stage: int) -> None:
        colossalai.launch_from_torch({}, verbose=False)
        torch.manual_seed(0)
        twin = Net()
        raw = copy.deepcopy(twin)
        plain, cut = self._optimizers(twin), self._optimizers(raw)
        model = zero_model_wrapper(raw, stage, precision="fp16", bucket_cap_mb=SMALL)
        first = zero_optim_wrapper(model, cut[0], initial_scale=SCALE, hysteresis=1, growth_interval=3)
        super().__init__(model, (first, zero_optim_wrapper(model, cut[1])), twin, plain, TOLERANCE)

    @staticmethod
    def _optimizers(model: Net) -> list[torch.optim.Optimizer]:
        rest = [param for name, param in model.named_parameters() if not name.startswith("first")]
        return [
            torch.optim.SGD(model.first.parameters(), lr=0.1, momentum=0.9),
            torch.optim.SGD(rest, lr=0.1),
        ]

    def backward(self, by: int, step: int, *, huge: str = "", sync: bool = True, part: str = "") -> None:
        """Run a backward on both sides.

        Args:
            by: Which optimizer runs it.
            step: Which batch.
            huge: A parameter that gets a gradient too large for float16 on the last rank.
            sync: Whether it averages.
            part: Which part of the model learns; default: all of it.
        """
        x = batch_of(step).float()
        self._loss(self.twin, x, part).backward()
        with nullcontext() if sync else self.model.no_sync():
            loss = self._loss(self.model, part_of(x), part)
            if huge and gpc.get_global_rank() == 1:
                loss = loss + self.model.unwrap().get_parameter(huge).float().sum() * 1e4
            self.optimizers[by].backward(loss)

    @staticmethod
    def _loss(model: nn.Module, x: Tensor, part: str) -> Tensor:
        raw = model.unwrap() if hasattr(model, "unwrap") else model
        raw.first.requires_grad_(part != "rest")
        loss = model(x).square().mean()
        raw.first.requires_grad_(True)
        return loss


def one_loss(stage: int) -> None:
    run = Run(stage)
    for step, huge in enumerate(["", "last.bias", "first.weight", "", ""]):
        run.zero_grad()
        run.backward(step % 2, step, huge=huge)
        run.step(*((0, 1) if step % 3 else (1, 0)), skipped=bool(huge))
    assert [each.scaler.scale for each in run.optimizers] == [SCALE / 4] * 2
    assert [record.step for record in run.scaler.history] == [2, 3]
    assert "'last.bias'" in run.scaler.history[0].reason
    run.zero_grad()
    run.backward(0, 5)
    run.step()
    assert run.scaler.scale == SCALE / 2  # three steps without overflow, not six
    gpc.destroy()


@pytest.mark.parametrize("stage", [further(1), 2])
def test_an_overflow_in_one_skips_both(stage: int) -> None:
    run_ranks(one_loss, 2, stage)


def by_turns(stage: int) -> None:
    """The first optimizer's losses leave gradients in the other's parameters, which it throws away."""
    run = Run(stage)
    for step in range(4):
        huge = step == 1
        run.zero_grad(1)
        run.backward(1, step, part="rest", huge="last.bias" if huge else "")
        run.step(1, skipped=huge)
        run.zero_grad(0)
        run.backward(0, step)
        run.step(0)
    assert run.scaler.num_steps == 8
    gpc.destroy()


@pytest.mark.parametrize("stage", [1, further(2)])
def test_losses_by_turns(stage: int) -> None:
    run_ranks(by_turns, 2, stage)


def at_their_own_pace(stage: int, sync: bool) -> None:
    """One steps after every backward, the other adds up four, while the scale falls and grows."""
    run = Run(stage)
    run.scaler.growth_interval = 1
    for step, huge in enumerate(["", "first.bias", "", ""]):
        run.zero_grad(0)
        run.backward(0, step, huge=huge, sync=sync or step == 3)
        run.step(0, skipped=bool(huge))
    run.step(1)
    assert [record.scale / SCALE for record in run.scaler.history] == [2, 1, 2, 4, 8]
    run.zero_grad()
    for step in range(3):
        run.backward(step % 2, step, sync=sync or step == 2)
    run.step()
    gpc.destroy()


@pytest.mark.parametrize(("stage", "sync"), [further(1, True), (1, False), (2, True)])
def test_gradients_that_wait_follow_the_scale(stage: int, sync: bool) -> None:
    run_ranks(at_their_own_pace, 2, stage, sync)


def options() -> None:
    colossalai.launch_from_torch({}, verbose=False)
    model = Net()
    wrapped = zero_model_wrapper(model, precision="fp16")
    first = zero_optim_wrapper(wrapped, torch.optim.SGD(model.first.parameters(), lr=0.1), hysteresis=3)
    last = torch.optim.SGD(model.last.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="a model has one only: give the options with the first"):
        zero_optim_wrapper(wrapped, last, initial_scale=4.0)
    second = zero_optim_wrapper(wrapped, last, hysteresis=3)
    assert second.scaler is first.scaler
    third = zero_optim_wrapper(wrapped, torch.optim.SGD(model.norm.parameters(), lr=0.1))
    assert third.scaler is first.scaler
    assert first.scaler.hysteresis == 3
    gpc.destroy()


def test_the_scale_has_the_options_of_the_first_optimizer() -> None:
    run_ranks(options, 1)
