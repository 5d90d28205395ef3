"""Elimination finds the optimum that trying every choice finds, for any graph and price."""

import heapq
import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colossalai.auto_parallel.solver import _elimination
from colossalai.auto_parallel.solver._choice import BudgetError, ChoiceProblem, problem_of
from colossalai.auto_parallel.solver._elimination import Elimination, elimination_width, solve_by_elimination
from tests.auto_parallel.solver.problems import BruteForce, chain, choice_problems

pytestmark = pytest.mark.unit

prices = st.sampled_from([0.0, 0.25, 1.0, 3.0])


@settings(max_examples=100)
@given(choice_problems(), prices)
def test_elimination_is_brute_force(problem: ChoiceProblem, price: float) -> None:
    check(problem, price)


@pytest.mark.long
@settings(max_examples=300)
@given(choice_problems(), prices)
def test_elimination_of_many_is_brute_force(problem: ChoiceProblem, price: float) -> None:
    check(problem, price)


@settings(max_examples=100)
@given(choice_problems(max_nodes=6, edge_share=1.0), prices)
def test_large_tables_are_added_up_by_option(problem: ChoiceProblem, price: float) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_elimination, "_AT_ONCE", 0)
        check(problem, price)


def check(problem: ChoiceProblem, price: float) -> None:
    brute = BruteForce(problem)
    wanted = brute.least_cost(price=price)
    if wanted == math.inf:
        with pytest.raises(BudgetError, match="no choice is allowed") as caught:
            solve_by_elimination(problem, price=price)
        assert caught.value.least_bytes == math.inf
        return
    found = solve_by_elimination(problem, price=price)
    assert found.cost + price * found.memory == pytest.approx(wanted)
    assert found.cost == pytest.approx(brute.cost[found.options])
    assert found.memory == brute.memory[found.options]
    assert found.bound == (0.0 if price else found.cost)
    assert found.method == "elimination"


@settings(max_examples=50)
@given(choice_problems(max_nodes=7), prices)
def test_min_marginals_are_brute_force(problem: ChoiceProblem, price: float) -> None:
    check_marginals(problem, price)


@pytest.mark.long
@settings(max_examples=200)
@given(choice_problems(max_nodes=7), prices)
def test_min_marginals_of_many_are_brute_force(problem: ChoiceProblem, price: float) -> None:
    check_marginals(problem, price)


def check_marginals(problem: ChoiceProblem, price: float) -> None:
    brute = BruteForce(problem)
    cost = brute.cost + price * brute.memory
    for node, found in enumerate(Elimination(problem).min_marginals(price)):
        wanted = np.moveaxis(cost, node, 0).reshape(len(found), -1).min(axis=1)
        assert found == pytest.approx(wanted)


@settings(max_examples=70)
@given(choice_problems(max_nodes=6))
def test_choices_come_in_the_order_of_their_costs(problem: ChoiceProblem) -> None:
    check_order(problem)


@pytest.mark.long
@settings(max_examples=200)
@given(choice_problems(max_nodes=6))
def test_choices_of_many_come_in_the_order_of_their_costs(problem: ChoiceProblem) -> None:
    check_order(problem)


def check_order(problem: ChoiceProblem) -> None:
    """All that are allowed, each once."""
    brute = BruteForce(problem)
    found = list(Elimination(problem).cheapest_first())
    assert len({options for _, options in found}) == len(found) == np.isfinite(brute.cost).sum()
    assert [cost for cost, _ in found] == pytest.approx(sorted(brute.cost[np.isfinite(brute.cost)]))
    assert [cost for cost, _ in found] == pytest.approx([brute.cost[options] for _, options in found])


@pytest.mark.parametrize("seed", [2, 3, 7, 10])
def test_of_very_many_equal_choices_the_first_is_there_at_once(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Costs whose sums are rounded: where a rounding lets all other begins come first, there are 2**120."""
    num_nodes, num_taken = 120, 0
    rng = np.random.default_rng(seed)
    costs = [np.full(2, each) for each in rng.random(num_nodes)]
    edges = {}
    for node in range(num_nodes - 1):
        same, other = (rng.random(),) * 2
        edges[node, node + 1] = np.array([[same, other], [other, same]])
    problem = problem_of(list(map(str, range(num_nodes))), costs, [np.zeros(2)] * num_nodes, edges)
    take = heapq.heappop

    def counted(heap: list[Any]) -> Any:
        nonlocal num_taken
        num_taken += 1
        assert num_taken <= 10 * num_nodes, "begins of equal choices are opened one after the other"
        return take(heap)

    elimination = Elimination(problem)
    monkeypatch.setattr(_elimination.heapq, "heappop", counted)
    found = list(itertools.islice(elimination.cheapest_first(), 3))
    assert len({options for _, options in found}) == 3
    assert [cost for cost, _ in found] == pytest.approx([problem.cost_of(options) for _, options in found])


def test_widths() -> None:
    assert elimination_width(chain(6, 2)) == 1
    assert elimination_width(chain(6, 2, (0, 5))) == 2  # a cycle
    assert elimination_width(chain(5, 2, *[(a, b) for a in range(5) for b in range(a + 2, 5)])) == 4
    assert elimination_width(problem_of([], [], [], {})) == 0


def test_edges_that_join_nothing_do_not_count() -> None:
    """A cycle with an edge of zeros, or with a node of one option, is a chain."""
    cycle = chain(6, 2, (0, 5))
    zeros = problem_of(
        cycle.names, cycle.cost_arrays, cycle.memory_arrays, {**cycle.edge_arrays, (2, 3): np.zeros((2, 2))}
    )
    assert elimination_width(zeros) == 1
    one = [slice(0, 1) if node == 3 else slice(0, 2) for node in range(6)]
    single = problem_of(
        cycle.names,
        [costs[part] for costs, part in zip(cycle.cost_arrays, one, strict=True)],
        [memory[part] for memory, part in zip(cycle.memory_arrays, one, strict=True)],
        {(a, b): table[one[a], one[b]] for (a, b), table in cycle.edge_arrays.items()},
    )
    assert elimination_width(single) == 1
    assert solve_by_elimination(single).cost == pytest.approx(BruteForce(single).least_cost())


def test_a_grid_is_as_wide_as_its_shorter_side() -> None:
    pairs = [(a, a + 1) for a in range(12) if a % 3 < 2] + [(a, a + 3) for a in range(9)]
    ones = [np.ones(2)] * 12
    grid = problem_of([f"{n}" for n in range(12)], ones, ones, {pair: np.ones((2, 2)) for pair in pairs})
    assert elimination_width(grid) == 3


@settings(max_examples=100)
@given(st.integers(1, 12), st.integers(0, 2**32 - 1), st.booleans())
def test_the_order_is_the_greedy_one(num_nodes: int, seed: int, fill_first: bool) -> None:
    """Ranks that are kept up to date are those that are found anew at each step."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(2, 5, num_nodes).tolist()
    graph: dict[int, set[int]] = {node: set() for node in range(num_nodes)}
    for a, b in itertools.combinations(range(num_nodes), 2):
        if rng.random() < 0.4:
            graph[a].add(b)
            graph[b].add(a)

    def rank(fill: int, size: int) -> tuple[int, int]:
        return (fill, size) if fill_first else (size, fill)

    bits = [sum(1 << other for other in graph[node]) for node in range(num_nodes)]
    order = _elimination._greedy_order(bits, counts, rank)
    wanted = []
    while graph:
        ranks = {}
        for node, around in graph.items():
            fill = sum(b not in graph[a] for a, b in itertools.combinations(around, 2))
            ranks[node] = rank(fill, math.prod(counts[each] for each in (node, *around))), node
        node = min(graph, key=ranks.__getitem__)
        around = graph.pop(node)
        wanted.append([node, *sorted(around)])
        for other in around:
            graph[other] = (graph[other] | around) - {node, other}
    assert order == wanted


@pytest.mark.parametrize("at_once", [0, 100])
def test_the_first_of_equal_options_is_taken(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_elimination, "_AT_ONCE", at_once)
    problem = problem_of(
        ["a", "b"], [np.ones(3)] * 2, [np.arange(3.0)] * 2, {(0, 1): np.array([[1.0, 0.0, 0.0]] * 3)}
    )
    assert solve_by_elimination(problem).options == (0, 1)
    assert solve_by_elimination(problem, price=0.0).bound == 2.0


def test_more_than_256_options() -> None:
    costs = np.arange(300.0)[::-1]
    problem = problem_of(["a", "b"], [costs, np.zeros(300)], [np.zeros(300)] * 2, {(0, 1): np.eye(300)})
    assert solve_by_elimination(problem).options == (299, 0)


def test_a_graph_that_is_too_wide_is_refused() -> None:
    pairs = [(a, b) for a in range(9) for b in range(a + 2, 9)]
    clique = chain(9, 8, *pairs)
    with pytest.raises(ValueError, match="a table of 134,217,728 entries over the options of node0, node1"):
        solve_by_elimination(clique)


@pytest.mark.parametrize("price", [-1.0, math.inf, math.nan])
def test_prices_are_finite(price: float) -> None:
    with pytest.raises(ValueError, match="price="):
        solve_by_elimination(chain(2, 2), price=price)


def test_who_forbids_everything_is_named() -> None:
    blocked = problem_of(
        ["a", "b"],
        [np.ones(2)] * 2,
        [np.ones(2)] * 2,
        {(0, 1): np.full((2, 2), np.inf)},
    )
    with pytest.raises(BudgetError, match="node 'a' has no option that any neighbour allows"):
        solve_by_elimination(blocked)


@settings(max_examples=50)
@given(choice_problems(), st.sampled_from([0, 1 << 15]), st.sampled_from([1, 1 << 20]))
def test_several_problems_of_one_graph_are_minimized_bit_for_bit(
    problem: ChoiceProblem, at_once: int, together: int
) -> None:
    """Whole tables or option by option, one problem or all of them at a time: sums are the same."""
    memory = [np.array(row) for row in problem.memory]
    costs = [
        np.stack([row + price * size for price in (0.0, 0.3, 7.0)], axis=1)
        for row, size in zip(problem.cost_arrays, memory, strict=True)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_elimination, "_AT_ONCE", at_once)
        patch.setattr(_elimination, "_LARGEST_AT_ONCE", together)
        found = Elimination(problem).least_costs(costs, 3).tolist()
        alone = [
            Elimination(
                problem.with_own(tuple(tuple(row[:, place].tolist()) for row in costs), problem.memory)
            ).minimize()[0]
            for place in range(3)
        ]
    assert found == alone
