"""Price of memory: choices within a budget, and a bound of all of them, from eliminations without one.

[Note: price of memory]
A budget couples all nodes, so elimination cannot enforce it. A price can replace it: for seconds c, bytes m,
a budget B and a price p >= 0,

    g(p) = min over all choices of (c + p m) - p B

is at most the seconds of any choice within B, whose m - B is not positive: a lower bound for each p
(Lagrangian duality; H. Everett, "Generalized Lagrange Multiplier Method", Operations Research 11, 1963). The
minimizing choice is the cheapest of all that are no larger, so if it is within B it is a good answer too.

The best p is found with a line in the plane of (m, c), from the smallest choice, which is within B, to the
cheapest one, which is not. Its slope is the next price. The minimizer at that price is below the line, and
replaces one of the ends. If no choice is below the line, both ends are minimizers, and no other price gives a
higher bound. This takes five to fifteen eliminations, fewer than a bisection over prices.

A gap remains, since there need not be a choice where the line crosses B. Two steps narrow it. Nodes in which
the two ends differ form components; each component changes seconds and bytes independently, and those that
save most per byte are taken as long as they fit. And with the minimum for each option
(`Elimination.min_marginals`) options are ruled out that are in no choice within B below a given cost.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from colossalai.auto_parallel.solver._choice import ChoiceProblem, Floats, Options, restrict, sum_of
from colossalai.auto_parallel.solver._elimination import Elimination

ROUNDING = 1e-12
"""Relative rounding error of a sum of seconds in float64: closer values count as equal."""

_MOST_ENTRIES = 1 << 24  # entries of the tables of a second pass, which are all in memory


@dataclass(frozen=True, kw_only=True)
class PricedChoice:
    """Result of a search for the price of memory.

    Attributes:
        options: The cheapest choice found within the budget.
        cost: Its seconds.
        bound: Lower bound of the seconds of all choices within the budget.
        price: Seconds per byte at which `bound` was found.
    """

    options: Options
    cost: float
    bound: float
    price: float

    def is_within(self, gap: float) -> bool:
        """Whether no choice saves more than this fraction of the cost."""
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
    """Search for the price of memory with the best bound; see [Note: price of memory].

    Args:
        elimination: The elimination of the problem.
        budget: Bytes.
        smallest: A choice within the budget, of the least memory that is allowed.
        cheapest: The choice of the least cost, which is not within the budget.
        gap: Gap at which the search stops, as a fraction of the cost.
        end: Time to stop, in seconds of `time.monotonic`.
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
    # Try both starts: the best choice found, and a mix of the last ends of the line.
    for options in (best, mix(problem, small, cheap, budget=budget)):
        polished = polish(problem, options, budget=budget)
        if problem.cost_of(polished) < cost:
            best, cost = polished, problem.cost_of(polished)
    return PricedChoice(options=best, cost=cost, bound=min(bound, cost), price=price_of_bound)


def mix(problem: ChoiceProblem, small: Options, cheap: Options, *, budget: float) -> Options:
    """Move a choice towards a cheaper one, component by component, as long as the budget allows.

    Components are connected sets of nodes with different options, taken by the seconds saved per byte; see
    [Note: price of memory].
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
    """Return the connected component of the first node among some nodes."""
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
    """Change one node at a time, as long as this saves seconds and stays within the budget."""
    current, changes = options, True
    while changes:  # a change can free bytes for any node: check all again
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
            if problem.memory_of(tried) <= budget:  # the difference above can have a rounding error
                current, memory, changes = tried, problem.memory_of(tried), True
    return current


def _costs_of(problem: ChoiceProblem, node: int, options: Sequence[int]) -> Floats:
    """Return the seconds of each option of a node, with the options of its neighbors fixed."""
    tables = problem.tables_of[node].items()
    return sum_of([problem.cost_arrays[node], *(table[:, options[other]] for other, table in tables)])


def rule_out(
    elimination: Elimination, least_memory: Elimination, *, budget: float, price: float, limit: float
) -> tuple[ChoiceProblem, tuple[Options, ...]] | None:
    """Keep the options that can be in a choice within the budget of at most `limit` seconds.

    Args:
        elimination: The elimination of the problem.
        least_memory: The elimination of memory alone.
        budget: Bytes.
        price: Seconds per byte. The price of the best bound rules out most options.
        limit: Seconds.

    Returns:
        The smaller problem, and for each node the numbers of its remaining options. None: a node has none, so
        no choice within the budget takes at most `limit`.
    """
    kept: list[Options] = []
    costs, sizes = elimination.min_marginals(price), least_memory.min_marginals()
    for cost, size in zip(costs, sizes, strict=True):
        stays = (cost - price * budget <= limit) & (size <= budget * (1 + ROUNDING))
        kept.append(tuple(np.flatnonzero(stays).tolist()))
    return (restrict(elimination.problem, kept), tuple(kept)) if all(kept) else None


def can_rule_out(*eliminations: Elimination) -> bool:
    """Whether the tables of a second pass fit into memory together."""
    return all(
        each.num_kept + (each.largest.num_entries if each.largest else 0) <= _MOST_ENTRIES
        for each in eliminations
    )
