"""Solver of choice problems: elimination, a price of memory, and an integer program for the remaining gap.

Cheap methods come first. Without a budget, or if the fastest choice fits, one elimination is the exact
answer. With a budget a price of memory (`_price.py`) gives an answer and a bound; only if their gap is too
large, an integer linear program (HiGHS, by SciPy) closes it over the options that are not excluded yet.

[Note: choices as an integer program]
A variable x[i, s] is 1 if node i takes option s; those of a node add up to 1. A variable y[i, j, s, t]
between 0 and 1 is 1 if the edge (i, j) has options s and t:

    sum over t of y[i, j, s, t] = x[i, s],    sum over s of y[i, j, s, t] = x[j, t]

so y is an integer if x is. Forbidden pairs have no y. The budget is one row, in which each node counts the
bytes of its option beyond its smallest one. HiGHS has a row tolerance of 1e-6 and stops at a gap of 1e-6, in
any units: seconds and bytes are scaled to numbers of about 1e4, so that neither matters. Its result is
rounded and counted exactly; if it exceeds the budget, the program is solved again with a budget that is lower
by the tolerance, and the bound remains that of the first result.
"""

import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from colossalai.auto_parallel.solver._choice import (
    BudgetError,
    ChoiceProblem,
    ChoiceSolution,
    Floats,
    Options,
    drop_dominated,
    problem_of,
)
from colossalai.auto_parallel.solver._elimination import Elimination, nothing_allowed
from colossalai.auto_parallel.solver._price import (
    ROUNDING,
    can_rule_out,
    rule_out,
    search_price,
)

_SCALE = 1e4  # magnitude of scaled seconds and bytes, see [Note: choices as an integer program]
_TOLERANCE = 1e-6  # row tolerance of HiGHS
_INFEASIBLE = 2  # a status of scipy.optimize.milp
_LEAST_S = 0.1  # least seconds of the integer program, even if the time is up


class _BoundedChoice(NamedTuple):
    """A choice, a bound of all choices within the budget, and the last method that was needed."""

    options: Options
    bound: float
    method: str


class _ProgramResult(NamedTuple):
    """Result of an integer program.

    Attributes:
        options: The best choice found. None: none was found.
        bound: Lower bound of the cost. math.inf: no choice is feasible.
    """

    options: Options | None
    bound: float


def solve_choices(
    problem: ChoiceProblem, *, budget: float | None = None, time_limit: float = 10.0, gap: float = 1e-3
) -> ChoiceSolution:
    """Return a choice of the least seconds within a budget of bytes, and a bound of its quality.

    The same problem has the same answer in every process, unless the time ends the search. An elimination or
    a step of HiGHS is not interrupted, so one of them can exceed the limit.

    Args:
        problem: The problem.
        budget: Bytes. None: no limit.
        time_limit: Seconds after which the best choice so far is returned.
        gap: Gap at which the search stops, as a fraction of the seconds.

    Raises:
        ValueError: `budget` or `gap` is negative, `time_limit` is not above 0, or SciPy is needed and not
            installed.
        BudgetError: No choice is allowed, or none within the budget.
        TimeoutError: `time_limit` ended before any choice was found: the graph is too wide for elimination.
    """
    if budget is not None and not budget >= 0:
        raise ValueError(f"budget={budget}: give bytes of 0 or more, or None for as many as it takes")
    if not time_limit > 0:
        raise ValueError(f"time_limit={time_limit}: give seconds above 0")
    if not gap >= 0:
        raise ValueError(f"gap={gap}: give a part of the cost of 0 or more")
    end = time.monotonic() + time_limit
    smaller, kept = drop_dominated(problem)
    elimination, least_memory = Elimination(smaller), Elimination(_memory_alone(smaller))
    limit = math.inf if budget is None else budget
    if elimination.is_small and least_memory.is_small:
        found = _by_elimination(elimination, least_memory, budget=limit, gap=gap, end=end)
    else:
        found = _by_ilp(smaller, limit, gap=gap, end=end)
    options = _original(found.options, kept)
    cost = problem.cost_of(options)
    return ChoiceSolution(
        options=options,
        cost=cost,
        memory=problem.memory_of(options),
        bound=min(found.bound, cost),
        method=found.method,
    )


def _original(options: Options, kept: Sequence[Options]) -> Options:
    return tuple(numbers[option] for numbers, option in zip(kept, options, strict=True))


def _memory_alone(problem: ChoiceProblem) -> ChoiceProblem:
    """Return the problem with bytes as costs, with the same options and pairs allowed."""
    pairs = problem.edge_arrays.items()
    costs = zip(problem.cost_arrays, problem.memory_arrays, strict=True)
    return problem_of(
        problem.names,
        [np.where(np.isfinite(seconds), size, np.inf) for seconds, size in costs],
        problem.memory_arrays,
        {pair: np.where(np.isinf(table), np.inf, 0.0) for pair, table in pairs if np.isinf(table).any()},
    )


def _by_elimination(
    elimination: Elimination, least_memory: Elimination, *, budget: float, gap: float, end: float
) -> _BoundedChoice:
    """Solve a problem whose graph is narrow."""
    problem = elimination.problem
    value, cheapest = elimination.minimize()
    if value == math.inf:
        raise nothing_allowed(problem)
    if problem.memory_of(cheapest) <= budget:
        return _BoundedChoice(cheapest, problem.cost_of(cheapest), "elimination")
    smallest = least_memory.minimize()[1]
    if problem.memory_of(smallest) > budget:
        raise _too_small(budget, problem.memory_of(smallest))
    priced = search_price(elimination, budget=budget, smallest=smallest, cheapest=cheapest, gap=gap, end=end)
    if priced.is_within(gap) or time.monotonic() > end:
        return _BoundedChoice(priced.options, priced.bound, "price")
    # All remaining options have to be faster than this limit, which is a bound if there are none. (It is a
    # little less than the gap, so that the rounding of this very line does not exceed it.)
    limit = priced.cost * (1 - max(0.999 * gap, ROUNDING))
    left, kept = problem, None
    if can_rule_out(elimination, least_memory):
        ruled = rule_out(elimination, least_memory, budget=budget, price=priced.price, limit=limit)
        if ruled is None:
            return _BoundedChoice(priced.options, limit, "price")
        left, kept = ruled
    answer = _run_highs(left, budget, gap=gap, unit=priced.cost, end=end)
    options = priced.options
    if answer.options is not None:
        found = answer.options if kept is None else _original(answer.options, kept)
        options = min(options, found, key=problem.cost_of)
    bound = answer.bound if kept is None else min(answer.bound, limit)
    return _BoundedChoice(options, max(bound, priced.bound), "ilp")


def _by_ilp(problem: ChoiceProblem, budget: float, *, gap: float, end: float) -> _BoundedChoice:
    """Solve a problem whose graph is too wide for elimination."""
    answer = _run_highs(problem, budget, gap=gap, unit=None, end=end)
    if answer.options is not None:
        return _BoundedChoice(answer.options, answer.bound, "ilp")
    memory_alone = _memory_alone(problem)
    small = _run_highs(memory_alone, math.inf, gap=0.0, unit=None, end=end)
    if small.bound == math.inf:
        raise nothing_allowed(problem)
    if small.options is not None and problem.memory_of(small.options) <= budget:
        return _BoundedChoice(small.options, answer.bound, "ilp")
    if answer.bound == math.inf:
        least_bytes = small.bound if small.options is None else problem.memory_of(small.options)
        raise _too_small(budget, least_bytes)
    raise TimeoutError(
        f"no choice for {len(problem.names)} nodes was found in time, and their graph is too wide for "
        "elimination: give a higher time_limit, or fewer options or edges"
    )


def _too_small(budget: float, least_bytes: float) -> BudgetError:
    return BudgetError(
        f"no allowed choice keeps within the budget of {budget:,.0f} bytes: the smallest one needs "
        f"{least_bytes:,.0f}; give at least that",
        least_bytes,
    )


def _run_highs(
    problem: ChoiceProblem, budget: float, *, gap: float, unit: float | None, end: float
) -> _ProgramResult:
    """Solve a problem as an integer program; see [Note: choices as an integer program].

    Args:
        problem: The problem.
        budget: Bytes. math.inf: no limit.
        gap: The relative gap at which HiGHS stops.
        unit: Approximate seconds of the answer. None: they are estimated.
        end: Time to stop, in seconds of `time.monotonic`.
    """
    program = IntegerProgram(problem, unit=unit)
    limit, bound = budget, None
    while True:
        x, lower = program.solve(limit, gap=gap, seconds=max(end - time.monotonic(), _LEAST_S))
        bound = lower if bound is None else bound
        if x is None:
            return _ProgramResult(None, bound)
        options = program.options_of(x)
        excess = problem.memory_of(options) - budget
        if excess <= 0:
            return _ProgramResult(options, bound)
        limit -= excess + 2 * _TOLERANCE * program.memory_unit


class IntegerProgram:
    """A problem as an integer program, lowered to matrices; see [Note: choices as an integer program].

    Args:
        problem: The problem.
        unit: Approximate seconds of the answer. None: they are estimated.
    """

    def __init__(self, problem: ChoiceProblem, *, unit: float | None) -> None:
        self._optimize, self._sparse = _scipy()
        self.counts = problem.num_options
        self._firsts = np.cumsum([0, *self.counts])  # first column of each node; columns of edges follow
        spare = [size - size.min() for size in problem.memory_arrays]
        self._least_bytes = math.fsum(size.min() for size in problem.memory_arrays)
        self.memory_unit = max((float(size.max()) for size in spare), default=0.0) / _SCALE or 1.0
        costs = [*problem.cost_arrays]
        rows = [np.repeat(np.arange(len(self.counts)), self.counts)]
        columns, values = [np.arange(self._firsts[-1])], [np.ones(self._firsts[-1])]
        num_rows, num_columns = len(self.counts), int(self._firsts[-1])
        for (a, b), table in problem.edge_arrays.items():
            own, other = np.nonzero(np.isfinite(table))
            pairs = num_columns + np.arange(len(own))
            costs.append(table[own, other])
            # One row for each option of either node: the sum of its pairs equals its variable.
            for node, options in ((a, own), (b, other)):
                each = np.arange(self.counts[node])
                rows += [num_rows + options, num_rows + each]
                columns += [pairs, self._firsts[node] + each]
                values += [np.ones(len(pairs)), -np.ones(len(each))]
                num_rows += len(each)
            num_columns += len(own)
        cost = np.concatenate([np.empty(0), *costs])
        self._is_allowed = np.isfinite(cost)
        finite = np.where(self._is_allowed, cost, 0.0)
        self._unit = (_estimate(problem) if unit is None else unit) / _SCALE or 1.0
        self._cost = finite / self._unit
        self._spare = np.concatenate([np.empty(0), *spare]) / self.memory_unit
        self._matrix = self._sparse.csr_array(
            (np.concatenate(values), (np.concatenate(rows), np.concatenate(columns))),
            shape=(num_rows, num_columns),
        )

    def solve(self, budget: float, *, gap: float, seconds: float) -> tuple[Floats | None, float]:
        """Return the best values of the variables, None if none were found, and a bound of the cost.

        Args:
            budget: Bytes. math.inf: no limit.
            gap: The relative gap at which HiGHS stops.
            seconds: The time limit.
        """
        num_rows, num_columns = self._matrix.shape
        num_nodes, num_own = len(self.counts), len(self._spare)
        right = np.concatenate([np.ones(num_nodes), np.zeros(num_rows - num_nodes)])
        constraints = [self._optimize.LinearConstraint(self._matrix, right, right)]
        if budget < math.inf:
            row = self._sparse.csr_array(
                (self._spare, (np.zeros(num_own, int), np.arange(num_own))), shape=(1, num_columns)
            )
            left = (budget - self._least_bytes) / self.memory_unit
            constraints.append(self._optimize.LinearConstraint(row, -np.inf, left))
        result = self._optimize.milp(
            self._cost,
            integrality=np.arange(num_columns) < num_own,
            bounds=self._optimize.Bounds(0.0, self._is_allowed.astype(float)),
            constraints=constraints,
            options={"time_limit": seconds, "mip_rel_gap": gap},
        )
        if result.status == _INFEASIBLE:
            return None, math.inf
        bound = result.mip_dual_bound
        return result.x, 0.0 if bound is None else max(0.0, float(bound) * self._unit)

    def options_of(self, x: Floats) -> Options:
        """Return the choice for values of the variables."""
        starts = self._firsts[:-1].tolist()
        return tuple(int(x[s : s + n].argmax()) for s, n in zip(starts, self.counts, strict=True))


def _estimate(problem: ChoiceProblem) -> float:
    """Return the magnitude of the cost: a lower bound of it, or the median of the nonzero values."""
    parts = [*problem.cost_arrays, *problem.edge_arrays.values()]
    least = sum(float(part.min()) for part in parts)
    if 0 < least < math.inf:
        return least
    values = np.concatenate([np.empty(0), *(part.ravel() for part in parts)])
    values = values[(values > 0) & np.isfinite(values)]
    return float(np.median(values)) if len(values) else 0.0


def _scipy() -> tuple[Any, Any]:
    """Import SciPy's optimizers and sparse matrices.

    Raises:
        ValueError: SciPy is not installed.
    """
    try:
        from scipy import optimize, sparse
    except ModuleNotFoundError as error:
        raise ValueError(
            "a budget that elimination alone does not meet within the gap needs SciPy, which is not "
            'installed: pip install "colossalai[auto]", or give a larger gap'
        ) from error
    return optimize, sparse
