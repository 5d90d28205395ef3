"""Price of memory: choices within a budget, and a bound of all of them, from eliminations without one.

[Note: price of memory]
A budget couples all nodes, so no elimination can keep it. A price can stand for it: for seconds c, bytes m, a
budget B and a price p >= 0,

    g(p) = min over all choices of (c + p m) - p B

is no more than the seconds of any choice within B, whose m - B is not positive: a lower bound for each p
(Lagrangian duality; H. Everett, "Generalized Lagrange Multiplier Method", Operations Research 11, 1963). The
choice that has the minimum is the cheapest of all that are no larger, so one that is within B is good too.

The best p is found with a line in the plane of (m, c), from the smallest choice, which is within B, to the
cheapest one, which is not. Its slope is the next price. What has the minimum there lies below the line, and
becomes the one end or the other. If nothing lies below it, both ends have the minimum, and no other price
gives a higher bound. Five to fifteen eliminations do, fewer than bisection of a range of prices.

What remains is a gap, since no choice need lie where the line crosses B. Two things narrow it. Nodes in which
the two ends differ fall into parts that no edge joins; each part changes seconds and bytes on its own, and
those that save most for their bytes are taken as long as they fit. And with the minimum for each option
(`Elimination.min_marginals`) options are ruled out that stand in no choice within B below a given cost.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from colossalai.auto_parallel.solver._choice import ChoiceProblem, Floats, Options, restrict, sum_of
from colossalai.auto_parallel.solver._elimination import Elimination

ROUNDING = 1e-12
"""The part of a sum of seconds that float64 may lose: what is closer counts as equal."""

_MOST_ENTRIES = 1 << 24  # of the tables of a second pass, all of which are in memory


@dataclass(frozen=True, kw_only=True)
class PricedChoice:
    """What a search for the price of memory found.

    Attributes:
        options: The cheapest choice within the budget that was met.
        cost: Its seconds.
        bound: No choice within the budget takes fewer seconds.
        price: Seconds per byte at which `bound` was found.
    """

    options: Options
    cost: float
    bound: float
    price: float

    def is_within(self, gap: float) -> bool:
        """Whether no choice saves more than this part of the cost."""
        return self.cost - self.bound <= max(gap, ROUNDING) * self.cost


def search_price(
    elimination: Elimination,
    *,
    budget: float,
    smallest: Options,
    cheapest: Options,
    gap: float,
    end: float = math.inf,
) -> PricedChoice:
    """Search the price of memory with the best bound; see [Note: price of memory].

    Args:
        elimination: The elimination of the problem.
        budget: Bytes.
        smallest: A choice within the budget, of the least memory that is allowed.
        cheapest: The choice of the least cost, which is not within the budget.
        gap: Which part of the cost need not be saved.
        end: When to stop, in seconds of `time.monotonic`.
    """
    problem = elimination.problem
    small, cheap = smallest, cheapest
    best, cost = small, problem.cost_of(small)
    bound, price_of_bound = problem.cost_of(cheap), 0.0
    while cost - bound > max(gap, ROUNDING) * cost and time.monotonic() < end:
        saved = problem.cost_of(small) - problem.cost_of(cheap)
        price = saved / (problem.memory_of(cheap) - problem.memory_of(small))
        value, found = elimination.minimize(price)
        if value - price * budget > bound:
            bound, price_of_bound = value - price * budget, price
        line = problem.cost_of(small) + price * problem.memory_of(small)
        if value >= line - ROUNDING * line:
            break
        if problem.memory_of(found) > budget:
            cheap = found
            continue
        small = found
        if problem.cost_of(small) < cost:
            best, cost = small, problem.cost_of(small)
    # Either may be the better start: the best that was met, and the last ends of the line mixed.
    for options in (best, mix(problem, small, cheap, budget=budget)):
        polished = polish(problem, options, budget=budget)
        if problem.cost_of(polished) < cost:
            best, cost = polished, problem.cost_of(polished)
    return PricedChoice(options=best, cost=cost, bound=min(bound, cost), price=price_of_bound)


def mix(problem: ChoiceProblem, small: Options, cheap: Options, *, budget: float) -> Options:
    """Give a choice within the budget the parts of a cheaper one that save most for their bytes, if they fit.

    Parts are sets of nodes with different options that no edge joins; see [Note: price of memory].
    """
    differ = {node for node, (a, b) in enumerate(zip(small, cheap, strict=True)) if a != b}
    cost, memory = problem.cost_of(small), problem.memory_of(small)
    parts: list[tuple[float, Options]] = []
    while differ:
        part = _part_of(problem, min(differ), differ)
        differ -= part
        changed = _with_part(small, cheap, part)
        saved, bytes_more = cost - problem.cost_of(changed), problem.memory_of(changed) - memory
        if saved > 0:
            parts.append((saved / bytes_more if bytes_more > 0 else math.inf, tuple(sorted(part))))
    mixed = small
    for _, nodes in sorted(parts, key=lambda part: (-part[0], part[1])):
        changed = _with_part(mixed, cheap, set(nodes))
        if problem.memory_of(changed) <= budget:
            mixed = changed
    return mixed


def _part_of(problem: ChoiceProblem, first: int, nodes: set[int]) -> set[int]:
    """Return those of some nodes that edges between them join to the first."""
    part, waiting = {first}, [first]
    while waiting:
        for other in problem.tables_of[waiting.pop()]:
            if other in nodes and other not in part:
                part.add(other)
                waiting.append(other)
    return part


def _with_part(options: Options, other: Options, part: set[int]) -> Options:
    return tuple(b if node in part else a for node, (a, b) in enumerate(zip(options, other, strict=True)))


def polish(problem: ChoiceProblem, options: Options, *, budget: float) -> Options:
    """Change one node at a time, as long as that saves seconds and stays within the budget."""
    current, changes = options, True
    while changes:  # a change may free bytes for any node: all are looked at again
        changes = False
        memory = problem.memory_of(current)
        for node, sizes in enumerate(problem.memory_arrays):
            option = current[node]
            costs = _costs_of(problem, node, current)
            fitting = np.where(memory - sizes[option] + sizes <= budget, costs, np.inf)
            new = int(fitting.argmin())
            if not fitting[new] < costs[option] * (1 - ROUNDING):
                continue
            tried = (*current[:node], new, *current[node + 1 :])
            if problem.memory_of(tried) <= budget:  # the difference above may have lost a digit
                current, memory, changes = tried, problem.memory_of(tried), True
    return current


def _costs_of(problem: ChoiceProblem, node: int, options: Sequence[int]) -> Floats:
    """Return the seconds of each option of a node, with those of its neighbours as they are."""
    tables = problem.tables_of[node].items()
    return sum_of([problem.cost_arrays[node], *(table[:, options[other]] for other, table in tables)])


def rule_out(
    elimination: Elimination, least_memory: Elimination, *, budget: float, price: float, limit: float
) -> tuple[ChoiceProblem, tuple[Options, ...]] | None:
    """Keep the options that may stand in a choice within the budget of at most `limit` seconds.

    Args:
        elimination: The elimination of the problem.
        least_memory: The elimination of memory alone.
        budget: Bytes.
        price: Seconds per byte: where the bound is best, most is ruled out.
        limit: Seconds.

    Returns:
        The smaller problem, and for each node the numbers of the options that it has there. None: a node has
        none, so no choice within the budget takes at most `limit`.
    """
    kept: list[Options] = []
    costs, sizes = elimination.min_marginals(price), least_memory.min_marginals()
    for cost, size in zip(costs, sizes, strict=True):
        stays = (cost - price * budget <= limit) & (size <= budget * (1 + ROUNDING))
        kept.append(tuple(np.flatnonzero(stays).tolist()))
    return (restrict(elimination.problem, kept), tuple(kept)) if all(kept) else None


def can_rule_out(*eliminations: Elimination) -> bool:
    """Whether the tables of a second pass are small enough to be in memory together."""
    return all(
        each.num_kept + (each.largest.num_entries if each.largest else 0) <= _MOST_ENTRIES
        for each in eliminations
    )
