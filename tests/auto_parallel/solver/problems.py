"""Random choice problems that are small enough to try every choice, and what trying them finds."""

import itertools
import math
from collections.abc import Iterator

import numpy as np
from hypothesis import strategies as st

from colossalai.auto_parallel.solver._choice import ChoiceProblem, Floats, problem_of


@st.composite
def choice_problems(
    draw: st.DrawFn, *, max_nodes: int = 8, max_options: int = 4, edge_share: float = 0.5
) -> ChoiceProblem:
    """Draw a problem: any graph, with isolated nodes, forbidden pairs and choices of equal cost."""
    counts = draw(st.lists(st.integers(1, max_options), min_size=1, max_size=max_nodes))
    # What is large is drawn by a seed: one number shrinks, thousands do not.
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    is_tied, forbidden = draw(st.booleans()), draw(st.sampled_from([0.0, 0.1, 0.4]))

    def seconds(*shape: int) -> Floats:
        values = rng.integers(0, 4, shape).astype(float) if is_tied else rng.random(shape)
        return np.where(rng.random(shape) < forbidden, np.inf, values)

    pairs = [pair for pair in itertools.combinations(range(len(counts)), 2) if rng.random() < edge_share]
    return problem_of(
        [f"node{number}" for number in range(len(counts))],
        [seconds(count) for count in counts],
        [rng.integers(0, 10, count).astype(float) for count in counts],
        {(a, b): seconds(counts[a], counts[b]) for a, b in pairs},
    )


def every_choice(problem: ChoiceProblem) -> Iterator[tuple[int, ...]]:
    """Yield all choices, allowed or not."""
    return itertools.product(*map(range, problem.num_options))


class BruteForce:
    """The seconds and bytes of every choice."""

    def __init__(self, problem: ChoiceProblem) -> None:
        counts = problem.num_options
        self.cost, self.memory = np.zeros(counts), np.zeros(counts)

        def along(values: Floats, *nodes: int) -> Floats:
            return values.reshape([count if node in nodes else 1 for node, count in enumerate(counts)])

        for node, (costs, memory) in enumerate(zip(problem.costs, problem.memory, strict=True)):
            self.cost = self.cost + along(np.array(costs), node)
            self.memory = self.memory + along(np.array(memory), node)
        for (a, b), table in problem.edges.items():
            self.cost = self.cost + along(np.array(table), a, b)

    def least_cost(self, budget: float = math.inf, *, price: float = 0.0) -> float:
        """Return the least cost + price * memory within a budget; math.inf: there is no choice."""
        return float(np.where(self.memory <= budget, self.cost + price * self.memory, np.inf).min())

    def least_bytes(self) -> float:
        """Return the least memory of a choice that is allowed; math.inf: none is."""
        return float(np.where(np.isfinite(self.cost), self.memory, np.inf).min())


def chain(num_nodes: int, num_options: int, *more: tuple[int, int], seed: int = 0) -> ChoiceProblem:
    """Return a chain of nodes with random costs, and more edges."""
    rng = np.random.default_rng(seed)
    pairs = [*((node, node + 1) for node in range(num_nodes - 1)), *more]
    return problem_of(
        [f"node{number}" for number in range(num_nodes)],
        list(rng.random((num_nodes, num_options))),
        list(np.ceil(1e9 * rng.random((num_nodes, num_options)))),
        {pair: rng.random((num_options, num_options)) for pair in sorted(pairs)},
    )
