"""Schedulers round trip, and their files need no code to be read."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer, lr_scheduler

from colossalai.checkpoint_io import load_lr_scheduler, save_lr_scheduler
from colossalai.nn.lr_scheduler import CosineAnnealingWarmupLR, FlatAnnealingWarmupLR, MultiStepWarmupLR

pytestmark = pytest.mark.unit


def chained(optimizer: Optimizer) -> Any:
    warmup = lr_scheduler.LinearLR(optimizer, total_iters=3)
    return lr_scheduler.SequentialLR(optimizer, [warmup, lr_scheduler.ExponentialLR(optimizer, 0.9)], [3])


SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "step": partial(lr_scheduler.StepLR, step_size=2),
    "multi step": partial(lr_scheduler.MultiStepLR, milestones=[2, 4, 4]),
    "one cycle": partial(lr_scheduler.OneCycleLR, max_lr=0.5, total_steps=20),
    "lambda": partial(lr_scheduler.LambdaLR, lr_lambda=lambda step: 1 / (1 + step)),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer),
    "chained": chained,
    "cosine warmup": partial(CosineAnnealingWarmupLR, total_steps=20, warmup_steps=3),
    "flat warmup": partial(FlatAnnealingWarmupLR, total_steps=20, warmup_steps=3),
    "multi step warmup": partial(MultiStepWarmupLR, total_steps=20, warmup_steps=2, milestones=[4, 6]),
}


def advance(scheduler: Any, optimizer: Optimizer, steps: int) -> list[float]:
    rates = []
    for _ in range(steps):
        optimizer.step()
        if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
            scheduler.step(1.0)
        else:
            scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=list(SCHEDULERS))
def test_round_trip_and_go_on(make: Callable[[Optimizer], Any], tmp_path: Path) -> None:
    module = nn.Linear(1, 1)
    optimizer, twin = SGD(module.parameters(), lr=0.1), SGD(module.parameters(), lr=0.1)
    scheduler, other = make(optimizer), make(twin)
    advance(scheduler, optimizer, 3)
    save_lr_scheduler(scheduler, tmp_path / "x")
    load_lr_scheduler(other, tmp_path / "x")
    twin.load_state_dict(optimizer.state_dict())
    assert advance(scheduler, optimizer, 8) == advance(other, twin, 8)
    torch.load(tmp_path / "x", weights_only=True)


def test_something_else_is_named(tmp_path: Path) -> None:
    torch.save([1], tmp_path / "x")
    scheduler = lr_scheduler.StepLR(SGD(nn.Linear(1, 1).parameters()), 2)
    with pytest.raises(ValueError, match=r"/x holds a list where a dict is expected"):
        load_lr_scheduler(scheduler, tmp_path / "x")


def test_what_is_not_plain_is_named(tmp_path: Path) -> None:
    scheduler = lr_scheduler.StepLR(SGD(nn.Linear(1, 1).parameters()), 2)
    scheduler.hook = print
    with pytest.raises(ValueError, match="lr_scheduler/hook is a"):
        save_lr_scheduler(scheduler, tmp_path / "x")
