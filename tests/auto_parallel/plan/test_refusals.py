"""What does not fit is refused by name: arguments, shapes, sizes, budgets, plans for something else."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import colossalai
from colossalai.auto_parallel import AutoPlan, load_plan, make_plan
from colossalai.auto_parallel.solver._choice import BudgetError
from colossalai.auto_parallel.tensor_shard.initialize import autoparallelize, initialize_device_mesh
from colossalai.booster import Booster
from colossalai.booster.plugin import AutoPlugin
from colossalai.core import global_context as gpc
from tests.auto_parallel.plan.models import arguments_of, gpt, resnet, slow_machine
from tests.launched import on_ranks
from tests.ranks import run_ranks

HOW = {"profile": slow_machine(), "optimizer": "momentum"}


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.fc(x)
        return hidden[hidden.sum(-1) > 0]


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.picks = Inner()

    def forward(self, x: Tensor) -> Tensor:
        return self.picks(x).square()


@pytest.mark.unit
@pytest.mark.parametrize(
    ("build", "given", "said"),
    [
        (gpt, {}, "meta_args has no tensor with a batch: give the arguments of the forward by name"),
        (gpt, [torch.zeros(8, 6)], "meta_args is a list: give a dict of the arguments of the forward"),
        (gpt, {"input_ids": torch.zeros(0, 6)}, "meta_args have a batch of 0 samples"),
        (gpt, {"input_ids": 3}, "meta_args has no tensor with a batch"),
        (gpt, {"input_ids": torch.tensor(3)}, "meta_args has no tensor with a batch"),
        (gpt, {"ids": torch.zeros(8, 6)}, "names 'ids', which the forward of GPT does not have: use 'input_"),
        (gpt, {"input_ids": torch.zeros(8, 6), "labels": torch.zeros(4, 6)}, "'input_ids': 8, 'labels': 4"),
        (
            Outer,
            {"x": torch.zeros(4, 4)},
            r"aten\.index\.Tensor in module 'picks' of Outer depends on the values of tensors",
        ),
    ],
)
def test_arguments(build: Callable[[], nn.Module], given: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make_plan(build(), given, world_size=2, **HOW)


@pytest.mark.unit
def test_a_number_of_ranks_that_nothing_can_be_shared_by() -> None:
    """No divisor of 67 but itself: more than divide the batch, and more than share a layer."""
    with pytest.raises(ValueError, match=r"a batch of 8 cannot be shared by 67 ranks, .* fewer ranks"):
        make_plan(gpt(), arguments_of(gpt, 8), world_size=67, **HOW)


@pytest.mark.unit
def test_a_budget_below_one_layer_is_refused_with_the_least_that_works() -> None:
    model, given = gpt(), arguments_of(gpt, 1)
    layer = sum(param.nbytes for param in model.blocks[0].mlp.expansion.parameters())
    with pytest.raises(BudgetError, match="no plan for 1 ranks fits into") as refused:
        make_plan(model, given, world_size=1, memory_budget=layer - 1, **HOW)
    least = refused.value.least_bytes
    assert f"smallest budget that was found to work is {least:,}" in str(refused.value)
    plan = make_plan(model, given, world_size=1, memory_budget=least, **HOW)
    assert plan.peak_bytes <= least
    with pytest.raises(BudgetError):
        make_plan(model, given, world_size=1, memory_budget=least - 1, **HOW)


def changed(plan: AutoPlan, **parts: Any) -> AutoPlan:
    """Return a plan with some parts of its text changed, as in a file that somebody wrote in."""
    return AutoPlan.from_json(json.dumps({**json.loads(plan.to_json()), **parts}))


@pytest.mark.unit
def test_a_text_with_a_wrong_part_is_refused() -> None:
    plan = make_plan(gpt(), arguments_of(gpt, 1), world_size=2, **HOW)
    for parts, said in (
        ({"rules": {"blocks.0.mlp": {"colums": ["expansion"]}}}, "no 'colums'; did you mean 'columns'"),
        ({"setting": {"date": 2}}, "'date'"),
        ({"setting": {"data": 0}}, "data of the setting is 0; give a number from 1 on"),
        ({"setting": {"zero": 4}}, "zero of the setting is 4; give a number from 0 on"),
        ({"precision": "fp7"}, "the precision is 'fp7'; there are fp32, bf16"),
        ({"optimizer": "lion"}, "the optimizer is 'lion'; there are adamw"),
        ({"modules": {"head": ["wide", 0.0, 0.0, {}]}}, "the cut of head is 'wide'; there are whole, output"),
        ({"modules": {"hat": ["whole", 0.0, 0.0, {}]}}, "names 'hat', and GPT has no such module"),
        (
            {"rules": {"blocks.0.mpl": {"columns": ["expansion"]}}},
            "names 'blocks.0.mpl', and GPT has no such",
        ),
        ({"version": 99}, "version 99, and this is version 1: make it again"),
        ({"sekonds": {}}, "a plan has no 'sekonds'; did you mean 'seconds'"),
        ({"parameters": []}, "parameters is \\[\\]; it must be a shape"),
        ({"rules": {"head": [1]}}, "rules is {'head': \\[1\\]}; it must be a rule for each name"),
        (
            {"rules": {"blocks.0.mlp": {"columns": "expansion"}}},
            "columns of a rule is 'expansion'; it must be",
        ),
        ({"seconds": {"forward": float("nan")}}, "seconds is {'forward': nan}; it must be a finite number"),
        ({"bytes": None}, "bytes is None; it must be a finite number for each name"),
        ({"memory_budget": "4GB"}, "memory_budget is '4GB'; it must be bytes above 0, or null"),
        ({"batch": 0}, "batch is 0; it must be a number of samples above 0"),
        ({"setting": {"data": True}}, "data of the setting is True; give a number from 1 on"),
        (
            {"setting": {"data": 2}},
            "a batch of 1 cannot be shared by 2 data-parallel ranks in 1 microbatches",
        ),
        (
            {"batch": 6, "setting": {"data": 3, "expert": 2}},
            "is 2, which does not divide the 3 data-parallel",
        ),
        ({"batch": 4, "setting": {"microbatches": 4}}, "4 microbatches need a pipeline, and there is one"),
        ({"segments": [[0, 9, []]]}, "segments are of more blocks than the 0 of the plan"),
        ({"rules": {"": {"heads": ["head"]}}, "setting": {}}, "rules cut '', and tensor of the setting is 1"),
        (
            {"modules": {"head": ["output", 0.0, 0.0, {}]}, "rules": {}},
            "'head' is cut 'output' among the modu",
        ),
    ):
        with pytest.raises(ValueError, match=said):
            changed(plan, **parts)
    whole = json.loads(plan.to_json())
    for name in whole:
        with pytest.raises(ValueError, match=f"lacks '{name}'|version None|not a plan"):
            AutoPlan.from_json(json.dumps({key: value for key, value in whole.items() if key != name}))


@pytest.mark.unit
def test_what_is_not_a_plan_is_refused() -> None:
    plan = make_plan(gpt(), arguments_of(gpt, 1), world_size=2, **HOW)
    for call, said in (
        (lambda: load_plan(plan), "the plan is a AutoPlan: load_plan takes the path of its file"),
        (lambda: AutoPlan.from_json(None), "the text is not JSON"),  # type: ignore[arg-type]
        (lambda: plan.diff("plan.json"), "other is a str: give a plan; load_plan reads one of a file"),  # type: ignore[arg-type]
        (lambda: plan.explain(3), "the plan has no module 3 that could be cut"),  # type: ignore[arg-type]
        (lambda: plan.with_choice(None, "whole"), "name=None: give the full name of a layer"),  # type: ignore[arg-type]
        (lambda: plan.with_choice("head", "whole", model=gpt, meta_args={}), "the model is a function: give"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ValueError, match=said):
            call()


@pytest.mark.unit
def test_a_difference_names_whatever_figures_depend_on() -> None:
    plan = make_plan(gpt(), arguments_of(gpt, 1), world_size=2, **HOW)
    other = replace(plan, profile="h100", memory_budget=1e9, parameters={"head.weight": (2, 3)})
    lines = plan.diff(other).splitlines()
    assert f"profile: {plan.profile} -> h100" in lines
    assert "budget: none -> 1.00 GB" in lines
    assert lines[0].endswith(" tensors -> 6 in 1 tensors")


def refused(plan: AutoPlan, model: nn.Module) -> str:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError) as found:  # noqa: PT011 - the sentence is compared by the test
        Booster(plugin=AutoPlugin(plan)).boost(model, optimizer)
    return str(found.value)


def refusals_of_rank(plan: AutoPlan, larger: AutoPlan) -> Mapping[str, str]:
    colossalai.launch_from_torch({}, verbose=False)
    mlp = {"columns": ["expansion"], "rows": ["projection"]}
    return {
        "world size": refused(larger, gpt()),
        "model": refused(plan, resnet()),
        "layer": refused(changed(plan, rules={"blocks.0.mlp": {**mlp, "rows": ["proj"]}}, modules={}), gpt()),
    }


@pytest.mark.long
@pytest.mark.dist
def test_plans_for_something_else() -> None:
    plan = make_plan(gpt(), arguments_of(gpt, 1), world_size=2, **HOW)
    assert plan.setting.tensor == 2
    larger = make_plan(gpt(), arguments_of(gpt, 8), world_size=4, **HOW)
    found, other = run_ranks(refusals_of_rank, 2, plan, larger)
    assert found == other
    assert "the plan is for 4 ranks (dp 4, tp 1, pp 1, ZeRO 1), and the job has 2" in found["world size"]
    assert "blocks." in found["model"]
    assert "proj" in found["layer"]


@pytest.mark.unit
@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"model": nn.Linear}, r"the model is the class Linear: give an object of it, Linear\(\.\.\.\)"),
        ({"model": "gpt2"}, r"the model is a str: give a torch\.nn\.Module"),
        ({"meta_args": {0: torch.zeros(8, 4)}}, "meta_args has the key 0: give names of arguments"),
        ({"world_size": "2"}, "world_size='2': give the number of ranks"),
        ({"world_size": True}, "world_size=True: give the number of ranks"),
        ({"memory_budget": float("inf")}, "memory_budget=inf: give bytes above 0, or None for any"),
        ({"memory_budget": "4GB"}, "memory_budget='4GB': give bytes above 0, or None for any"),
        ({"optimizer": ["adamw"]}, r"optimizer=\['adamw'\]: choose one of adamw, adam, momentum, sgd"),
        ({"precision": ["bf16"]}, r"precision=\['bf16'\]: choose one of fp32, bf16"),
        ({"profile": ["h100"]}, r"profile=\['h100'\]: give a MachineProfile, the path of one, or the name"),
        ({"time_limit": "10"}, "time_limit='10': give seconds above 0"),
        ({"time_limit": None}, "time_limit=None: give seconds above 0"),
        ({"gap": None}, "gap=None: give a part of the seconds, of 0 or more"),
    ],
)
def test_options_of_another_type(parts: dict[str, Any], said: str) -> None:
    given = {"model": nn.Linear(4, 4), "meta_args": {"input": torch.zeros(8, 4)}, "world_size": 2, **parts}
    with pytest.raises(ValueError, match=said):
        make_plan(given.pop("model"), given.pop("meta_args"), **given)


def linear(width: int = 4) -> nn.Module:
    return nn.Linear(width, width)


ARGUMENTS = {"input": torch.zeros(8, 4)}
# What rank 0 gives and rank 1 does, and what both are told.
DIFFERENT_PLANS = {
    "memory_budget": (None, 1e9, "memory_budget is None on rank 0 and 1000000000.0 on rank 1"),
    "world_size": (2, 4, "world_size is 2 on rank 0 and 4 on rank 1"),
    "verify": (False, True, "verify is False on rank 0 and True on rank 1"),
    "optimizer": ("sgd", "adamw", "optimizer is 'sgd' on rank 0 and 'adamw' on rank 1"),
    "meta_args": (ARGUMENTS, {"input": torch.zeros(4, 4)}, "of (8, 4)'} on rank 0 and {'input': 'torch.floa"),
    "model": (linear(4), linear(8), "model is Linear with parameters"),
}
DIFFERENT_MODULES = {
    "memory_budget": (-1.0, 1e9, "memory_budget is -1.0 on rank 0 and 1000000000.0 on rank 1"),
    "dataloader_option": ("replicated", "distributed", "dataloader_option is 'replicated' on rank 0 and"),
    "solver_preference": ("dp", "up", "solver_preference='up': choose one of standard, tp, dp"),
    "logical_mesh_shape": ((1, 2), (2, 1), "device_mesh is [[0, 1]] on rank 0 and [[0], [1]] on rank 1"),
    "meta_args": (None, ARGUMENTS, "give meta_args, the arguments of the model's forward by name"),
    "save_solver_solution": (True, True, "the plan cannot be written to '/no/plan.json': No such file"),
}


@on_ranks(2)
def test_two_ranks_with_different_arguments_do_not_wait_for_each_other() -> None:
    for call, values in ((make_plan, DIFFERENT_PLANS), (autoparallelize, DIFFERENT_MODULES)):
        for name, (*of_ranks, said) in values.items():
            given = {"model": linear(), "meta_args": ARGUMENTS, name: of_ranks[gpc.mesh.rank]}
            if name == "save_solver_solution":
                given["solver_solution_path"] = "/no/plan.json"
            with pytest.raises(ValueError, match=re.escape(said)):
                call(given.pop("model"), given.pop("meta_args"), **given)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"physical_devices": 3}, "physical_devices=3: give a list of integers"),
        ({"logical_mesh_shape": 1}, "logical_mesh_shape=1: give a list of integers"),
        ({"logical_mesh_id": [0]}, r"logical_mesh_id=\[0\]: give a tensor, such as torch\.arange\(4\)"),
        ({"alpha_beta_dict": 3}, "alpha_beta_dict=3: give {"),
        ({"alpha_beta_dict": {(0, 1): (1.0,)}}, "give {.*} for pairs of ranks"),
        ({"alpha_beta_dict": {(0, 1): (1.0, float("nan"))}}, "give {.*} for pairs of ranks"),
    ],
)
def test_grids_of_another_type(parts: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        initialize_device_mesh(**parts)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"memory_budget": None}, "memory_budget=None: give bytes above 0, or -1 for any"),
        ({"memory_budget": float("nan")}, "memory_budget=nan: give bytes above 0, or -1 for any"),
        ({"meta_args": None, "data_loader": 3}, "data_loader is a int: give a DataLoader"),
        ({"meta_args": None, "data_loader": [1], "data_process_func": 3}, "data_process_func is a int: give"),
        (
            {"meta_args": None, "data_loader": [1], "data_process_func": str},
            "data_process_func returns a str",
        ),
        ({"data_process_func": dict}, "meta_args are given: leave one of them out"),
        (
            {"save_solver_solution": True, "solver_solution_path": 3},
            "the path of the solution is 3: give a str",
        ),
    ],
)
def test_arguments_of_the_module_of_another_type(parts: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        autoparallelize(linear(), **{"meta_args": ARGUMENTS, **parts})
