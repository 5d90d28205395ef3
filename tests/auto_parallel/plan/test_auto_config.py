"""A plan in a config: `initialize` trains by it as Booster and one process do; others are refused."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import colossalai
from colossalai.auto_parallel import load_plan, make_plan
from colossalai.booster import Booster
from colossalai.booster.plugin import AutoPlugin
from colossalai.context import Config, ConfigException
from colossalai.context._features import check_config
from colossalai.core import global_context as gpc
from colossalai.engine.schedule import PipelineSchedule
from colossalai.model_zoo.gpt import GPT, GPTConfig
from colossalai.runtime import ModelWrapper, Plan, parameter_shapes, refuse_other_model
from tests.auto_parallel.plan.models import (
    LENGTH,
    LOSSES,
    SIZES,
    VOCAB,
    arguments_of,
    batches_of,
    gpt,
    resnet,
    slow_machine,
)
from tests.parity.training import whole
from tests.ranks import run_ranks
from tests.shardformer.by_plan import sgd
from tests.tiers import further

FAST, SLOW = 1e9, 1e5  # bytes a second of links; with slow ones gradients are not worth sending
Trained = tuple[list[Tensor], dict[str, Tensor]]


def save_plan(
    folder: Path, build: Callable[[], nn.Module], batch: int, *, links: float = FAST, world_size: int = 2
) -> str:
    given = {
        name: value.double() if value.is_floating_point() else value
        for name, value in arguments_of(build, batch).items()
    }
    plan = make_plan(
        build().double(),
        given,
        world_size=world_size,
        optimizer="momentum",
        profile=slow_machine(link_bytes_per_s=links),
    )
    plan.save(folder / "plan.json")
    return str(folder / "plan.json")


def built(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(1024)
    return build().double()


def batches(build: Callable[[], nn.Module], batch: int) -> list[tuple[Tensor, Tensor]]:
    found = batches_of(build, batch)
    return [(x.double() if x.is_floating_point() else x, y) for x, y in found]


def own_part(each: Tensor) -> Tensor:
    """Return what this replica sees of a batch."""
    return each.chunk(gpc.mesh.axis_size("dp"))[gpc.mesh.axis_rank("dp")]


def trained(
    build: Callable[[], nn.Module], batch: int, model: ModelWrapper, step: Callable[..., Tensor]
) -> Trained:
    losses = [step(own_part(x), own_part(y)).detach() for x, y in batches(build, batch)]
    params = {name: whole(param, param).detach() for name, param in model.unwrap().named_parameters()}
    mean = torch.stack(losses)
    torch.distributed.all_reduce(mean, group=gpc.mesh.group("dp"))
    mean /= gpc.mesh.axis_size("dp")
    gpc.destroy()
    return [*mean], params


def by_config(build: Callable[[], nn.Module], batch: int, path: str) -> Trained:
    """The model is built after the launch, which has laid the mesh out, as scripts with a config do it."""
    colossalai.launch_from_torch({"auto": {"plan": path}}, verbose=False)
    assert gpc.mesh.world_size == load_plan(path).world_size
    model = built(build)
    engine, _, _, _ = colossalai.initialize(model, sgd(model.parameters()), LOSSES[build], verbose=False)

    def step(x: Tensor, y: Tensor) -> Tensor:
        engine.zero_grad()
        _, _, loss = engine.execute_schedule(iter([(x, y)]), return_loss=True)
        engine.step()
        return loss

    return trained(build, batch, engine.model, step)


def by_booster(build: Callable[[], nn.Module], batch: int, path: str) -> Trained:
    colossalai.launch_from_torch({}, verbose=False)
    booster = Booster(plugin=AutoPlugin(plan=path))
    model = built(build)  # after the mesh was laid out, here too
    model, optimizer, criterion, _, _ = booster.boost(model, sgd(model.parameters()), LOSSES[build])

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        if gpc.mesh.axis_size("pp") > 1:
            loss = booster.execute_pipeline(iter([(x, y)]), model, criterion, optimizer)["loss"]
        else:
            loss = criterion(model(x), y)
            booster.backward(loss, optimizer)
        optimizer.step()
        return loss

    return trained(build, batch, model, step)


def by_one_process(build: Callable[[], nn.Module], batch: int) -> Trained:
    model = built(build)
    optimizer, losses = sgd(model.parameters()), []
    for x, y in batches(build, batch):
        optimizer.zero_grad()
        loss = LOSSES[build](model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses, dict(model.named_parameters(remove_duplicate=False))  # a stage knows one of the names


def train_three_ways(build: Callable[[], nn.Module], batch: int, path: str) -> str:
    expected_losses, expected = by_one_process(build, batch)
    for door in (by_config, by_booster):
        losses, params = door(build, batch, path)
        torch.testing.assert_close(losses, expected_losses, rtol=0, atol=1e-12)
        assert params
        for name, param in params.items():
            torch.testing.assert_close(param, expected[name], rtol=0, atol=1e-12, msg=f"{door}: {name}")
    return str(load_plan(path).setting)


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
    for setting in run_ranks(train_three_ways, 2, build, batch, path):
        assert expected in setting


def refusal(config: Mapping[str, Any]) -> str:
    with pytest.raises(ConfigException) as found:
        colossalai.launch_from_torch(config, verbose=False)
    assert not gpc.is_launched
    assert not torch.distributed.is_initialized()
    return str(found.value)


def refusals_of_rank(path: str, larger: str) -> dict[str, str]:
    found = {
        "world size": refusal({"auto": {"plan": larger}}),
        "file": refusal({"auto": {"plan": "nowhere.json"}}),
        "fp16": refusal({"auto": {"plan": path}, "fp16": {"mode": "bf16"}}),
    }
    colossalai.launch_from_torch({"auto": {"plan": load_plan(path)}}, verbose=False)
    with pytest.raises(ConfigException) as refused:
        Booster(plugin=AutoPlugin(plan=larger))
    found["world size at Booster"] = str(refused.value)
    gpc.destroy()
    return found


@pytest.mark.dist
def test_what_does_not_fit_is_refused_before_ranks_meet(tmp_path: Path) -> None:
    (tmp_path / "four").mkdir()
    path = save_plan(tmp_path, gpt, 1)
    larger = save_plan(tmp_path / "four", gpt, 8, world_size=4)
    found, other = run_ranks(refusals_of_rank, 2, path, larger)
    assert found == other
    for said in (found["world size"], found["world size at Booster"]):
        assert "the plan is for 4 ranks (dp " in said
        assert "and the job has 2: start 4 processes, or make a plan for 2 by make_plan" in said
    assert "auto.plan: the plan 'nowhere.json' cannot be read" in found["file"]
    assert "the config has both auto and fp16: the plan determines the precision" in found["fp16"]


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
