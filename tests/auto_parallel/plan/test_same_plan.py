"""A plan is the same, to the last character, in every process and on every rank."""

import os
import subprocess
import sys

import pytest

import colossalai
from colossalai.auto_parallel import AutoPlan, make_plan
from tests.auto_parallel.plan.models import arguments_of, gpt, slow_machine
from tests.ranks import run_ranks

# What is predicted decides, not what is counted on ranks, which one process does not do.
HOW = {"profile": slow_machine(), "optimizer": "momentum", "verify": False}


def free_plan() -> AutoPlan:
    """Return a plan for 2 ranks."""
    return make_plan(gpt(), arguments_of(gpt, 7), world_size=2, **HOW)


def text_of_cuts_and_recomputation(budget: float) -> str:
    """Return a plan for 2 ranks that has both."""
    tight = make_plan(gpt(), arguments_of(gpt, 7), world_size=2, memory_budget=budget, **HOW)
    assert tight.rules
    assert tight.segments
    return tight.to_json()


def texts_of_plans() -> list[str]:
    """Return plans for 2 ranks, of cuts, of cuts and recomputation, and one for 4 ranks."""
    free = free_plan()
    larger = make_plan(gpt(), arguments_of(gpt, 2), world_size=4, **HOW)
    return [free.to_json(), text_of_cuts_and_recomputation(0.9 * free.peak_bytes), larger.to_json()]


@pytest.mark.long
@pytest.mark.unit
def test_a_process_that_hashes_otherwise_has_the_same_plan() -> None:
    """Whatever the order of sets: of names, of operations."""
    own = os.environ.get("PYTHONHASHSEED")
    found = subprocess.run(
        [sys.executable, "-c", f"from {__name__} import texts_of_plans; print(texts_of_plans())"],
        env={**os.environ, "PYTHONHASHSEED": "2" if own == "1" else "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout == f"{texts_of_plans()}\n"


def text_of_rank(budget: float) -> str:
    colossalai.launch_from_torch({}, verbose=False)
    return text_of_cuts_and_recomputation(budget)


def texts_of_rank() -> tuple[list[str], str]:
    colossalai.launch_from_torch({}, verbose=False)
    texts = texts_of_plans()
    with pytest.raises(ValueError, match="smallest budget that was found to work is") as refused:
        make_plan(gpt(), arguments_of(gpt, 1), memory_budget=1000, **HOW)
    return texts, str(refused.value)


@pytest.mark.dist
def test_all_ranks_have_the_plan_of_one_process() -> None:
    budget = 0.9 * free_plan().peak_bytes
    one, other = run_ranks(text_of_rank, 2, budget)
    assert one == other == text_of_cuts_and_recomputation(budget)


@pytest.mark.long
@pytest.mark.dist
def test_all_ranks_have_all_plans_of_one_process() -> None:
    one, other = run_ranks(texts_of_rank, 2)
    assert one == other
    assert one[0] == texts_of_plans()
