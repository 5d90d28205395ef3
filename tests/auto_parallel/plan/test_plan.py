"""Plans as values: files, words, refusals, the plugin and the command."""

import resource
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn

from colossalai.amp import BF16Autocast, FullPrecision, refuse_misfit
from colossalai.auto_parallel import AutoPlan, load_plan, make_plan
from colossalai.auto_parallel._costs import PRECISIONS
from colossalai.auto_parallel._inner import InnerProblem
from colossalai.auto_parallel._make import pose_problem
from colossalai.auto_parallel._search import SearchLimits
from colossalai.auto_parallel._setting import settings_of
from colossalai.auto_parallel.cuts._regions import rules_of_model
from colossalai.auto_parallel.prediction._prediction import Predictor
from colossalai.auto_parallel.trace._live_bytes import live_bytes
from colossalai.auto_parallel.trace._profile_ops import profile_operations
from colossalai.auto_parallel.trace._trace import trace_model
from colossalai.booster.plugin import AutoPlugin
from colossalai.cli._main import main
from colossalai.pipeline import PipelineOptions
from colossalai.shardformer import Rule, check_shards, register_rule
from tests.auto_parallel.plan.models import arguments_of, gpt, mixtral, resnet, slow_machine
from tests.shardformer.models import mixtral_with_lora
from tests.tiers import further

pytestmark = pytest.mark.unit
HOW = {"profile": slow_machine(), "optimizer": "momentum"}


def test_a_file_brings_the_same_plan_back_and_the_plugin_carries_it_out(tmp_path: Path) -> None:
    plan = make_plan(gpt(), arguments_of(gpt, 2), world_size=4, **HOW)
    plan.save(tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == plan
    plugin = AutoPlugin(plan=str(tmp_path / "plan.json"))
    assert plugin.plan(FullPrecision()) == plan.runtime_plan() == AutoPlugin(plan).plan(FullPrecision())
    staged = replace(plan.runtime_plan(), pipeline=PipelineOptions(num_microbatches=4))
    with patch.object(type(plan), "runtime_plan", return_value=staged):
        options = (
            AutoPlugin(plan, batch_dim={"table": None}, loss_reduction="sum").plan(FullPrecision()).pipeline
        )
    assert options == PipelineOptions(num_microbatches=4, batch_dim={"table": None}, loss_reduction="sum")
    with pytest.raises(ValueError, match="loss_reduction is 'total'"):
        AutoPlugin(plan, loss_reduction="total")
    with pytest.raises(ValueError, match="precision is given twice"):
        plugin.plan(BF16Autocast())
    with pytest.raises(ValueError, match="cannot be read"):
        AutoPlugin(plan=tmp_path / "other.json")
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ValueError, match="is not a plan"):
        load_plan(tmp_path / "other.json")


def test_the_same_input_gives_the_same_plan_and_parts_add_up() -> None:
    plans = [make_plan(gpt(), arguments_of(gpt, 8), world_size=4, **HOW) for _ in range(2)]
    assert plans[0] == plans[1]
    figures = plans[0].figures()
    for total, parts in (("step", figures["seconds"]), ("peak", figures["bytes"])):
        assert sum(value for name, value in parts.items() if name != total) == pytest.approx(parts[total])


def test_experts_are_shared_by_the_sizes() -> None:
    pytest.importorskip("transformers")
    given = arguments_of(mixtral, 8)
    alone, plan = (make_plan(mixtral(), given, world_size=size, **HOW) for size in (1, 4))
    experts = [f"model.layers.{number}.mlp.experts" for number in range(2)]
    assert (plan.setting.data, plan.setting.expert) == (4, 4)
    assert [plan.cuts[name] for name in experts] == ["expert"] * 2
    assert [alone.cuts[name] for name in experts] == ["whole"] * 2
    held = [each.modules[experts[0]].bytes for each in (alone, plan)]
    assert held[1] == pytest.approx(held[0] / 4)
    # Of its experts a rank has all states, of what all have ZeRO leaves a quarter.
    assert plan.setting.zero == 1
    assert plan.bytes["optimizer states"] == pytest.approx(alone.bytes["optimizer states"] / 4)
    assert "ep 4" in plan.explain()
    assert "experts: expert" in plan.explain("model.layers.0.mlp")
    assert AutoPlan.from_json(plan.to_json()) == plan
    layout = plan.runtime_plan().layout
    assert layout is not None
    assert (layout.data, layout.expert) == (4, 4)
    with pytest.raises(ValueError, match=r"are experts, whose cut follows .* ep 4"):
        plan.with_choice(experts[0], "whole", model=mixtral(), meta_args=given, profile=slow_machine())


@pytest.mark.long
def test_frozen_experts_with_updates_of_low_rank_are_shared() -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    model, given = mixtral_with_lora(), arguments_of(mixtral, 8)
    free = make_plan(model, given, world_size=4, **HOW)
    assert free.setting.expert == 1  # nothing is saved but memory: they have no gradients to exchange
    plan = make_plan(model, given, world_size=4, memory_budget=0.8 * free.peak_bytes, **HOW)
    assert (plan.setting.data, plan.setting.expert) == (4, 2)
    assert list(plan.cuts.values()).count("expert") == 2


@pytest.mark.parametrize(
    ("world_size", "num_experts", "found"), [(4, 8, {1, 2, 4}), (6, 4, {1, 2}), (4, 1, {1})]
)
def test_ranks_that_share_experts_divide_them(world_size: int, num_experts: int, found: set[int]) -> None:
    sizes = {"batch": 12 * world_size, "num_blocks": 4, "can_pipeline": True, "largest_tensor": 8}
    settings = list(settings_of(world_size, **sizes, num_experts=num_experts))
    assert {each.expert for each in settings} == found
    assert all(each.shape == (each.data, 1, 1) and each.zero <= 1 for each in settings if each.expert > 1)


@cache
def plan_of_one() -> AutoPlan:
    return make_plan(gpt(), arguments_of(gpt, 8), world_size=1, **HOW)


@pytest.mark.parametrize("precision", [p if p in ("fp32", "fp16_naive") else further(p) for p in PRECISIONS])
def test_what_the_runtime_refuses_under_a_precision_is_not_proposed(precision: str) -> None:
    given = arguments_of(gpt, 4)
    problem = pose_problem(gpt(), given, world_size=4, precision=precision, limits=SearchLimits(), **HOW)
    made = replace(plan_of_one(), precision=precision).make_precision()
    try:
        refuse_misfit(made, shards_parameters=True)
        stages = {0, 1, 2, 3}
    except ValueError:
        stages = {0, 1, 2}
    assert {setting.zero for setting in problem.settings} == stages


def test_words_say_the_layout_and_why_a_layer_is_cut() -> None:
    plan = make_plan(gpt(), arguments_of(gpt, 1), world_size=2, **HOW)
    said = plan.explain()
    assert "dp 1, tp 2, pp 1, ZeRO 0" in said
    assert all(len(line) < 80 for line in said.splitlines())
    assert "blocks.0.mlp.expansion: output" in plan.explain("blocks.0.mlp")
    with pytest.raises(ValueError, match=r"no module 'blocks.9'"):
        plan.explain("blocks.9")
    other = make_plan(gpt(), arguments_of(gpt, 8), world_size=2, **HOW)
    assert "layout: dp 1, tp 2, pp 1, ZeRO 0 -> dp 2, tp 1, pp 1, ZeRO 1" in plan.diff(other)
    assert plan.diff(plan) == "no difference"


@pytest.mark.parametrize("build", [gpt, further(resnet)])
def test_the_peak_of_a_plain_step_is_not_below_that_of_its_walk(build: Callable[[], torch.nn.Module]) -> None:
    model, given = build(), arguments_of(build, 8)
    plan = plan_of_one() if build is gpt else make_plan(model, given, world_size=1, **HOW)
    trace = trace_model(model, given)
    expected = live_bytes(trace, profile_operations(trace))
    found = plan.bytes["activations"] + plan.bytes["working memory"]
    assert expected <= found + 1e-6
    assert found <= 1.25 * expected  # of models as small as these; of larger ones it is equal


def test_half_of_the_bytes_of_activations_are_half_of_what_predictions_leave_out() -> None:
    """The walk, which is what the rest is known from, counts tensors in the model's own types."""
    in_half = make_plan(gpt(), arguments_of(gpt, 8), world_size=1, precision="bf16_master", **HOW)
    plans = [plan_of_one(), in_half]
    whole, half = (plan.bytes["activations"] + plan.bytes["working memory"] for plan in plans)
    assert 0.4 * whole < half < 0.65 * whole


@pytest.mark.parametrize(
    ("world_size", "budget"), [(2, None), further(4, None), further(2, 0.7), further(4, 0.45)]
)
def test_equal_blocks_are_computed_once(
    world_size: int, budget: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = partial(make_plan, gpt(), arguments_of(gpt, 8), world_size=world_size, **HOW)
    if budget is not None:
        plan = partial(plan, memory_budget=budget * plan().peak_bytes)
    found = plan()
    monkeypatch.setattr(InnerProblem, "kind_of_block", lambda *_: None)
    each = plan()
    assert found.setting == each.setting
    assert found.cuts == each.cuts
    assert found.seconds == pytest.approx(each.seconds)
    assert found.bytes == pytest.approx(each.bytes)


def test_no_setting_is_faster_than_its_least_seconds() -> None:
    how = {"precision": "fp32", "limits": SearchLimits(), **HOW}
    problem = pose_problem(gpt(), arguments_of(gpt, 8), world_size=4, **how)
    for setting in problem.settings:
        inner = problem.search.problem_of(setting)
        choice = inner.solve(budget=None, keeps_activations=True, time_limit=10.0, gap=1e-3)
        predictor = Predictor(inner, choice, problem.parts)
        assert predictor.least_seconds <= predictor.predict().step_seconds * (1 + 1e-9), setting


def test_layers_that_a_class_may_have_are_left_out_of_its_rule_by_name() -> None:
    """An attention of GPT-2 has `q_attn` if it attends to another text only."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=16, n_positions=8)
    model = transformers.GPT2LMHeadModel(config)
    rules = {name: rule for name, rule in rules_of_model(model).items() if name.endswith("attn")}
    assert {name: rule.columns for name, rule in rules.items()} == {"transformer.h.0.attn": ("c_attn",)}
    assert [name for name, _, _ in check_shards(model, 2, rules)] == list(rules)


class Normed(nn.Module):
    """A block whose rule leaves out a norm between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Return what the layers make of `x`, (batch, 8)."""
        return self.down(self.norm(self.up(x)))


def test_a_module_that_tensor_parallelism_refuses_has_a_plan_in_which_its_rule_is_not() -> None:
    rule = Rule(columns=("up",), rows=("down",))
    register_rule(Normed, rule)  # stays, and nobody else is called so
    model = nn.Sequential(Normed())
    plan = make_plan(model, {"input": torch.zeros(1, 8)}, world_size=2, profile=slow_machine())
    assert rule not in plan.rules.values()
    check_shards(model, 2, plan.rules)


def test_ranks_are_there_to_share() -> None:
    """On the machine as it is, no sharing of so small a model pays: all on each rank would be fastest."""
    plan = make_plan(gpt(), arguments_of(gpt, 8), world_size=2)
    assert plan.setting.data == 2
    assert make_plan(gpt(), arguments_of(gpt, 1), world_size=2).setting.tensor == 2


@pytest.mark.parametrize(("world_size", "shares"), [(2, (0.4, 0.7)), further(4, (0.4, 0.5, 0.7, 0.9))])
def test_a_budget_is_kept_and_more_of_it_never_takes_longer(
    world_size: int, shares: tuple[float, ...]
) -> None:
    free = make_plan(gpt(), arguments_of(gpt, 8), world_size=world_size, **HOW)
    seconds = []
    for share in shares:
        budget = share * free.peak_bytes
        plan = make_plan(gpt(), arguments_of(gpt, 8), world_size=world_size, memory_budget=budget, **HOW)
        assert plan.peak_bytes <= budget
        seconds.append(plan.step_seconds)
    assert seconds == sorted(seconds, reverse=True)


@pytest.mark.long
@pytest.mark.parametrize("world_size", [2, 4])
def test_the_smallest_budget_that_is_named_works(world_size: int) -> None:
    """On one rank `test_refusals.py` looks at it."""
    with pytest.raises(ValueError, match="smallest budget that was found to work is") as refused:
        make_plan(gpt(), arguments_of(gpt, 8), world_size=world_size, memory_budget=1000, **HOW)
    least = int(str(refused.value).rpartition(" ")[2].replace(",", ""))
    assert make_plan(gpt(), arguments_of(gpt, 8), world_size=world_size, memory_budget=least, **HOW)


def test_a_model_without_blocks_or_layers_to_cut_has_a_smallest_budget() -> None:
    model = torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.GELU())
    with pytest.raises(ValueError, match=r"smallest budget that was found to work is [\d,]+$"):
        make_plan(model, {"input": torch.zeros(4, 8)}, world_size=1, memory_budget=10, **HOW)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"world_size": 0}, "world_size=0"),
        ({"world_size": "2"}, "world_size='2'"),
        ({"memory_budget": "1GB"}, "memory_budget='1GB': give bytes above 0"),
        ({"optimizer": "adamx"}, "optimizer='adamx'"),
        ({"precision": "fp7"}, "precision='fp7'"),
        ({"memory_budget": -1}, "memory_budget=-1"),
        further({"world_size": 131}, "cannot be shared by 131 ranks"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make_plan(gpt(), arguments_of(gpt, 8), **{"world_size": 2, **HOW, **options})  # type: ignore[arg-type]


def test_models_with_batch_norms_take_statistics_of_the_whole_batch() -> None:
    plan = make_plan(resnet(), arguments_of(resnet, 8), world_size=2, **HOW)
    assert plan.setting.data == 2
    assert plan.runtime_plan().sync_batch_norm


def make_model() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    return gpt(), arguments_of(gpt, 8)


def test_the_command_writes_and_compares_plans(tmp_path: Path) -> None:
    path = str(tmp_path / "plan.json")
    own = f"{__name__}:make_model"
    made = CliRunner().invoke(main, ["plan", own, "--world-size", "4", "--budget", "1GB", "--output", path])
    assert made.exit_code == 0, made.output
    assert "a budget of 1.00 GB a rank" in made.output
    assert isinstance(load_plan(path), AutoPlan)
    assert "no difference" in CliRunner().invoke(main, ["plan", "--diff", path, path]).output
    for wrong in (["plan", own], ["plan", "gpt9", "--world-size", "2"], ["plan", f"{__name__}:none"]):
        refused = CliRunner().invoke(main, wrong)
        assert refused.exit_code == 2
        assert "Error: " in refused.output


@pytest.mark.long
def test_gpt3_is_planned_for_a_thousand_ranks_without_its_memory(tmp_path: Path) -> None:
    """How long that takes is measured by benchmarks/auto_solve.py."""
    path = tmp_path / "plan.json"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    words = ["plan", "gpt3", "--world-size", "1024", "--batch", "1536", "--profile", "a100-80gb"]
    options = ["--precision", "bf16_master", "--budget", "80GB", "--output", str(path)]
    made = CliRunner().invoke(main, [*words, *options])
    assert made.exit_code == 0, made.output
    plan = load_plan(path)
    assert plan.setting.world_size == 1024
    assert plan.peak_bytes <= 80e9
    assert path.stat().st_size < 200_000
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert kilobytes < 4e6, "the weights alone take 350 GB"
