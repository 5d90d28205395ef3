"""Produced plans train as one process does: losses, every gradient, every parameter, buffers."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import cache, partial

import pytest
from torch import nn

from colossalai.auto_parallel import AutoPlan, make_plan
from colossalai.auto_parallel.solver._choice import BudgetError
from colossalai.booster.plugin import AutoPlugin
from colossalai.shardformer import check_shards
from tests.auto_parallel.plan.models import (
    LOSSES,
    arguments_in_double,
    batches_of,
    bert,
    bert_of_transformers,
    gpt,
    gpt2,
    gpt_of_a_frozen_half,
    llama,
    mixtral,
    resnet,
    slow_machine,
    vit,
)
from tests.parity.training import Run, check_runs
from tests.shardformer.by_plan import run_by_plan
from tests.shardformer.models import InDouble
from tests.tiers import further, in_soak, of_soak

pytestmark = pytest.mark.dist


FAST, SLOW = 1e9, 1e5  # bytes a second of links; with slow ones gradients are not worth sending


@cache
def plan_of(
    build: Callable[[], nn.Module], batch: int, world_size: int, share: float | None, links: float
) -> AutoPlan:
    """Return a plan without a budget, or with a part of the bytes that one without it takes."""
    model, given = build().double(), arguments_in_double(build, batch)
    how = {"world_size": world_size, "optimizer": "momentum", "profile": slow_machine(link_bytes_per_s=links)}
    free = make_plan(model, given, **how)
    return free if share is None else make_plan(model, given, memory_budget=share * free.peak_bytes, **how)


def run_of(plan: AutoPlan, build: Callable[[], nn.Module], batch: int) -> Run:
    """Return a run by a plan, whose cuts are looked at."""
    model = build()
    cut = {
        f"{name}.{key}".strip(".")
        for name, _, rule in check_shards(model, plan.setting.tensor, plan.rules)
        for field in ("columns", "rows", "heads", "splits", "embeddings", "feature_embeddings")
        for key in getattr(rule, field)
    }
    cut |= {name for name, kind in plan.cuts.items() if kind == "expert"}
    matrices = [name for name, param in model.named_parameters(remove_duplicate=False) if param.dim() > 1]
    names = {name.rpartition(".")[0] for name in matrices}  # a stage knows one of the names of a tied one
    runtime = plan.runtime_plan()
    return run_by_plan(
        build,
        runtime,
        *(f"{name}." for name in sorted(names - cut)),
        criterion=LOSSES[build],
        batches=partial(batches_of, build, batch),
        context=InDouble if build is mixtral and not runtime.recompute else ExitStack,
        plugin=partial(AutoPlugin, plan),
        num_ranks=plan.setting.world_size,
    )


@pytest.mark.parametrize(
    ("build", "batch", "num_ranks", "share", "links", "expected"),
    [
        (gpt, 8, 1, 0.7, FAST, "recomputed"),
        further(gpt, 8, 2, None, FAST, "dp 2, ZeRO 1"),
        further(gpt, 8, 4, 0.6, FAST, "dp 2, tp 2, ZeRO 3, output, input, vocab, recomputed"),
        in_soak(gpt, 8, 4, 0.4, FAST, "tp 2, pp 2, output, input, vocab"),  # as of GPT-2 below
        further(gpt, 8, 2, None, SLOW, "pp 2"),
        further(gpt, 8, 4, None, SLOW, "pp 4"),
        further(gpt_of_a_frozen_half, 8, 2, None, SLOW, "pp 2"),
        further(gpt_of_a_frozen_half, 8, 2, 0.8, FAST, "tp 2, output, input, vocab"),
        further(gpt_of_a_frozen_half, 8, 2, None, FAST, "dp 2"),
        further(gpt2, 8, 2, 0.7, SLOW, "pp 2, recomputed"),
        further(gpt, 1, 2, None, FAST, "tp 2, output, input, vocab"),
        further(gpt, 2, 4, None, FAST, "dp 2, tp 2, output, input, vocab"),
        further(bert, 1, 2, None, FAST, "tp 2, output, input"),
        further(bert_of_transformers, 1, 2, None, FAST, "tp 2, output, input"),
        further(vit, 2, 4, None, FAST, "dp 2, tp 2, output, input"),
        further(resnet, 8, 2, None, FAST, "dp 2"),
        (resnet, 1, 2, None, FAST, "tp 2, output, channel"),
        further(resnet, 2, 4, None, FAST, "dp 2, tp 2, channel"),
        in_soak(gpt2, 8, 4, 0.6, FAST, "recomputed"),
        in_soak(gpt2, 1, 2, None, FAST, "tp 2, output, input, vocab"),
        further(gpt2, 8, 4, 0.45, FAST, "tp 2, pp 2, output, input, vocab"),
        (mixtral, 8, 2, None, FAST, "dp 2, ZeRO 1, ep 2, expert"),
        further(mixtral, 8, 4, None, FAST, "dp 4, ep 4, expert"),
        further(mixtral, 8, 4, 0.95, FAST, "dp 4, expert, recomputed"),
        in_soak(llama, 1, 2, None, FAST, "tp 2, output, input"),
        further(llama, 2, 4, None, FAST, "dp 2, tp 2, output, input"),
    ],
)
def test_three_steps(build, batch, num_ranks, share, links, expected):
    if build in (bert_of_transformers, gpt2, llama, mixtral):
        pytest.importorskip("transformers")
    # One of the ranks would make it, and take as long as here; `test_same_plan.py` compares.
    plan = plan_of(build, batch, num_ranks, share, links)
    said = [*str(plan.setting).split(", "), *plan.cuts.values(), *(["recomputed"] if plan.segments else [])]
    assert set(expected.split(", ")) <= set(said), said
    check_runs(num_ranks, [(run_of(plan, build, batch),)])


def smallest_share(build: Callable[[], nn.Module], batch: int, world_size: int, links: float) -> float:
    """Return the smallest budget that a plan was found for, as a part of what is taken without one."""
    try:
        plan_of(build, batch, world_size, 1e-9, links)
    except BudgetError as error:
        free = plan_of(build, batch, world_size, None, links)
        return error.least_bytes / free.peak_bytes
    raise AssertionError("a budget of a byte was kept")


@of_soak
@pytest.mark.parametrize("links", [FAST, SLOW])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("build", [gpt, bert, vit, resnet, gpt2, llama])
def test_three_budgets(build, num_ranks, links):
    """What the issue of Colossal-Auto promises: every model, at a large, a middle and the smallest budget."""
    if build in (gpt2, llama):
        pytest.importorskip("transformers")
    least = smallest_share(build, 8, num_ranks, links)
    for share in (None, (1 + least) / 2, least * 1.001):
        plan = plan_of(build, 8, num_ranks, share, links)
        if share is not None:
            assert plan.peak_bytes <= plan.memory_budget
        check_runs(num_ranks, [(run_of(plan, build, 8),)])
