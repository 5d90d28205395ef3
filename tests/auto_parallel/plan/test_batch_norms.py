"""Batch norms take their statistics over all replicas, and predictions know what that costs."""

import pytest
import torch
from torch import Tensor, nn

from colossalai.auto_parallel import AutoPlan, make_plan
from colossalai.auto_parallel._make import PlanProblem, pose_problem
from colossalai.auto_parallel._search import SearchLimits
from colossalai.auto_parallel._setting import Setting
from tests.auto_parallel.plan.models import slow_machine

pytestmark = pytest.mark.unit

CHANNELS = (6, 10)


def posed(*, world_size: int, has_norms: bool = True) -> PlanProblem:
    torch.manual_seed(0)
    norms = [nn.BatchNorm2d(each) if has_norms else nn.Identity() for each in CHANNELS]
    model = nn.Sequential(nn.Conv2d(3, 6, 3), norms[0], nn.ReLU(), nn.Conv2d(6, 10, 3), norms[1])
    return pose_problem(
        model.train(),
        {"input": torch.zeros(8, 3, 8, 8)},
        world_size=world_size,
        optimizer="sgd",
        precision="fp32",
        profile=slow_machine(link_bytes_per_s=1e5),
        limits=SearchLimits(),
    )


def communication(problem: PlanProblem, setting: Setting) -> float:
    inner = problem.search.problem_of(setting)
    seconds = problem.search.answer(setting, inner.whole()).prediction.seconds
    return seconds["tensor communication"]


def test_replicas_exchange_statistics() -> None:
    problem, setting = posed(world_size=2), Setting(data=2)
    speed = problem.search.problem_of(setting).params.speed
    sent = sum(
        speed.cost("all_gather", 2 * 4 * 2 * each, "0") + speed.cost("all_reduce", 4 * 2 * each, "0")
        for each in CHANNELS
    )
    found = communication(problem, setting)
    assert sent < found < 2 * sent  # and the calls that make something of them


def test_one_replica_and_models_without_them_exchange_nothing() -> None:
    assert communication(posed(world_size=1), Setting()) == 0.0
    assert communication(posed(world_size=2, has_norms=False), Setting(data=2)) == 0.0


class BareNorm(nn.Module):
    """Two convolutions with a batch norm without parameters between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, affine=False)
        self.second = nn.Conv2d(8, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.norm(self.first(x)).relu())


def test_a_norm_without_parameters_is_in_the_text_of_a_plan() -> None:
    plan = make_plan(BareNorm(), {"x": torch.zeros(1, 3, 8, 8)}, world_size=2, profile=slow_machine())
    assert plan.setting.tensor == 2
    assert "norm" in plan.cuts
    assert AutoPlan.from_json(plan.to_json()) == plan
