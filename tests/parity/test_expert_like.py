"""Parameters cut over a part of the data-parallel ranks, as experts are, train as in one process.

Their gradients are summed over the ranks that hold the same slice, and divided by the number of all.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import LowLevelZeroPlugin, Plugin, TorchDDPPlugin, TorchFSDPPlugin
from colossalai.context import Mesh
from colossalai.core import global_context as gpc
from colossalai.nn.parallel import Bucketed, FullySharded
from colossalai.testing import ParityCase, Subject, check_parity
from tests.parity import doors, zero
from tests.parity.experts import Experts, Net, cut_copy, make_batches
from tests.parity.tensor import whole
from tests.ranks import run_ranks

MAX_NORM = 0.2  # of a norm of about 1


class WholeSGD(torch.optim.SGD):
    """An optimizer of which ZeRO does not know that it would take slices."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def loss_of(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def make_case(**changes: Any) -> ParityCase:
    case = ParityCase(
        build_model=Net,
        build_optimizer=partial(torch.optim.AdamW, lr=0.05),
        compute_loss=loss_of,
        batches=make_batches(),
        max_norm=MAX_NORM,
    )
    return replace(case, **changes)


CONFIGS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "handler": {"gradient_handler": [{"type": "DataParallelGradientHandler"}]},
    "zero 1": {"zero": {"stage": 1}},
    "zero 2": {"zero": {"stage": 2}},
    "fsdp": {"zero": {"stage": 3}},
}
PLUGINS: dict[str, Callable[[], Plugin]] = {
    "ddp": partial(TorchDDPPlugin, gradient_as_bucket_view=True),
    "zero 1": partial(LowLevelZeroPlugin, stage=1, precision="fp32", max_norm=MAX_NORM),
    "zero 2": partial(LowLevelZeroPlugin, stage=2, precision="fp32", max_norm=MAX_NORM),
    "fsdp": TorchFSDPPlugin,
}


def wholes(model: nn.Module, of: Callable[[nn.Parameter], Tensor]) -> dict[str, Tensor]:
    return {name: whole(param, of(param)) for name, param in model.named_parameters()}


def through_engine(case: ParityCase, accumulation: int, plain: nn.Module) -> Subject:
    model = cut_copy(plain, gpc.mesh)
    if gpc.config.get("zero") and gpc.config.zero.stage < 3:
        return zero.through_engine(case, model)
    subject = doors.through_engine(case, accumulation, model)
    return replace(
        subject,
        gradients=lambda: wholes(model, lambda param: param.grad),
        parameters=lambda: wholes(model, lambda param: param),
    )


def through_booster(case: ParityCase, method: str, accumulation: int, plain: nn.Module) -> Subject:
    model = cut_copy(plain, gpc.mesh)
    if method.startswith("zero"):
        return zero.through_booster(case, PLUGINS[method](), accumulation, model)
    booster = Booster(plugin=PLUGINS[method]())
    boosted, optimizer, criterion, *_ = booster.boost(
        model, case.build_optimizer(model.parameters()), nn.functional.cross_entropy
    )

    def step(batch: tuple[Tensor, ...]) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        optimizer.zero_grad()
        parts = list(zip(*(tensor.chunk(accumulation) for tensor in batch), strict=True))
        for number, (x, y) in enumerate(parts):
            boosted.set_sync(number == accumulation - 1)
            loss = criterion(boosted(x), y) / accumulation
            booster.backward(loss, optimizer)
            total += loss.detach()
        optimizer.clip_grad_by_norm(MAX_NORM)
        optimizer.step()
        return total

    return Subject(
        step=step,
        gradients=lambda: wholes(model, lambda param: param.grad),
        parameters=lambda: wholes(model, lambda param: param),
    )


def by_both_doors(method: str, accumulation: int) -> None:
    config = {**CONFIGS[method], "gradient_accumulation": accumulation, "clip_grad_norm": MAX_NORM}
    colossalai.launch_from_torch({**config, "parallel": {"moe": {"size": 2}}}, verbose=False)
    case = make_case()
    losses = check_parity(case, partial(through_engine, case, accumulation))
    assert losses[-1] < losses[0]
    if method in PLUGINS:
        assert check_parity(case, partial(through_booster, case, method, accumulation)) == losses
    gpc.destroy()


@pytest.mark.dist
@pytest.mark.parametrize("method", CONFIGS)
@pytest.mark.parametrize("world_size", [2, 4])
def test_both_doors_against_one_process(method: str, world_size: int) -> None:
    """On two ranks no other one holds the same expert: nothing is summed, and still divided by two."""
    run_ranks(by_both_doors, world_size, method, 2 if world_size == 4 else 1)
