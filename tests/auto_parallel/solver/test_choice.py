"""Choice problems: what is refused, merging equal nodes, dropping options that no budget needs."""

import math
import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colossalai.auto_parallel.solver._choice import (
    BudgetError,
    ChoiceProblem,
    ChoiceSolution,
    drop_dominated,
    merge_equal,
    problem_of,
)
from tests.auto_parallel.solver.problems import BruteForce, choice_problems, every_choice

pytestmark = pytest.mark.unit

GOOD = {
    "names": ("a", "b"),
    "costs": ((1.0, 2.0), (3.0,)),
    "memory": ((5.0, 6.0), (7.0,)),
    "edges": {(0, 1): ((10.0,), (math.inf,))},
}


def test_cost_and_memory_of_a_choice() -> None:
    problem = ChoiceProblem(**GOOD)
    assert (problem.cost_of((0, 0)), problem.memory_of((0, 0))) == (14.0, 12.0)
    assert (problem.cost_of((1, 0)), problem.memory_of((1, 0))) == (math.inf, 13.0)


@settings(max_examples=50)
@given(choice_problems(max_nodes=4))
def test_cost_of_is_what_brute_force_adds_up(problem: ChoiceProblem) -> None:
    wanted = BruteForce(problem)
    for options in every_choice(problem):
        assert problem.cost_of(options) == pytest.approx(wanted.cost[options])
        assert problem.memory_of(options) == wanted.memory[options]


@settings(max_examples=50)
@given(choice_problems(max_nodes=4), st.integers(0, 10**6))
def test_seconds_that_come_later_are_those_of_a_merged_problem(problem: ChoiceProblem, seed: int) -> None:
    classes = [(count, seed % 2 * node) for node, count in enumerate(problem.num_options)]
    draw = np.random.default_rng(seed)
    drawn = {each: draw.random(each[0]).tolist() for each in classes}
    more = [drawn[each] for each in classes]
    sums = [[a + b for a, b in zip(*rows, strict=True)] for rows in zip(problem.costs, more, strict=True)]
    wanted = merge_equal(replace(problem, costs=tuple(map(tuple, sums))), classes).problem
    found = merge_equal(problem, classes).with_more(more.__getitem__).problem
    assert found.names == wanted.names
    for own, other in zip(found.costs, wanted.costs, strict=True):
        assert own == pytest.approx(other)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"names": ("a",)}, "1 names, 2 rows of costs and 2 of memory"),
        ({"memory": ((5.0,), (7.0,))}, "node 'a' has 2 costs and 1 sizes of memory"),
        ({"costs": ((1.0, 2.0), ()), "memory": ((5.0, 6.0), ())}, "node 'b' has 0 costs .* one option at"),
        ({"costs": ((1.0, -2.0), (3.0,))}, "node 'a' costs .*-2.0"),
        ({"costs": ((1.0, math.nan), (3.0,))}, "node 'a' costs .*nan"),
        ({"memory": ((5.0, 6.0), (math.inf,))}, "node 'b' keeps .*inf.*: give finite bytes"),
        ({"memory": ((5.0, -1.0), (7.0,))}, "node 'a' keeps .*-1.0"),
        ({"edges": {(1, 0): ((1.0, 1.0),)}}, r"edge \(1, 0\): give the numbers a < b"),
        ({"edges": {(0, 2): ((1.0,), (1.0,))}}, r"edge \(0, 2\): .* of 2 nodes"),
        ({"edges": {(0, 1): ((1.0, 1.0),)}}, "the edge of 'a' and 'b' has rows .* give 2 rows of 1"),
        ({"edges": {(0, 1): ((1.0,), (1.0, 2.0))}}, "the edge of 'a' and 'b' has rows"),
        ({"edges": {(0, 1): ((1.0,), (-1.0,))}}, "the edge of 'a' and 'b' costs .*-1.0"),
    ],
)
def test_bad_problems_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ChoiceProblem(**{**GOOD, **change})


def test_bad_choices_are_refused() -> None:
    problem = ChoiceProblem(**GOOD)
    with pytest.raises(ValueError, match="1 options for 2 nodes"):
        problem.cost_of((0,))
    with pytest.raises(ValueError, match="node 'b' has no option 1: it has 0 to 0"):
        problem.memory_of((0, 1))
    with pytest.raises(ValueError, match="node 'a' has no option -1"):
        problem.cost_of((-1, 0))


def test_a_gap_is_a_part_of_the_cost() -> None:
    def solution(cost: float, bound: float) -> ChoiceSolution:
        return ChoiceSolution(options=(0,), cost=cost, memory=1.0, bound=bound, method="price")

    assert solution(4.0, 3.0).gap == 0.25
    assert solution(0.0, 0.0).gap == 0.0


def test_a_budget_error_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(BudgetError("too small", 12.0)))
    assert (str(error), error.least_bytes) == ("too small", 12.0)


@settings(max_examples=150)
@given(choice_problems(max_nodes=6, max_options=3), st.data())
def test_merged_nodes_take_equal_options(problem: ChoiceProblem, data: st.DataObject) -> None:
    """Every choice of the merged problem costs and keeps what the choice costs that it means."""
    labels = data.draw(st.lists(st.sampled_from("xyz"), min_size=6, max_size=6))
    classes = [(label, count) for label, count in zip(labels, problem.num_options, strict=False)]
    merged = merge_equal(problem, classes)
    assert len(merged.problem.names) == len(set(classes))
    meant = set()
    for options in every_choice(merged.problem):
        expanded = merged.expand(options)
        meant.add(expanded)
        assert merged.problem.cost_of(options) == pytest.approx(problem.cost_of(expanded))
        assert merged.problem.memory_of(options) == problem.memory_of(expanded)
    equal = {
        options
        for options in every_choice(problem)
        if len(set(zip(classes, options, strict=True))) == len(set(classes))
    }
    assert meant == equal


def test_merged_nodes_are_named_by_their_first() -> None:
    problem = problem_of(["a", "b", "c"], [np.ones(2)] * 3, [np.zeros(2)] * 3, {})
    assert merge_equal(problem, [1, 2, 1]).problem.names == ("a (x2)", "b")


def test_classes_that_do_not_fit_are_refused() -> None:
    problem = ChoiceProblem(**GOOD)
    with pytest.raises(ValueError, match="nodes 'a' and 'b' are of one class, but have 2 and 1 options"):
        merge_equal(problem, "xx")
    with pytest.raises(ValueError, match="1 classes for 2 nodes"):
        merge_equal(problem, "x")
    with pytest.raises(ValueError, match="1 options for 2 classes"):
        merge_equal(problem, "xy").expand((0,))


@settings(max_examples=100)
@given(choice_problems(max_nodes=6), st.integers(0, 40))
def test_dropped_options_are_not_missed(problem: ChoiceProblem, budget: int) -> None:
    check_dropped(problem, budget)


@pytest.mark.long
@settings(max_examples=300)
@given(choice_problems(max_nodes=6), st.integers(0, 40))
def test_dropped_options_of_many_are_not_missed(problem: ChoiceProblem, budget: int) -> None:
    check_dropped(problem, budget)


def check_dropped(problem: ChoiceProblem, budget: int) -> None:
    smaller, kept = drop_dominated(problem)
    wanted = BruteForce(problem)
    assert BruteForce(smaller).least_cost(budget) == pytest.approx(wanted.least_cost(budget))
    assert BruteForce(smaller).least_bytes() == wanted.least_bytes()
    for options in every_choice(smaller):
        original = tuple(numbers[option] for numbers, option in zip(kept, options, strict=True))
        assert smaller.cost_of(options) == problem.cost_of(original)
        assert smaller.memory_of(options) == problem.memory_of(original)


def test_what_is_dropped() -> None:
    problem = problem_of(
        ["a", "b"],
        # Option 1 is dearer, 2 is equal to 0, 3 is larger, 4 is forbidden, 5 goes with nothing, 6 is smaller.
        [np.array([1.0, 2.0, 1.0, 1.0, np.inf, 0.0, 3.0]), np.array([1.0, 1.0])],
        [np.array([5.0, 5.0, 5.0, 6.0, 0.0, 0.0, 4.0]), np.array([1.0, 1.0])],
        {(0, 1): np.array([[1.0, 1.0]] * 5 + [[np.inf, np.inf], [1.0, 1.0]])},
    )
    assert drop_dominated(problem)[1] == ((0, 6), (0,))


def test_a_later_option_dominates_too() -> None:
    problem = problem_of(["a"], [np.array([2.0, 1.0, 0.5])], [np.array([3.0, 3.0, 4.0])], {})
    assert drop_dominated(problem)[1] == ((1, 2),)


def test_an_option_is_dropped_when_what_it_was_good_for_is() -> None:
    """Option 0 of a is better than 1 only beside option 0 of b, which is dominated; a is looked at first."""
    problem = problem_of(
        ["a", "b"],
        [np.array([1.0, 1.0]), np.array([9.0, 1.0])],
        [np.zeros(2)] * 2,
        {(0, 1): np.array([[1.0, 1.0], [3.0, 0.0]])},
    )
    assert drop_dominated(problem)[1] == ((1,), (1,))


def test_nothing_to_drop_is_the_same_problem() -> None:
    problem = problem_of(["a"], [np.array([1.0, 2.0])], [np.array([2.0, 1.0])], {})
    assert drop_dominated(problem)[0] is problem
