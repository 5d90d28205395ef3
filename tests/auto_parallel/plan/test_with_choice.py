"""Plans in which one layer is cut in another way: figures, neighbours, parity, refusals."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from torch import Tensor, nn

from colossalai.auto_parallel import AutoPlan, make_plan
from tests.auto_parallel.plan.models import arguments_in_double, arguments_of, gpt, resnet, slow_machine
from tests.auto_parallel.plan.test_plan_parity import FAST, plan_of, run_of
from tests.parity.training import check_runs
from tests.tiers import further

HOW = {"profile": slow_machine(), "optimizer": "momentum"}
EXPANSION, PROJECTION = "blocks.0.mlp.expansion", "blocks.0.mlp.projection"


@cache
def planned() -> tuple[AutoPlan, nn.Module, dict[str, Tensor]]:
    """Return a plan of two tensor-parallel ranks, and what it takes to change it."""
    model, given = gpt(), arguments_of(gpt, 1)
    plan = make_plan(model, given, world_size=2, **HOW)
    assert plan.setting.tensor == 2
    return plan, model, given


def changes(plan: AutoPlan, other: AutoPlan) -> dict[str, str]:
    return {name: cut for name, cut in other.cuts.items() if plan.cuts[name] != cut}


@pytest.mark.unit
def test_figures_are_those_of_the_changed_plan() -> None:
    plan, model, given = planned()
    assert (plan.cuts[EXPANSION], plan.cuts[PROJECTION]) == ("output", "input")
    how = {"model": model, "meta_args": given, "profile": slow_machine()}
    whole = plan.with_choice("embedding.positions", "whole", **how)
    assert changes(plan, whole) == {"embedding.positions": "whole"}
    # Nothing else has to change, so explain has said what the step would take.
    expected = plan.modules["embedding.positions"].others["whole"]
    assert whole.step_seconds == pytest.approx(expected, rel=1e-3)
    assert whole.step_seconds > plan.step_seconds
    assert whole.peak_bytes > plan.peak_bytes
    before, after = (each.modules["embedding.positions"].bytes for each in (plan, whole))
    assert after == pytest.approx(2 * before)
    least = plan.step_seconds * (1 - plan.gap)
    assert whole.step_seconds * (1 - whole.gap) == pytest.approx(least)
    assert whole.setting == plan.setting
    assert "embedding.positions: vocab -> whole" in plan.diff(whole)
    back = whole.with_choice("embedding.positions", "vocab", **how)
    assert replace(back, gap=plan.gap) == plan
    assert plan.with_choice("embedding.positions", "vocab", **how) is plan
    tight = replace(plan, memory_budget=plan.peak_bytes)
    with pytest.raises(ValueError, match=rf"a rank needs [\d,]+ bytes, .* budget of {plan.peak_bytes:,.0f}"):
        tight.with_choice("blocks.0.attention", "whole", **how)


@pytest.mark.unit
def test_neighbours_change_where_they_must_and_no_others() -> None:
    plan, model, given = planned()
    how = {"model": model, "meta_args": given, "profile": slow_machine()}
    changed = plan.with_choice(EXPANSION, "whole", **how)
    # Its ranks have parts of the features no longer: the next layer takes its part of them itself.
    assert changes(plan, changed) == {EXPANSION: "whole"}
    before, after = (each.rules["blocks.0.mlp"] for each in (plan, changed))
    assert (before.columns, before.rows) == (("expansion",), ("projection",))
    assert (after.columns, after.splits) == ((), ("projection",))
    # Layers with one rule, and layers with one parameter, change together.
    attention = dict.fromkeys(("blocks.1.attention.qkv", "blocks.1.attention.projection"), "whole")
    assert changes(plan, plan.with_choice("blocks.1.attention", "whole", **how)) == attention
    tied = plan.with_choice("head", "whole", **how)
    assert changes(plan, tied) == {"head": "whole", "embedding.tokens": "whole"}


@pytest.mark.long
@pytest.mark.unit
def test_layers_of_one_rule_change_by_each_of_their_names_and_earlier_choices_stay() -> None:
    plan, model, given = planned()
    how = {"model": model, "meta_args": given, "profile": slow_machine()}
    # Though it is not the fastest.
    twice = plan.with_choice("embedding.positions", "whole", **how).with_choice(EXPANSION, "whole", **how)
    assert changes(plan, twice) == {"embedding.positions": "whole", EXPANSION: "whole"}
    attention = dict.fromkeys(("blocks.1.attention.qkv", "blocks.1.attention.projection"), "whole")
    for name in attention:
        assert changes(plan, plan.with_choice(name, "whole", **how)) == attention


@pytest.mark.long
@pytest.mark.unit
def test_what_is_recomputed_and_the_other_sizes_stay() -> None:
    model, given = gpt().double(), arguments_of(gpt, 8)
    plan = plan_of(gpt, 8, 4, 0.4, FAST)
    assert plan.setting.pipeline == plan.setting.tensor == 2
    how = {"model": model, "meta_args": given, "profile": slow_machine(link_bytes_per_s=FAST)}
    loose = replace(plan, memory_budget=None)
    changed = loose.with_choice(EXPANSION, "input", **how)
    assert changed.setting == plan.setting
    assert changed.segments == plan.segments
    assert (changed.second, changed.second_seconds) == (plan.second, plan.second_seconds)
    tight = replace(plan, memory_budget=plan.peak_bytes)
    with pytest.raises(ValueError, match=rf"a rank needs [\d,]+ bytes, .* budget of {plan.peak_bytes:,.0f}"):
        tight.with_choice("blocks.0.attention", "whole", **how)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("name", "cut", "options", "said"),
    [
        (EXPANSION, "rows", {}, "cut='rows': choose one of whole, output, input, vocab, channel, expert"),
        further(EXPANSION, "vocab", {}, f"cut='vocab': '{EXPANSION}' .* choose one of whole, output, input$"),
        further("blocks.0.attention.qkv", "input", {}, "choose one of whole, output$"),
        further(
            "head", "expert", {}, "cut='expert': 'head' cannot be cut so, choose one of whole, output, input$"
        ),
        ("blocks.0.mlp", "whole", {}, f"'blocks.0.mlp' has several layers: choose one of '{EXPANSION}', "),
        ("blocks.0.mlp.expansoin", "whole", {}, f"no layer .* could be cut: it has '{EXPANSION}'"),
        further("blocks.9", "whole", {}, "no layer 'blocks.9' that could be cut: it has "),
        (EXPANSION, "whole", {"model": None}, "does not hold the model, .*give model=... and meta_args=..."),
        further(EXPANSION, "whole", {"meta_args": None}, "give model=... and meta_args=..."),
        (
            EXPANSION,
            "whole",
            {"meta_args": arguments_of(gpt, 2)},
            "made for another trace: of GPT, for a batch",
        ),
        further(EXPANSION, "whole", {"model": gpt().eval()}, "made for another trace"),
        (EXPANSION, "whole", {"profile": None}, "by the profile 'slow', which is not shipped: give it by"),
        further(EXPANSION, "whole", {"profile": "h100"}, "by the profile 'slow', and this is 'h100'"),
    ],
)
def test_what_cannot_be_chosen_is_refused_by_name(
    name: str, cut: str, options: dict[str, Any], said: str
) -> None:
    plan, model, given = planned()
    how = {"model": model, "meta_args": given, "profile": slow_machine(), **options}
    with pytest.raises(ValueError, match=said):
        plan.with_choice(name, cut, **how)


@pytest.mark.unit
def test_a_plan_without_tensor_parallel_ranks_has_nothing_to_choose() -> None:
    plan = make_plan(gpt(), arguments_of(gpt, 8), world_size=2, **HOW)
    with pytest.raises(ValueError, match=r"the plan has tp 1 \(dp 2, .* so no layer is cut"):
        plan.with_choice(EXPANSION, "output", model=gpt(), meta_args=arguments_of(gpt, 8))


@pytest.mark.dist
@pytest.mark.parametrize(
    ("build", "batch", "num_ranks", "share", "name", "cut"),
    [
        further(gpt, 1, 2, None, EXPANSION, "whole"),
        further(gpt, 1, 2, None, PROJECTION, "output"),
        further(gpt, 1, 2, None, "head", "whole"),
        further(gpt, 1, 2, None, "blocks.1.attention.qkv", "whole"),
        (resnet, 1, 2, None, "blocks.0.conv1", "output"),
        further(resnet, 1, 2, None, "stem.1", "whole"),
        further(resnet, 1, 2, None, "blocks.0.conv2", "whole"),
        further(gpt, 8, 4, 0.4, EXPANSION, "input"),
    ],
)
def test_a_changed_plan_trains_as_one_process_does(
    build: Callable[[], nn.Module], batch: int, num_ranks: int, share: float | None, name: str, cut: str
) -> None:
    plan = plan_of(build, batch, num_ranks, share, FAST)
    model, given = build().double(), arguments_in_double(build, batch)
    loose = replace(plan, memory_budget=None)
    changed = loose.with_choice(
        name, cut, model=model, meta_args=given, profile=slow_machine(link_bytes_per_s=FAST)
    )
    assert plan.cuts[name] != changed.cuts[name] == cut
    check_runs(num_ranks, [(run_of(changed, build, batch),)])
