"""The solver keeps every budget, is as fast as trying every choice finds, and says what is too small."""

import itertools
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colossalai.auto_parallel.solver import _elimination, _ilp, _price
from colossalai.auto_parallel.solver._choice import BudgetError, ChoiceProblem, problem_of
from colossalai.auto_parallel.solver._elimination import Elimination
from colossalai.auto_parallel.solver._ilp import IntegerProgram, solve_choices
from colossalai.auto_parallel.solver._price import mix, polish, rule_out, search_price
from tests.auto_parallel.solver.problems import BruteForce, chain, choice_problems

pytestmark = pytest.mark.unit

LONG = 600.0  # seconds that no search of a test needs
EXACT = 1e-7  # what the scaled tolerances of HiGHS may lose, and more

budgets = st.integers(0, 50)


def check(problem: ChoiceProblem, budget: float | None, *, gap: float = 0.0) -> None:
    brute = BruteForce(problem)
    limit = math.inf if budget is None else budget
    wanted = brute.least_cost(limit)
    if wanted == math.inf:
        with pytest.raises(BudgetError) as caught:
            solve_choices(problem, budget=budget, time_limit=LONG, gap=gap)
        assert caught.value.least_bytes == brute.least_bytes()
        return
    found = solve_choices(problem, budget=budget, time_limit=LONG, gap=gap)
    assert found.memory == brute.memory[found.options] <= limit
    assert found.cost == pytest.approx(brute.cost[found.options])
    assert wanted - EXACT <= found.cost <= wanted / (1 - gap) + EXACT
    assert found.bound <= wanted + EXACT
    assert found.gap <= gap + EXACT


@settings(max_examples=80)
@given(choice_problems(), budgets)
def test_a_budget_is_kept_at_the_least_cost(problem: ChoiceProblem, budget: int) -> None:
    check(problem, budget)


@pytest.mark.long
@settings(max_examples=200)
@given(choice_problems(), budgets)
def test_a_budget_is_kept_at_the_least_cost_of_many(problem: ChoiceProblem, budget: int) -> None:
    check(problem, budget)


@settings(max_examples=100)
@given(choice_problems(), budgets, st.sampled_from([1e-9, 0.05, 0.3]))
def test_a_gap_is_kept(problem: ChoiceProblem, budget: int, gap: float) -> None:
    check(problem, budget, gap=gap)


@pytest.mark.parametrize("seed", [1, 5, 13, 22, 44])
@pytest.mark.parametrize("gap", [0.05, 0.1])
def test_a_bound_holds_where_options_were_ruled_out_too(seed: int, gap: float) -> None:
    """What is ruled out may be better by less than the gap: the bound of the rest is not that of all."""
    problem = chain(7, 4, (0, 2), (1, 4), (3, 6), seed=seed)
    for budget in (2e9, 2.5e9):
        found = solve_choices(problem, budget=budget, gap=gap, time_limit=LONG)
        assert found.bound <= BruteForce(problem).least_cost(budget) + EXACT
        assert found.gap <= gap


@settings(max_examples=50)
@given(choice_problems())
def test_without_a_budget(problem: ChoiceProblem) -> None:
    check(problem, None)


@settings(max_examples=40)
@given(choice_problems(max_nodes=5), budgets)
def test_what_is_too_wide_for_elimination(problem: ChoiceProblem, budget: int) -> None:
    check_without_elimination(problem, budget)


@pytest.mark.long
@settings(max_examples=100)
@given(choice_problems(max_nodes=5), budgets)
def test_more_that_is_too_wide_for_elimination(problem: ChoiceProblem, budget: int) -> None:
    check_without_elimination(problem, budget)


def check_without_elimination(problem: ChoiceProblem, budget: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_elimination, "LARGEST_TABLE", 0)
        check(problem, budget)


@settings(max_examples=50)
@given(choice_problems(max_nodes=6), budgets)
def test_what_a_second_pass_would_need_too_much_memory_for(problem: ChoiceProblem, budget: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_price, "_MOST_ENTRIES", 0)
        check(problem, budget)


def knapsack() -> ChoiceProblem:
    """A pair of which the budget 10 allows one half, and no price says which: g(p) = 8 - 2.5 everywhere."""
    return problem_of(["a", "b"], [np.array([4.0, 0.0])] * 2, [np.array([0.0, 8.0])] * 2, {})


def test_methods() -> None:
    problem = knapsack()
    found = solve_choices(problem, budget=16)
    assert (found.options, found.method, found.gap) == ((1, 1), "elimination", 0.0)
    found = solve_choices(problem, budget=8)
    assert (found.cost, found.method, found.gap) == (4.0, "price", 0.0)
    found = solve_choices(problem, budget=10, gap=0.3)
    assert (found.cost, found.method, found.bound) == (4.0, "price", 3.0)
    found = solve_choices(problem, budget=10)  # the bound says that only a whole saving could matter
    assert (found.cost, found.method) == (4.0, "ilp")
    assert found.gap <= 1e-3


def test_the_integer_program_is_asked_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """No price closes the gap of this one, which is why SciPy has to be there."""
    problem = chain(20, 5, *[(a, a + 3) for a in range(17)])
    found = solve_choices(problem, budget=6e9, gap=0.0, time_limit=LONG)
    assert found.method == "ilp"
    assert found.gap <= EXACT
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(ValueError, match=r'SciPy, which is not installed: pip install "colossalai\[auto\]"'):
        solve_choices(problem, budget=6e9, gap=0.0)


def test_bounds_and_prices_of_a_chain() -> None:
    """The price found has the best bound of all prices, and every bound is below the optimum."""
    problem = chain(7, 4, (0, 3), (2, 5))
    brute = BruteForce(problem)
    elimination = Elimination(problem)
    smallest = tuple(int(memory.argmin()) for memory in problem.memory_arrays)
    budget = 0.4 * brute.memory.max()
    priced = search_price(
        elimination, budget=budget, smallest=smallest, cheapest=elimination.minimize()[1], gap=0.0
    )
    assert priced.bound <= brute.least_cost(budget) <= priced.cost
    bounds = [
        brute.least_cost(price=price) - price * budget for price in np.linspace(0, 4 * priced.price, 999)
    ]
    assert priced.bound >= max(bounds)
    assert priced.bound == pytest.approx(brute.least_cost(price=priced.price) - priced.price * budget)


def test_more_time_for_a_price_is_never_worse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut off after any number of eliminations, the bound and the answer are the best that were met."""
    problem = chain(30, 5, *[(a, a + 3) for a in range(27)])
    elimination = Elimination(problem)
    smallest = tuple(int(memory.argmin()) for memory in problem.memory_arrays)
    cheapest = elimination.minimize()[1]
    found = []
    for number in range(8):
        ticks = itertools.count()
        monkeypatch.setattr(_price.time, "monotonic", lambda ticks=ticks: float(next(ticks)))
        found.append(
            search_price(
                elimination, budget=12e9, smallest=smallest, cheapest=cheapest, gap=0.0, end=float(number)
            )
        )
    assert found[0].bound == problem.cost_of(cheapest)
    assert [each.bound for each in found] == sorted(each.bound for each in found)
    assert found[-1].bound > found[0].bound
    assert all(problem.memory_of(each.options) <= 12e9 for each in found)


@settings(max_examples=150)
@given(choice_problems(max_nodes=6), budgets, st.sampled_from([0.0, 0.3, 1.0]), st.floats(0, 20))
def test_only_what_cannot_be_in_an_answer_is_ruled_out(
    problem: ChoiceProblem, budget: int, price: float, limit: float
) -> None:
    brute = BruteForce(problem)
    good = np.argwhere((brute.cost <= limit) & (brute.memory <= budget))
    ruled = rule_out(
        Elimination(problem),
        Elimination(_ilp._memory_alone(problem)),
        budget=budget,
        price=price,
        limit=limit + 1e-9,
    )
    if ruled is None:
        assert not len(good)
        return
    smaller, kept = ruled
    for options in good:
        assert all(option in each for option, each in zip(options, kept, strict=True))
    assert smaller.num_options == tuple(map(len, kept))


def test_much_is_ruled_out() -> None:
    problem = chain(12, 6)
    elimination = Elimination(problem)
    best = elimination.minimize()[0]
    least = Elimination(_ilp._memory_alone(problem))
    smaller, _ = rule_out(elimination, least, budget=1e12, price=0.0, limit=best * (1 + 1e-9))
    assert smaller.num_options == (1,) * 12


def test_what_never_fits_is_ruled_out() -> None:
    problem = problem_of(["a", "b"], [np.zeros(2)] * 2, [np.array([1.0, 20.0]), np.array([3.0, 9.0])], {})
    elimination, least = Elimination(problem), Elimination(_ilp._memory_alone(problem))
    _, kept = rule_out(elimination, least, budget=10.0, price=0.0, limit=1.0)
    assert kept == ((0,), (0, 1))


def test_parts_that_save_most_for_their_bytes_are_taken() -> None:
    """Of nodes 0, 1-2 (joined) and 3 the budget lets 1-2 and 3 change, but not 0."""
    problem = problem_of(
        list("abcd"),
        [np.array([3.0, 0.0]), np.array([5.0, 0.0]), np.array([5.0, 0.0]), np.array([1.0, 0.0])],
        [np.array([0.0, 3.0]), np.array([0.0, 2.0]), np.array([0.0, 2.0]), np.array([0.0, 1.0])],
        {(1, 2): np.array([[0.0, 9.0], [9.0, 0.0]])},
    )
    assert mix(problem, (0, 0, 0, 0), (1, 1, 1, 1), budget=6.0) == (0, 1, 1, 1)


@settings(max_examples=100)
@given(choice_problems(max_nodes=6), budgets)
def test_polishing_never_exceeds_a_budget_or_costs(problem: ChoiceProblem, budget: int) -> None:
    brute = BruteForce(problem)
    allowed = np.argwhere(np.isfinite(brute.cost) & (brute.memory <= budget))
    if not len(allowed):
        return
    before = tuple(allowed[0].tolist())
    after = polish(problem, before, budget=budget)
    assert brute.memory[after] <= budget
    assert brute.cost[after] <= brute.cost[before]
    for node, count in enumerate(problem.num_options):
        for option in range(count):  # no single change is left that saves
            changed = (*after[:node], option, *after[node + 1 :])
            assert brute.memory[changed] > budget or brute.cost[changed] >= brute.cost[after] - 1e-9


def test_an_answer_over_the_budget_is_asked_for_again() -> None:
    """HiGHS lets the budget be off by its tolerance: by 1 byte of 1e12 here."""
    problem = problem_of(["a"], [np.array([1.0, 0.0])], [np.array([0.0, 1e12])], {})
    program = IntegerProgram(problem, unit=1.0)
    x, _ = program.solve(1e12 - 1, gap=0.0, seconds=LONG)
    assert program.options_of(x) == (1,), "HiGHS is more exact than it was: find a harder case"
    answer = _ilp._run_highs(problem, 1e12 - 1, gap=0.0, unit=1.0, end=math.inf)
    assert answer.options == (0,)
    assert answer.bound <= 1.0


@pytest.mark.parametrize("unit", [1e-9, 1.0, 1e9])
def test_the_unit_of_seconds_does_not_matter(unit: float) -> None:
    """Absolute tolerances of HiGHS would end a search over microseconds at any answer."""
    problem = chain(8, 4, (0, 7), (1, 6), (2, 5))
    scaled = problem_of(
        problem.names,
        [unit * costs for costs in problem.cost_arrays],
        problem.memory_arrays,
        {pair: unit * table for pair, table in problem.edge_arrays.items()},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_elimination, "LARGEST_TABLE", 0)
        found = solve_choices(scaled, budget=3e9, gap=0.0, time_limit=LONG)
    assert found.method == "ilp"
    assert found.cost == pytest.approx(unit * BruteForce(problem).least_cost(3e9))
    assert found.gap <= EXACT


def test_the_time_limit_ends_a_search_with_what_it_has() -> None:
    """No time for a price or a program: the smallest choice, polished, and the bound without a budget."""
    problem = chain(40, 5, *[(a, a + 3) for a in range(37)])
    budget = 0.3 * 40e9
    found = solve_choices(problem, budget=budget, time_limit=1e-9)
    assert found.memory <= budget
    assert found.method == "price"
    assert 0 < found.bound <= found.cost


def test_where_every_option_is_ruled_out_the_answer_is_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_ilp, "rule_out", lambda *_, **__: None)
    found = solve_choices(knapsack(), budget=10, gap=0.01)
    assert (found.cost, found.method) == (4.0, "price")
    assert found.bound == pytest.approx(4.0 * (1 - 0.01), rel=1e-4)


@pytest.mark.parametrize("largest", [0, 1000])
def test_where_nothing_is_allowed_no_budget_helps(largest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_elimination, "LARGEST_TABLE", largest)
    table = {(0, 1): np.full((2, 2), np.inf)}
    problem = problem_of(["a", "b"], [np.ones(2)] * 2, [np.ones(2)] * 2, table)
    with pytest.raises(BudgetError, match="no choice is allowed, whatever the budget: node 'a'"):
        solve_choices(problem, budget=10.0)


def test_a_search_that_found_nothing_says_so() -> None:
    problem = chain(40, 5, *[(a, a + 3) for a in range(37)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_elimination, "LARGEST_TABLE", 0)
        patch.setattr(_ilp, "_LEAST_S", 1e-9)
        with pytest.raises(TimeoutError, match="no choice for 40 nodes was found in time"):
            solve_choices(problem, budget=0.3 * 40e9, time_limit=1e-9)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"budget": -1.0}, "budget=-1.0"),
        ({"budget": math.nan}, "budget=nan"),
        ({"gap": -0.1}, "gap=-0.1"),
        ({"time_limit": 0.0}, "time_limit=0.0"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        solve_choices(knapsack(), **arguments)


def test_the_least_budget_is_said() -> None:
    problem = chain(5, 3)
    least = sum(memory.min() for memory in problem.memory_arrays)
    with pytest.raises(BudgetError, match=rf"the budget of 1,000 bytes: the smallest one needs {least:,.0f}"):
        solve_choices(problem, budget=1000)
    assert solve_choices(problem, budget=least).memory == least


def test_no_nodes() -> None:
    found = solve_choices(problem_of([], [], [], {}), budget=0.0)
    assert (found.options, found.cost, found.memory) == ((), 0.0, 0.0)


def answers() -> str:
    """Solve a problem by all methods; every bit of the answers."""
    pairs = {(a, a + 3) for a in range(17)} | {(a, a + 5) for a in range(15)}
    problem = chain(20, 4, *pairs)
    found = [solve_choices(problem, budget=budget, gap=0.0, time_limit=LONG) for budget in (None, 5e9, 8e9)]
    return str([(each.options, each.cost.hex(), each.bound.hex(), each.method) for each in found])


@pytest.mark.long
def test_every_process_has_the_same_answer() -> None:
    """Whatever the order of hashes, which differs between this process and its child."""
    here = os.environ.get("PYTHONHASHSEED")
    there = subprocess.run(
        [sys.executable, "-c", f"from {__name__} import answers; print(answers())"],
        cwd=Path(__file__).parents[3],
        env={**os.environ, "PYTHONHASHSEED": "1" if here != "1" else "2"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert there.strip() == answers()
    assert "ilp" in there
