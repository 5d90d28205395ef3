"""Every schedule against its formula, through a saved state, and beyond its end."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.optim.lr_scheduler import LRScheduler

from colossalai.nn import lr_scheduler as schedules
from colossalai.nn.optimizer import Lamb, Lars
from colossalai.registry import LR_SCHEDULERS

pytestmark = pytest.mark.unit

TOTAL, WARMUP, BASE = 20, 5, (0.4, 0.05)


def cosine(done: float, base: float, end: float) -> float:
    return end + (base - end) * (1 + math.cos(math.pi * done)) / 2


def ramp(t: int) -> float:
    return (t + 1) / (WARMUP + 1)


def one_cycle(t: int, b: float) -> float:
    """Rise over steps 0..5 (30 % of 20, less one), fall over 5..19; both ends half cosines."""
    first, last = b / 25, b / 25 / 10000
    return cosine(t / 5, first, b) if t <= 5 else cosine((t - 5) / 14, b, last)


def polynomial(done: float, b: float, end: float, power: float) -> float:
    return (b - end) * (1 - done) ** power + end


# name: (keyword arguments, the rate at step t from base rate b, for 0 <= t <= TOTAL)
SCHEDULES: dict[str, tuple[dict[str, object], Callable[[int, float], float]]] = {
    "CosineAnnealingLR": ({"eta_min": 0.01}, lambda t, b: cosine(t / TOTAL, b, 0.01)),
    "CosineAnnealingWarmupLR": (
        {"warmup_steps": WARMUP, "eta_min": 0.01},
        lambda t, b: b * ramp(t) if t < WARMUP else cosine((t - WARMUP) / 15, b, 0.01),
    ),
    "FlatAnnealingLR": (
        {"pct_start": 0.7},
        lambda t, b: b if t < 14 else cosine((t - 14) / 6, b, 0.0),
    ),
    "FlatAnnealingWarmupLR": (
        {"warmup_steps": WARMUP, "pct_start": 0.4, "eta_min": 0.02},
        lambda t, b: b * min(1.0, ramp(t)) if t < 11 else cosine((t - 11) / 9, b, 0.02),
    ),
    "LinearWarmupLR": (
        {"warmup_steps": WARMUP},
        lambda t, b: b * (ramp(t) if t < WARMUP else (TOTAL - t) / (TOTAL - WARMUP)),
    ),
    "MultiStepLR": (
        {"milestones": [3, 12], "gamma": 0.5},
        lambda t, b: b * (1.0 if t < 3 else 0.5 if t < 12 else 0.25),
    ),
    "MultiStepWarmupLR": (
        {"milestones": [8, 12], "warmup_steps": WARMUP},
        lambda t, b: b * (ramp(t) if t < WARMUP else 1.0 if t < 8 else 0.1 if t < 12 else 0.01),
    ),
    "OneCycleLR": ({}, lambda t, b: one_cycle(min(t, TOTAL - 1), b)),
    "PolynomialLR": ({"end_lr": 0.001, "power": 2.0}, lambda t, b: polynomial(t / TOTAL, b, 0.001, 2.0)),
    "PolynomialWarmupLR": (
        {"warmup_steps": WARMUP, "end_lr": 0.001, "power": 0.5},
        lambda t, b: b * ramp(t) if t < WARMUP else polynomial((t - WARMUP) / 15, b, 0.001, 0.5),
    ),
    "StepLR": ({"step_size": 6, "gamma": 0.3}, lambda t, b: b * 0.3 ** (t // 6)),
    "ExponentialLR": ({"gamma": 0.9}, lambda t, b: b * 0.9**t),
    "LambdaLR": ({"lr_lambda": lambda t: 1 / (1 + t)}, lambda t, b: b / (1 + t)),
    "MultiplicativeLR": ({"lr_lambda": lambda t: t / (t + 1)}, lambda t, b: b / (t + 1)),
}


def make_optimizer() -> torch.optim.Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.ones(2))], "lr": lr} for lr in BASE]
    return torch.optim.SGD(groups, lr=1.0, momentum=0.9)


def make(name: str, optimizer: torch.optim.Optimizer, **more: object) -> LRScheduler:
    return getattr(schedules, name)(optimizer, TOTAL, **{**SCHEDULES[name][0], **more})


def rates(optimizer: torch.optim.Optimizer, scheduler: LRScheduler, steps: int) -> list[list[float]]:
    """The rates that the next `steps` steps are made with."""
    seen = []
    for _ in range(steps):
        seen.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    return seen


@pytest.mark.parametrize("name", SCHEDULES)
def test_rate_is_the_formula_at_every_step_and_stays_at_the_end(name: str) -> None:
    optimizer = make_optimizer()
    seen = rates(optimizer, make(name, optimizer), TOTAL + 4)
    formula = SCHEDULES[name][1]
    wanted = [[formula(min(t, TOTAL), b) for b in BASE] for t in range(TOTAL + 4)]
    torch.testing.assert_close(torch.tensor(seen), torch.tensor(wanted), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_saved_state_goes_on_with_the_same_rates_bit_for_bit(name: str, tmp_path: Path) -> None:
    optimizer = make_optimizer()
    scheduler = make(name, optimizer)
    rates(optimizer, scheduler, 7)
    torch.save((optimizer.state_dict(), scheduler.state_dict()), tmp_path / "state.pt")
    wanted = rates(optimizer, scheduler, TOTAL)

    other = make_optimizer()
    resumed = make(name, other)
    optimizer_state, state = torch.load(tmp_path / "state.pt", weights_only=False)
    other.load_state_dict(optimizer_state)
    resumed.load_state_dict(state)
    assert resumed.get_last_lr() == wanted[0]
    assert rates(other, resumed, TOTAL) == wanted
    assert resumed.state_dict() == scheduler.state_dict()


CURVES = sorted(set(SCHEDULES) - {"LambdaLR", "MultiplicativeLR", "OneCycleLR"})


@pytest.mark.parametrize("name", CURVES)
def test_the_state_of_a_curve_needs_no_other_state_and_loads_as_weights_only(
    name: str, tmp_path: Path
) -> None:
    optimizer = make_optimizer()
    scheduler = make(name, optimizer)
    rates(optimizer, scheduler, 7)
    torch.save(scheduler.state_dict(), tmp_path / "state.pt")
    wanted = rates(optimizer, scheduler, TOTAL)

    other = make_optimizer()
    resumed = make(name, other)
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert rates(other, resumed, TOTAL)[1:] == wanted[1:]


@pytest.mark.parametrize("last_step", [2, 4, 5, 9])
@pytest.mark.parametrize("name", CURVES)
def test_last_epoch_goes_on_after_that_step(name: str, last_step: int) -> None:
    optimizer = make_optimizer()
    wanted = rates(optimizer, make(name, optimizer), TOTAL)
    other = make_optimizer()
    for group, base in zip(other.param_groups, BASE, strict=True):
        group.update(initial_lr=base, lr=123.0)
    resumed = make(name, other, last_epoch=last_step)
    assert rates(other, resumed, 5) == wanted[last_step + 1 : last_step + 6]


TORCH_TWINS = {
    "CosineAnnealingLR": {"T_max": TOTAL, "eta_min": 0.01},
    "MultiStepLR": {"milestones": [3, 12], "gamma": 0.5},
    "StepLR": {"step_size": 6, "gamma": 0.3},
    "ExponentialLR": {"gamma": 0.9},
    "OneCycleLR": {"max_lr": list(BASE), "total_steps": TOTAL},
}


@pytest.mark.parametrize("name", TORCH_TWINS)
def test_same_rates_and_momentum_as_the_schedule_of_torch(name: str) -> None:
    ours, theirs = make_optimizer(), make_optimizer()
    scheduler = make(name, ours)
    twin = getattr(torch.optim.lr_scheduler, name)(theirs, **TORCH_TWINS[name])
    for _ in range(TOTAL):
        for group, twin_group in zip(ours.param_groups, theirs.param_groups, strict=True):
            assert group["lr"] == pytest.approx(twin_group["lr"], rel=1e-9)
            assert group["momentum"] == pytest.approx(twin_group["momentum"], rel=1e-12)
        for one in (ours, scheduler, theirs):
            one.step()
        if scheduler.last_epoch < TOTAL:
            twin.step()


def test_warmup_steps_may_be_the_whole_schedule() -> None:
    optimizer = make_optimizer()
    scheduler = schedules.LinearWarmupLR(optimizer, 4, warmup_steps=4)
    seen = [first for first, _ in rates(optimizer, scheduler, 7)]
    assert seen == pytest.approx([0.08, 0.16, 0.24, 0.32, 0.4, 0.4, 0.4])


@pytest.mark.parametrize("make_it", [Lamb, Lars, torch.optim.AdamW])
def test_any_optimizer_will_do(make_it: Callable[..., torch.optim.Optimizer]) -> None:
    optimizer = make_it([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    scheduler = schedules.CosineAnnealingLR(optimizer, total_steps=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert rates(optimizer, scheduler, 3) == [[0.1], [pytest.approx(0.05)], [pytest.approx(0.0)]]


def test_a_rate_that_is_a_tensor_stays_that_tensor() -> None:
    rate = torch.tensor(0.1, dtype=torch.float64)
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))], lr=rate)
    schedules.CosineAnnealingWarmupLR(optimizer, total_steps=10, warmup_steps=1)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == pytest.approx(0.05)


def test_every_schedule_is_registered() -> None:
    for name in SCHEDULES:
        assert LR_SCHEDULERS.get_module(name) is getattr(schedules, name)


@pytest.mark.parametrize("total_steps", [0, -3, 2.5, None])
@pytest.mark.parametrize("name", SCHEDULES)
def test_total_steps_must_be_a_positive_integer(name: str, total_steps: object) -> None:
    with pytest.raises(ValueError, match=r"total_steps=.*positive integer"):
        getattr(schedules, name)(make_optimizer(), total_steps, **SCHEDULES[name][0])


@pytest.mark.parametrize("name", [name for name in SCHEDULES if "Warmup" in name])
def test_a_warmup_must_be_a_number_of_steps(name: str) -> None:
    for warmup_steps in (-1, 1.5):
        with pytest.raises(ValueError, match=r"warmup_steps=.* is out of range.* from 0 to total_steps"):
            make(name, make_optimizer(), warmup_steps=warmup_steps)


@pytest.mark.parametrize("name", [name for name in SCHEDULES if "Warmup" in name])
def test_a_warmup_longer_than_the_schedule_is_warned_about(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The documentation's mixed-precision tutorial warms up for 50 of 2 epochs."""
    optimizer = make_optimizer()
    more = {"milestones": [80]} if "Multi" in name else {}
    warmup_steps = 40 + len(name)  # a message of its own for each: it is logged once
    scheduler = make(name, optimizer, warmup_steps=warmup_steps, **more)
    assert f"ends at 21/{warmup_steps + 1} of its base" in capsys.readouterr().err
    seen = [first for first, _ in rates(optimizer, scheduler, TOTAL + 3)]
    wanted = [0.4 * (min(t, TOTAL) + 1) / (warmup_steps + 1) for t in range(TOTAL + 3)]
    assert seen == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("pct_start", [-0.1, 1.01, float("nan")])
@pytest.mark.parametrize("name", ["FlatAnnealingLR", "FlatAnnealingWarmupLR", "OneCycleLR"])
def test_pct_start_must_be_a_fraction(name: str, pct_start: float) -> None:
    with pytest.raises(ValueError, match=r"pct_start=.* from 0 .* to 1"):
        make(name, make_optimizer(), pct_start=pct_start)


@pytest.mark.parametrize("pct_start", [0, 0.01, 0.5, 1])
@pytest.mark.parametrize("name", ["FlatAnnealingLR", "FlatAnnealingWarmupLR", "OneCycleLR"])
def test_the_whole_range_of_pct_start_works(name: str, pct_start: float) -> None:
    optimizer = make_optimizer()
    seen = rates(optimizer, make(name, optimizer, pct_start=pct_start), TOTAL + 2)
    assert all(
        0 <= rate <= base * (1 + 1e-12) for pair in seen for rate, base in zip(pair, BASE, strict=True)
    )


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("OneCycleLR", {"pct_start": 0.05}, "rise of one step"),
        ("MultiStepLR", {"milestones": [5, 3]}, "rising order"),
        ("MultiStepLR", {"milestones": [0.5]}, "must be integers"),
        ("MultiStepWarmupLR", {"milestones": [5, 9], "warmup_steps": 5}, "greater than 5"),
        ("StepLR", {"step_size": 0}, "step_size=0.*positive integer"),
        ("PolynomialLR", {"power": 0.0}, "greater than 0"),
    ],
)
def test_other_wrong_arguments(name: str, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(name, make_optimizer(), **arguments)
