"""Rotor is as fast as any nested segments within any budget, and no solver ever exceeds one."""

import math
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colossalai.auto_parallel.checkpoint._chain import Chain, ChainBlock, simulate
from colossalai.auto_parallel.checkpoint._chen import solve_chen
from colossalai.auto_parallel.checkpoint._rotor import least_budget, solve_rotor
from colossalai.auto_parallel.solver._choice import BudgetError
from colossalai.runtime import RecomputeSegment
from tests.auto_parallel.checkpoint.chains import (
    chain_with_a_large_gradient,
    chains,
    even_chain,
    segmentations,
)
from tests.tiers import further

pytestmark = pytest.mark.unit

EXACT = 10_000  # slots: more than a small chain has bytes
Solver = Callable[[Chain, int], tuple[RecomputeSegment, ...]]
SOLVERS: dict[str, Solver] = {"rotor": partial(solve_rotor, slots=7), "chen": solve_chen}


def fastest_by_peak(chain: Chain, *, end_in_segments: bool) -> dict[int, float]:
    """Return for each peak that any segments have the fewest seconds of those within it."""
    costs = [
        simulate(chain, segments)
        for segments in segmentations(len(chain.blocks), end_in_segments=end_in_segments)
    ]
    found: dict[int, float] = {}
    fewest = math.inf
    for cost in sorted(costs, key=lambda cost: cost.peak_bytes):
        fewest = min(fewest, cost.seconds)
        found[cost.peak_bytes] = fewest
    return found


def check_rotor(chain: Chain, *, end_in_segments: bool) -> None:
    truth = fastest_by_peak(chain, end_in_segments=end_in_segments)
    for budget, seconds in truth.items():
        cost = simulate(chain, solve_rotor(chain, budget, slots=EXACT))
        assert cost.peak_bytes <= budget
        assert cost.seconds == seconds
    assert least_budget(chain) == min(truth)
    with pytest.raises(BudgetError, match=rf"give at least {min(truth)} bytes") as caught:
        solve_rotor(chain, min(truth) - 1)
    assert caught.value.least_bytes == min(truth)


@settings(max_examples=60)
@given(chains(most_blocks=4))
def test_rotor_is_the_best_of_all_segments(chain: Chain) -> None:
    """Of all: segments in the last place of others, or of the chain, are never needed."""
    check_rotor(chain, end_in_segments=True)


@settings(max_examples=20)
@given(chains(most_blocks=6))
def test_rotor_is_the_best_in_longer_chains(chain: Chain) -> None:
    check_rotor(chain, end_in_segments=False)


@pytest.mark.long
@settings(max_examples=40)
@given(chains(most_blocks=6))
def test_rotor_is_the_best_in_more_of_the_longer_chains(chain: Chain) -> None:
    check_rotor(chain, end_in_segments=False)


@pytest.mark.long
@settings(max_examples=15)
@given(chains(most_blocks=8))
def test_rotor_is_the_best_in_the_longest_chains(chain: Chain) -> None:
    check_rotor(chain, end_in_segments=False)


def least_of(solver: Solver, chain: Chain) -> int:
    with pytest.raises(BudgetError) as caught:
        solver(chain, -1)
    return int(caught.value.least_bytes)


@pytest.mark.parametrize("solver", SOLVERS)
@settings(max_examples=10)
@given(chains(most_blocks=10))
def test_larger_budgets_never_take_longer(solver: str, chain: Chain) -> None:
    check_budgets(solver, chain)


@pytest.mark.long
@pytest.mark.parametrize("solver", SOLVERS)
@settings(max_examples=25)
@given(chains(most_blocks=10))
def test_larger_budgets_never_take_longer_in_more_chains(solver: str, chain: Chain) -> None:
    check_budgets(solver, chain)


def check_budgets(solver: str, chain: Chain) -> None:
    """With slots that are far too coarse, too; and what is found is always within the budget."""
    whole = simulate(chain, ()).peak_bytes
    slowest = math.inf
    least = least_of(SOLVERS[solver], chain)
    for budget in range(least, whole + 2):
        cost = simulate(chain, SOLVERS[solver](chain, budget))
        assert cost.peak_bytes <= budget
        assert cost.seconds <= slowest
        slowest = cost.seconds
    assert slowest == simulate(chain, ()).seconds


@settings(max_examples=20)
@given(chains(most_blocks=10), st.integers(0, 100), st.integers(20, 60))
def test_few_slots_are_no_faster_than_many(chain: Chain, percent: int, slots: int) -> None:
    least, whole = least_budget(chain), simulate(chain, ()).peak_bytes
    budget = least + (whole - least) * percent // 100
    few = simulate(chain, solve_rotor(chain, budget, slots=slots))
    exact = simulate(chain, solve_rotor(chain, budget, slots=EXACT))
    assert exact.seconds <= few.seconds


@pytest.mark.parametrize("percent", [further(5), 10, further(25), further(50), further(90)])
def test_96_equal_blocks_lose_little_to_slots(percent: int) -> None:
    """By seconds of recomputation: the usual slots against as many as bytes."""
    chain = even_chain(96)
    budget = simulate(chain, ()).peak_bytes * percent // 100
    usual = simulate(chain, solve_rotor(chain, budget))
    exact = simulate(chain, solve_rotor(chain, budget, slots=EXACT))
    assert exact.seconds <= usual.seconds <= exact.seconds + 1
    assert usual.peak_bytes > 0.9 * budget


@pytest.mark.parametrize("gradients", [0, 4])
def test_ranges_of_equal_blocks_are_not_mixed_up(gradients: int) -> None:
    """Equal blocks at the end of the chain, where no gradient has arrived yet, and before it."""
    big = {"saved_bytes": 3, "input_bytes": 6, "output_bytes": 6, "forward_peak": 5, "backward_peak": 0}
    each = {"forward_s": 1, "backward_s": 1, **big, "gradient_bytes": gradients}
    check_rotor(Chain(tuple(ChainBlock(name=str(n), **each) for n in range(5))), end_in_segments=False)


def test_rotor_where_a_forward_that_keeps_nothing_is_the_peak() -> None:
    """Which random chains hardly ever show: the backward of the same blocks mostly needs more."""
    check_rotor(chain_with_a_large_gradient(), end_in_segments=True)
    blocks = [
        ChainBlock(
            name=str(number),
            forward_s=seconds,
            backward_s=1,
            saved_bytes=saved,
            input_bytes=given,
            output_bytes=returned,
            forward_peak=peak,
        )
        for number, (seconds, saved, given, returned, peak) in enumerate(
            [(5, 0, 3, 1, 5), (0, 2, 1, 1, 30), (4, 12, 1, 8, 5), (1, 0, 8, 8, 5), (2, 5, 8, 8, 5)]
        )
    ]
    check_rotor(Chain(tuple(blocks)), end_in_segments=True)


def test_chen_cuts_into_the_square_root() -> None:
    segments = solve_chen(even_chain(16))
    assert [(each.first, each.last) for each in segments] == [(0, 4), (4, 8), (8, 12)]
    for saved, ends in [([8, 1, 1, 6, 8, 2, 3, 3, 8], [(0, 4), (4, 6)]), ([1] * 6 + [20], [(0, 6)])]:
        blocks = [
            ChainBlock(
                name=str(number), forward_s=1, backward_s=2, saved_bytes=each, input_bytes=0, output_bytes=0
            )
            for number, each in enumerate(saved)
        ]
        assert [(each.first, each.last) for each in solve_chen(Chain(tuple(blocks)))] == ends


def test_chen_takes_as_few_recomputations_as_the_budget_lets() -> None:
    chain = even_chain(16)
    assert solve_chen(chain, simulate(chain, ()).peak_bytes) == ()
    half = solve_chen(chain, simulate(chain, ()).peak_bytes * 6 // 10)
    assert [(each.first, each.last) for each in half] == [(0, 8)]
    with pytest.raises(
        BudgetError, match=r"number of segments of equal bytes: give at least 37 bytes"
    ) as caught:
        solve_chen(chain, 30)
    assert simulate(chain, solve_chen(chain, 37)).peak_bytes == caught.value.least_bytes == 37


def test_refusals() -> None:
    with pytest.raises(ValueError, match="slots is 0; it must be 1 or more"):
        solve_rotor(even_chain(2), 100, slots=0)
    with pytest.raises(
        BudgetError, match=r"10 bytes is below the need of the blocks 'blocks\.0' to 'blocks\.3'"
    ):
        solve_rotor(even_chain(4), 10)
