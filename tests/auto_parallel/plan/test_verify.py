"""A plan is run for a step on the real ranks, and made again if more bytes are counted than it may take."""

import math
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import colossalai
from colossalai.auto_parallel import AutoPlan, _verify, make_plan
from colossalai.auto_parallel._verify import counted_peak
from colossalai.auto_parallel.prediction._prediction import Prediction, Predictor
from colossalai.context import get_current_mode, get_states
from tests.auto_parallel.plan.models import arguments_of, gpt, slow_machine
from tests.auto_parallel.plan.test_peak import MOST_ABOVE, MOST_BELOW
from tests.ranks import run_ranks
from tests.tiers import further
from tests.turns import run_each

BATCH = 8
HOW: dict[str, Any] = {"profile": slow_machine(), "optimizer": "adamw"}


def meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


def in_job(look: Callable[..., Any], *args: Any) -> Any:
    """Return what a look returns within a job of this rank."""
    colossalai.launch_from_torch({}, verbose=False)
    return look(*args)


@cache
def free_plan() -> AutoPlan:
    return make_plan(meta(gpt), arguments_of(gpt, BATCH), **HOW)


def look_at_a_plan_within_a_budget() -> tuple[float, AutoPlan, float]:
    """The counted peak of a plan is within the budget, and the same when it is counted once more."""
    budget = 0.7 * free_plan().peak_bytes
    plan = make_plan(meta(gpt), arguments_of(gpt, BATCH), memory_budget=budget, **HOW)
    again = counted_peak(plan, meta(gpt), arguments_of(gpt, BATCH))
    assert plan.counted_bytes is not None
    assert plan.counted_bytes <= budget
    assert plan.setting.pipeline == 2
    assert plan.counted_bytes == pytest.approx(again, rel=0.01)
    assert AutoPlan.from_json(plan.to_json()) == plan
    assert "Run for a step, it took" in plan.explain()
    return budget, plan, again


def look_at_a_model_with_values() -> None:
    """The user's own model does not count."""
    plan = free_plan()
    builds = (gpt, partial(meta, gpt))
    with_values, without = (counted_peak(plan, build(), arguments_of(gpt, BATCH)) for build in builds)
    assert with_values == pytest.approx(without, rel=1e-3)


def predict_half(monkeypatch: pytest.MonkeyPatch) -> None:
    """Predict a half of the bytes."""
    original = Predictor.predict

    def predict(self: Predictor, *args: Any) -> Prediction:
        found = original(self, *args)
        return replace(found, bytes={name: 0.5 * size for name, size in found.bytes.items()})

    monkeypatch.setattr(Predictor, "predict", predict)


def note_counts(monkeypatch: pytest.MonkeyPatch, seen: list[float], plans: list[AutoPlan]) -> None:
    """Note what is counted, and of which plans."""
    original = _verify.counted_peak

    def count(plan: AutoPlan, *args: Any) -> float:
        seen.append(original(plan, *args))
        plans.append(plan)
        return seen[-1]

    monkeypatch.setattr(_verify, "counted_peak", count)


def look_at_a_prediction_of_half() -> tuple[Any, ...]:
    """It is found, and the plan made again."""
    budget = 0.9 * counted_peak(free_plan(), meta(gpt), arguments_of(gpt, BATCH))
    seen: list[float] = []
    plans: list[AutoPlan] = []
    how = {"memory_budget": budget, **HOW}
    with pytest.MonkeyPatch.context() as monkeypatch:
        predict_half(monkeypatch)
        note_counts(monkeypatch, seen, plans)
        plan = make_plan(meta(gpt), arguments_of(gpt, BATCH), **how)
    honest = make_plan(meta(gpt), arguments_of(gpt, BATCH), verify=False, **how)
    assert len(seen) >= 2, "the first plan was taken as it was"
    assert seen[0] > budget
    assert seen[-1] <= budget
    assert plan.counted_bytes == seen[-1]
    scale = math.prod(peak / each.peak_bytes for peak, each in zip(seen[:-1], plans, strict=False))
    assert scale > 1.2
    assert (honest.setting, honest.cuts, honest.segments) == (plan.setting, plan.cuts, plan.segments)
    assert seen[-1] <= MOST_ABOVE * honest.peak_bytes
    assert honest.peak_bytes <= MOST_BELOW * seen[-1]
    halved = 0.5 * honest.bytes["parameters"]
    assert plan.bytes["parameters"] == pytest.approx(scale * halved)  # sizes are scaled by what was seen
    return budget, plan, seen, plans, honest


def look_at_counts_above_any_budget() -> tuple[str, list[float]]:
    """After three more plans it is an error, with the smallest budget that works."""
    budget = 1.2 * free_plan().peak_bytes
    seen: list[float] = []

    def count(*_: Any) -> float:
        seen.append(1.01 * budget + len(seen))
        return seen[-1]

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(_verify, "counted_peak", count)
        with pytest.raises(ValueError, match="no plan was found that keeps") as refused:
            make_plan(meta(gpt), arguments_of(gpt, BATCH), memory_budget=budget, **HOW)
    assert len(seen) == 4
    assert f"smallest budget that works is {math.ceil(min(seen)):,}" in str(refused.value)
    return str(refused.value), seen


def look_at_what_is_left_as_it_was() -> None:
    """A verification changes nothing of the model and of the random states."""
    torch.manual_seed(3)
    model = gpt()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    draws = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state(), get_current_mode()
    modes = {mode: state["cpu"].clone() for mode, state in get_states().items()}
    versions = [param._version for param in model.parameters()]
    plan = make_plan(model, arguments_of(gpt, BATCH), verify=True, **HOW)
    changed = [name for name, value in model.state_dict().items() if not torch.equal(value, before[name])]
    changed += ["a version"] * ([param._version for param in model.parameters()] != versions)
    changed += ["gradients"] * any(param.grad is not None for param in model.parameters())
    changed += ["hooks"] * any(param._backward_hooks for param in model.parameters())
    changed += ["Python"] * (random.getstate() != draws[0])
    changed += ["numpy"] * (np.random.get_state()[1].tolist() != draws[1])
    changed += ["torch"] * (not torch.equal(torch.get_rng_state(), draws[2]))
    changed += ["mode"] * (get_current_mode() != draws[3])
    changed += [
        f"{mode}" for mode, state in get_states().items() if not torch.equal(state["cpu"], modes[mode])
    ]
    assert plan.memory_budget is None
    assert plan.counted_bytes is not None
    assert plan.counted_bytes > 0
    assert not changed


class Fails(nn.Module):
    """A GPT whose forward fails on one rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.model, self.rank = gpt(), rank

    def forward(self, input_ids: Tensor) -> Tensor:
        is_traced = isinstance(input_ids, FakeTensor)
        if not is_traced and torch.distributed.get_rank() == self.rank:
            raise RuntimeError(f"rank {self.rank} is broken")
        return self.model(input_ids)


def refused_on_one_rank(rank: int, batch: int) -> str:
    with pytest.raises(ValueError, match="pass verify=False") as refused:
        make_plan(Fails(rank), arguments_of(gpt, batch), verify=True, **HOW)
    assert f"RuntimeError: rank {rank} is broken" in str(refused.value)
    return str(refused.value)


def look_at_an_error_of_one_tensor_parallel_rank() -> str:
    return refused_on_one_rank(0, 1)


@pytest.mark.long
@pytest.mark.dist
def test_the_error_of_one_replica_is_raised_on_all() -> None:
    one, other = run_ranks(in_job, 2, refused_on_one_rank, 1, BATCH)
    assert one == other


class Indices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = gpt()

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.model(input_ids).argmax(-1)


def look_at_a_model_without_floating_outputs() -> str:
    with pytest.raises(ValueError, match=r"returns no floating tensor.*pass verify=False") as refused:
        make_plan(Indices(), arguments_of(gpt, BATCH), verify=True, **HOW)
    return str(refused.value)


@pytest.mark.unit
def test_outputs_that_depend_on_no_parameter_make_no_loss() -> None:
    with pytest.raises(ValueError, match="no floating output depends on a trainable parameter"):
        _verify._loss_of({"scores": torch.ones(2, 3), "found": torch.ones(2, dtype=torch.long)})


@pytest.mark.unit
@pytest.mark.parametrize("share", [further(None), 0.9])
def test_outside_of_a_job_nothing_is_run(share: float | None) -> None:
    how = {**HOW, "world_size": 2}
    free = make_plan(gpt(), arguments_of(gpt, BATCH), **how)
    assert free.counted_bytes is None
    with pytest.raises(ValueError, match="verify=True runs the plan on its 2 ranks, and this is no job"):
        make_plan(gpt(), arguments_of(gpt, BATCH), verify=True, **how)
    if share is not None:
        budget = share * free.peak_bytes
        plan = make_plan(gpt(), arguments_of(gpt, BATCH), memory_budget=budget, **how)
        assert plan.counted_bytes is None


def look_at_a_job_of_other_ranks() -> None:
    with pytest.raises(ValueError, match="verify=True runs the plan on its 4 ranks, and the job has 2"):
        make_plan(gpt(), arguments_of(gpt, BATCH), world_size=4, verify=True, **HOW)
    plan = make_plan(gpt(), arguments_of(gpt, BATCH), world_size=4, **HOW)
    assert plan.counted_bytes is None


FIRST = (
    look_at_a_prediction_of_half,
    look_at_what_is_left_as_it_was,
    look_at_an_error_of_one_tensor_parallel_rank,
)
REST = (
    look_at_a_plan_within_a_budget,
    look_at_a_model_with_values,
    look_at_counts_above_any_budget,
    look_at_a_model_without_floating_outputs,
    look_at_a_job_of_other_ranks,
)


@pytest.mark.dist
@pytest.mark.parametrize("looks", [FIRST, further(REST)], ids=["first", "rest"])
def test_plans_are_run_in_jobs_of_two_ranks(looks: tuple[Callable[[], Any], ...]) -> None:
    """The first plan of a rank takes as long as three later ones, and so ranks are started once."""
    for look, (one, other) in zip(looks, run_each(2, in_job, [(look,) for look in looks]), strict=True):
        assert one == other, look
