"""A plan in a config: `initialize` trains by it as Booster and one process do; others are refused."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import colossalai
from colossalai.auto_parallel import load_plan
from colossalai.booster import Booster
from colossalai.booster.plugin import AutoPlugin
from colossalai.context import Config, ConfigException
from colossalai.context._features import check_config
from colossalai.core import global_context as gpc
from colossalai.engine.schedule import PipelineSchedule
from colossalai.model_zoo.gpt import GPT, GPTConfig
from colossalai.runtime import Plan, parameter_shapes, refuse_other_model
from tests.auto_parallel.plan.models import (
    LENGTH,
    SIZES,
    VOCAB,
    gpt,
    resnet,
)
from tests.auto_parallel.plan.test_plan_parity import FAST, SLOW, plan_of, run_of
from tests.parity.tasks import rebuilt
from tests.parity.training import check_runs
from tests.ranks import run_ranks
from tests.shardformer.by_plan import sgd
from tests.tiers import further


def save_plan(
    folder: Path, build: Callable[[], nn.Module], batch: int, *, links: float = FAST, world_size: int = 2
) -> str:
    plan = plan_of(build, batch, world_size, None, links)
    plan.save(folder / "plan.json")
    return str(folder / "plan.json")


def built(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(1024)
    return build().double()


@pytest.mark.dist
@pytest.mark.parametrize(
    ("build", "batch", "links", "expected"),
    [
        further(gpt, 1, FAST, "tp 2"),
        further(gpt, 8, FAST, "ZeRO 1"),
        (gpt, 8, SLOW, "pp 2"),
        further(resnet, 1, FAST, "tp 2"),
        further(resnet, 8, FAST, "dp 2"),
    ],
)
def test_three_steps_by_config_by_booster_and_alone(
    build: Callable[[], nn.Module], batch: int, links: float, expected: str, tmp_path: Path
) -> None:
    path = save_plan(tmp_path, build, batch, links=links)
    plan = load_plan(path)
    assert expected in str(plan.setting)
    run = run_of(plan, build, batch)
    task = replace(run.task, place=rebuilt(build), tolerance=1e-12)
    both_doors = replace(run, task=task, config={"auto": {"plan": path}}, plugin=partial(AutoPlugin, path))
    check_runs(2, [(both_doors,)])


def refusal(config: Mapping[str, Any]) -> str:
    with pytest.raises(ConfigException) as found:
        colossalai.launch_from_torch(config, verbose=False)
    assert not gpc.is_launched
    assert not torch.distributed.is_initialized()
    return str(found.value)


def refusals_of_rank(path: str, larger: str) -> None:
    remedy = "start 4 processes, or make a plan for 2 by make_plan"
    for_four = rf"the plan is for 4 ranks \(dp .*and the job has 2: {remedy}"
    assert re.search(for_four, refusal({"auto": {"plan": larger}}))
    assert "auto.plan: the plan 'nowhere.json' cannot be read" in refusal({"auto": {"plan": "nowhere.json"}})
    said = "the config has both auto and fp16: the plan determines the precision"
    assert said in refusal({"auto": {"plan": path}, "fp16": {"mode": "bf16"}})
    colossalai.launch_from_torch({"auto": {"plan": load_plan(path)}}, verbose=False)
    with pytest.raises(ConfigException, match=for_four):
        Booster(plugin=AutoPlugin(plan=larger))


@pytest.mark.dist
def test_what_does_not_fit_is_refused_before_ranks_meet(tmp_path: Path) -> None:
    (tmp_path / "four").mkdir()
    path = save_plan(tmp_path, gpt, 1)
    larger = save_plan(tmp_path / "four", gpt, 8, world_size=4)
    run_ranks(refusals_of_rank, 2, path, larger)


def deeper() -> nn.Module:
    return GPT(GPTConfig(vocab_size=VOCAB, max_position_embeddings=LENGTH, **{**SIZES, "num_layers": 5}))


def wider() -> nn.Module:
    return GPT(GPTConfig(vocab_size=VOCAB + 1, max_position_embeddings=LENGTH, **SIZES))


def refused_models(path: str) -> dict[str, list[str]]:
    """Return what each door says of models that the plan was not made for; they stay as they were."""
    found: dict[str, list[str]] = {}

    def refuse(build: Callable[[], nn.Module], train: Callable[[nn.Module, Optimizer], Any]) -> None:
        model = built(build)
        optimizer, before = sgd(model.parameters()), dict(model.named_parameters())
        values = {name: param.clone() for name, param in before.items()}
        with pytest.raises(ValueError) as refused:  # noqa: PT011 - the sentence is compared by the test
            train(model, optimizer)
        after = dict(model.named_parameters())
        assert all(after[name] is param for name, param in before.items())
        torch.testing.assert_close(after, values, rtol=0, atol=0)
        assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
        assert type(optimizer) is torch.optim.SGD
        found.setdefault(build.__name__, []).append(str(refused.value))

    for build in (deeper, wider, resnet):
        colossalai.launch_from_torch({"auto": {"plan": path}}, verbose=False)
        refuse(build, lambda model, optimizer: colossalai.initialize(model, optimizer, verbose=False))
        gpc.destroy()
        colossalai.launch_from_torch({}, verbose=False)
        refuse(build, Booster(plugin=AutoPlugin(path)).boost)
        gpc.destroy()
    return found


@pytest.mark.dist
@pytest.mark.parametrize("batch", [8, further(1)])
def test_another_model_is_refused_by_both_doors_before_anything_is_changed(
    batch: int, tmp_path: Path
) -> None:
    """Of a plan for replicas, too, which cuts nothing by name."""
    found, other = run_ranks(refused_models, 2, save_plan(tmp_path, gpt, batch))
    assert found == other
    assert all(len(set(said)) == 1 for said in found.values())
    of = {name: said[0] for name, said in found.items()}
    assert (
        "this GPT is not the model that the plan was made for: blocks.4.attention_norm.weight is (16,)"
        in of["deeper"]
    )
    assert "and not there in the plan" in of["deeper"]
    assert "embedding.tokens.weight is (25, 16), and (24, 16) in the plan; head.weight is" in of["wider"]
    assert "embedding.tokens.weight is not there, and (24, 16) in the plan" in of["resnet"]
    assert " more: make a plan for it, by make_plan or colossalai plan" in of["resnet"]


@pytest.mark.unit
def test_a_part_of_the_model_has_some_of_its_names() -> None:
    shapes = parameter_shapes(gpt())
    refuse_other_model(shapes, gpt())
    refuse_other_model(shapes, nn.ModuleDict({"blocks": gpt().blocks}), is_part=True)
    with pytest.raises(ValueError, match=r"embedding\.tokens\.weight is not there"):
        refuse_other_model(shapes, nn.ModuleDict({"blocks": gpt().blocks}))
    with pytest.raises(
        ValueError, match=r"blocks\.4\.attention_norm\.weight is .* and not there in the plan"
    ):
        refuse_other_model(shapes, nn.ModuleDict({"blocks": deeper().blocks}), is_part=True)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"auto": {"plan": "p", "parallel": 2}}, r"auto has no key 'parallel'.* its keys are \['plan'\]"),
        ({"auto": {"plam": "p"}}, "auto has no key 'plam': did you mean 'plan'"),
        ({"auto": {}}, "auto has no plan: write auto=dict"),
        ({"auto": "plan.json"}, r"auto is a str; it must be a dict: auto=dict\(plan"),
        *(
            ({"auto": {"plan": "p"}, key: value}, f"the config has both auto and {key}: the plan determines ")
            for key, value in {
                "parallel": {"pipeline": 2},
                "zero": {"stage": 1},
                "gemini": {},
                "recompute": False,
                "NUM_MICRO_BATCHES": 2,
                "gradient_handler": [{"type": "X"}],
            }.items()
        ),
    ],
)
def test_a_wrong_auto_is_refused_by_name(config: Mapping[str, Any], said: str) -> None:
    with pytest.raises(ConfigException, match=said):
        check_config(Config(config), 2)


@pytest.mark.unit
def test_features_that_a_plan_leaves_open_are_added_to_it(tmp_path: Path) -> None:
    plan = load_plan(save_plan(tmp_path, gpt, 8))
    config = Config(auto={"plan": plan}, gradient_accumulation=2, clip_grad_norm=0.5)
    check_config(config, 2)
    found = Plan.from_config(config, auto=plan.runtime_plan())
    assert (found.accumulation_steps, found.clip_grad_norm) == (2, 0.5)
    assert found.data == plan.runtime_plan().data
    options = PipelineSchedule(num_microbatches=2).options
    with pytest.raises(ConfigException, match="both determine the run of a pipeline"):
        Plan.from_config(config, pipeline=options, auto=plan.runtime_plan())
