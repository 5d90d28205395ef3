"""The methods of a plan: what is in the list, in which order, and when each is called."""

import pytest
import torch
from torch import nn

from colossalai.amp import PureBF16
from colossalai.context import Layout
from colossalai.nn.parallel import Bucketed, Replicated
from colossalai.pipeline import PipelineOptions
from colossalai.runtime import Plan, assemble
from colossalai.runtime.methods import ModelShards, PlanMethod

pytestmark = pytest.mark.unit


def names_of(plan):
    return [type(method).__name__ for method in plan.methods()]


def test_a_plan_without_choices_has_only_what_every_model_goes_through():
    assert names_of(Plan()) == [
        "UserShards",
        "ModelShards",
        "BatchNorms",
        "ParamValues",
        "MovedParams",
        "ComputePrecision",
        "DataParallelism",
        "WrappedOptimizers",
    ]


def test_each_choice_adds_its_methods_in_one_order():
    pipeline = PipelineOptions(num_microbatches=2)
    plan = Plan(recompute=True, compile=True, fused_loss=True, pipeline=pipeline, data=Bucketed())
    assert names_of(plan) == [
        "PipelineStages",
        "UserShards",
        "ModelShards",
        "BatchNorms",
        "ParamValues",
        "TiedWeights",
        "MovedParams",
        "CompiledBlocks",
        "Recomputation",
        "FusedLoss",
        "DataParallelism",
        "WrappedOptimizers",
    ]


def test_methods_are_values():
    assert Plan(recompute=["blocks.0"]).methods() == Plan(recompute=["blocks.0"]).methods()
    assert Plan().methods() != Plan(clip_grad_norm=1.0).methods()


@pytest.mark.dist
def test_all_are_validated_before_one_is_applied(mesh, monkeypatch):
    calls = []

    class Recorded(PlanMethod):
        def __init__(self, name):
            self.name = name

        def validate(self, job):
            calls.append(f"validate {self.name}")

        def apply(self, job):
            calls.append(f"apply {self.name}")

        def after_apply(self, job):
            calls.append(f"after {self.name}")

    real = Plan.methods
    monkeypatch.setattr(Plan, "methods", lambda plan: (Recorded("first"), *real(plan), Recorded("last")))
    model = nn.Linear(2, 2)
    wrapper, _ = assemble(Plan(), model, mesh=mesh, device=torch.device("cpu"))
    assert wrapper.unwrap() is model
    assert calls == [
        f"{phase} {name}" for phase in ("validate", "apply", "after") for name in ("first", "last")
    ]


@pytest.mark.dist
def test_a_refused_model_is_left_as_it_was(mesh):
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    before = {name: (id(part), type(part), dict(vars(part))) for name, part in model.named_modules()}
    plan = Plan(precision=PureBF16(), compile={"backend": "none"}, recompute=["0"])
    with pytest.raises(ValueError, match=r"compile: torch.compile refuses its options"):
        assemble(plan, model, mesh=mesh, device=torch.device("cpu"))
    assert {name: (id(part), type(part), dict(vars(part))) for name, part in model.named_modules()} == before
    assert {param.dtype for param in model.parameters()} == {torch.float32}


def test_cuts_are_those_of_the_plan():
    layout = Layout(tensor=2, mode="1d")
    by_class = Plan(layout=layout, data=Replicated())
    assert ModelShards(None) in by_class.methods()
    assert ModelShards({}) in Plan(layout=layout, cuts={}).methods()
