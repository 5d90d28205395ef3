"""Elimination of variables: the exact optimum of a choice problem whose graph is narrow.

Nodes are removed from the graph one after the other. Removing a node yields its least cost for each
combination of its neighbors' options: a table over the neighbors, which are joined from then on. Graphs of
models are narrow (treewidth at most 5 for transformers), so a greedy order keeps these tables small. The
order is computed once, and then run for many prices of memory.

The method is bucket elimination, R. Dechter (Artificial Intelligence 113, 1999), in the algebra of minimum
and sum; the order is greedy, U. Kjaerulff, "Triangulation of Graphs" (R-90-09, Aalborg 1990).

[Note: tables of an elimination]
The bucket of a node has its own costs, the edges to neighbors that are removed later, and the tables of its
children, nodes removed before. Its scope is the node and those neighbors, in the order of removal; all axes
of all tables have this order, so the first axis of every table in a bucket is the bucket's own node, and the
minimum over the first axis is the table for the parent, the bucket of the second node of the scope. Buckets
with these parents form trees. The minimum over all choices, given the option of one node (`min_marginals`),
needs a second pass from the roots: a parent passes to each bucket the cost of everything outside of the
bucket's subtree, which is the minimum of the parent's sum without the table of this bucket. The sum is
computed for each child separately, from partial sums: a difference would lose digits, and is undefined at
inf - inf.
"""

import heapq
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce

import numpy as np
import numpy.typing as npt

from colossalai.auto_parallel.solver._choice import (
    BudgetError,
    ChoiceProblem,
    ChoiceSolution,
    Floats,
    Options,
    sum_of,
)

Shape = tuple[int, ...]

LARGEST_TABLE = 50_000_000
"""Entries of the largest table over which a minimum is taken; it is computed one option of its node at a
time, which for 15 options takes 27 MB."""

_LARGEST_AT_ONCE = 1 << 20  # entries of the largest tables of several problems together
_AT_ONCE = 1 << 15  # entries below which the whole table of a bucket is cheaper than a loop over options


@dataclass(frozen=True, kw_only=True)
class EliminatedNode:
    """The removal of a node from the graph; see [Note: tables of an elimination].

    Attributes:
        scope: The node, and its neighbors at that moment in the order of removal.
        shape: The number of options of each node of the scope.
        edges: Neighbors with edges of the problem, each with the shape that broadcasts the table to `shape`.
        children: The nodes whose tables are added up, each with such a shape.
    """

    scope: tuple[int, ...]
    shape: Shape
    edges: tuple[tuple[int, Shape], ...]
    children: tuple[tuple[int, Shape], ...]

    @property
    def num_entries(self) -> int:
        """The size of the table before the minimum is taken."""
        return math.prod(self.shape)


class Elimination:
    """The elimination of the nodes of a problem, to be run for any price of memory.

    The graph omits edges of zeros, which join nothing, and edges to a node with a single option, which are
    costs of the other node.
    """

    def __init__(self, problem: ChoiceProblem) -> None:
        self.problem = problem
        self._own = [costs.copy() for costs in problem.cost_arrays]
        self._tables: dict[tuple[int, int], Floats] = {}
        self._added: list[tuple[int, Floats]] = []  # costs of nodes that are edges to single options
        for (a, b), table in problem.edge_arrays.items():
            if problem.num_options[a] == 1:
                self._added.append((b, table[0]))
            elif problem.num_options[b] == 1:
                self._added.append((a, table[:, 0]))
            elif table.any():
                self._tables[a, b] = table
        for node, row in self._added:
            self._own[node] += row
        self.buckets = _lowered(tuple(sorted(self._tables)), tuple(problem.num_options))
        self._edges = {
            bucket.scope[0]: [self._table_from(bucket.scope[0], *edge) for edge in bucket.edges]
            for bucket in self.buckets
        }

    @property
    def width(self) -> int:
        """The largest number of neighbors of a node at its removal."""
        return max((len(bucket.scope) - 1 for bucket in self.buckets), default=0)

    @cached_property
    def largest(self) -> EliminatedNode | None:
        """The bucket of the largest table. None: there are no nodes."""
        return max(self.buckets, key=lambda bucket: bucket.num_entries, default=None)

    @property
    def is_small(self) -> bool:
        """Whether no table exceeds `LARGEST_TABLE`."""
        return self.largest is None or self.largest.num_entries <= LARGEST_TABLE

    @property
    def num_kept(self) -> int:
        """The entries of all tables that buckets pass to their parents."""
        return sum(bucket.num_entries // bucket.shape[0] for bucket in self.buckets)

    def check_size(self) -> None:
        """Refuse a graph that is too wide.

        Raises:
            ValueError: A table would exceed `LARGEST_TABLE`.
        """
        if self.largest is None or self.is_small:
            return
        names = [self.problem.names[node] for node in self.largest.scope]
        raise ValueError(
            f"elimination would need a table of {self.largest.num_entries:,} entries over the options of "
            f"{', '.join(names)}; at most {LARGEST_TABLE:,} are made: give these nodes fewer options or "
            "edges, or solve with the ILP"
        )

    def minimize(self, price: float = 0.0) -> tuple[float, Options]:
        """Return the least cost + price * memory, and a choice that has it.

        Among equally good options of a node, given its neighbors', the first is chosen. If no choice is
        allowed, the minimum is math.inf.
        """
        told: dict[int, Floats] = {}
        best: dict[int, npt.NDArray[np.unsignedinteger]] = {}
        total = 0.0
        for bucket in self.buckets:
            node = bucket.scope[0]
            # The axis of the node is reduced in `value`; its option is looked up once its scope has options.
            value, best[node] = _minimum(self._sum_parts(bucket, told, price), bucket.shape)
            for child, _ in bucket.children:
                del told[child]  # not needed again: free the table
            if len(bucket.scope) == 1:
                total += float(value)
            else:
                told[node] = value
        options = [0] * len(self._own)
        for bucket in reversed(self.buckets):  # nodes that were removed later already have an option
            node, *others = bucket.scope
            options[node] = int(best[node][tuple(options[other] for other in others)])
        return total, tuple(options)

    def least_costs(self, costs: Sequence[Floats], num_problems: int) -> Floats:
        """Return the least costs of several problems with the edges of this one.

        Args:
            costs: Costs of each node, (options, problems).
            num_problems: Number of problems.
        """
        at_once = max(_LARGEST_AT_ONCE // (1 if self.largest is None else self.largest.num_entries), 1)
        if num_problems > at_once:
            found = []
            for begin in range(0, num_problems, at_once):
                some = [row[:, begin : begin + at_once] for row in costs]
                found.append(self.least_costs(some, min(at_once, num_problems - begin)))
            return np.concatenate(found)
        own = [row.copy() for row in costs]
        for node, row in self._added:
            own[node] += row[:, None]
        told: dict[int, Floats] = {}
        total = np.zeros(num_problems)
        for bucket in self.buckets:
            node, *others = bucket.scope
            parts_of_sum = [own[node].reshape(-1, *[1] * len(others), num_problems)]
            parts_of_sum += [table[..., None] for table in self._edges[node]]
            parts_of_sum += [told.pop(child).reshape(*fit, num_problems) for child, fit in bucket.children]
            value = _minimum_of_several(parts_of_sum, bucket.shape)
            if others:
                told[node] = value
            else:
                total = total + value
        return total

    def cheapest_first(self) -> Iterator[tuple[float, Options]]:
        """Yield all allowed choices with their costs, cheapest first.

        Nodes get options in reverse order of removal. The least cost of the nodes without an option is then
        known from their tables. So a heap of partial choices yields complete ones in order (A*), and only
        expands a partial choice if it begins the next complete one. All tables are kept, as in
        `min_marginals`.
        """
        told: dict[int, Floats] = {}
        for bucket in self.buckets:
            told[bucket.scope[0]] = _minimum(self._sum_parts(bucket, told), bucket.shape)[0]
        order = self.buckets[::-1]
        least = sum(float(told[bucket.scope[0]]) for bucket in order if len(bucket.scope) == 1)
        begun: list[tuple[float, Options]] = [(least, ())]  # options in the order of `order`
        place = {bucket.scope[0]: number for number, bucket in enumerate(order)}
        while begun:
            cost, options = heapq.heappop(begun)
            if math.isinf(cost):
                return
            if len(options) == len(order):
                yield cost, tuple(options[place[node]] for node in range(len(order)))
                continue
            bucket = order[len(options)]
            taken = tuple(options[place[other]] for other in bucket.scope[1:])
            row = sum_of(_row(part, taken) for part in self._sum_parts(bucket, told))
            # Cost relative to the best option, which thus costs exactly as much as its prefix: a rounding
            # error above it would put all other prefixes first, and there are many equal choices.
            for option, more in enumerate((row - row.min()).tolist()):
                heapq.heappush(begun, (cost + more, (*options, option)))

    def min_marginals(self, price: float = 0.0) -> list[Floats]:
        """Return for each option of each node the least cost + price * memory of a choice that has it.

        This computes whole tables, and keeps all tables passed to parents: 8 bytes for each of `num_kept`.
        """
        told: dict[int, Floats] = {}
        for bucket in self.buckets:
            told[bucket.scope[0]] = _minimum(self._sum_parts(bucket, told, price), bucket.shape)[0]
        # For each bucket the cost of everything outside of its subtree, over the scope without its node.
        roots = [bucket.scope[0] for bucket in self.buckets if len(bucket.scope) == 1]
        outside = dict(zip(roots, _sums_without_each([told[node] for node in roots]), strict=True))
        found: list[Floats] = [np.empty(0)] * len(self._own)
        for bucket in reversed(self.buckets):
            node = bucket.scope[0]
            own = sum_of([*self._parts(bucket, price), outside.pop(node)[None]])
            inner = _pick(told, bucket)
            found[node] = sum_of([own, *inner]).reshape(bucket.shape[0], -1).min(axis=1)
            for (child, fit), rest in zip(bucket.children, _sums_without_each(inner), strict=True):
                # An axis with extent 1 is in the scope of this child only: no rest depends on it.
                gone = tuple(axis for axis, extent in enumerate(fit) if extent == 1)
                outside[child] = (own + rest).min(axis=gone)
        return found

    def _parts(self, bucket: EliminatedNode, price: float) -> list[Floats]:
        """Return the terms of a bucket without its children's tables, each with one axis per scope node."""
        node = bucket.scope[0]
        own = self._own[node] + price * self.problem.memory_arrays[node]
        return [own.reshape(-1, *[1] * (len(bucket.scope) - 1)), *self._edges[node]]

    def _sum_parts(
        self, bucket: EliminatedNode, told: Mapping[int, Floats], price: float = 0.0
    ) -> list[Floats]:
        """Return all terms of a bucket."""
        return [*self._parts(bucket, price), *_pick(told, bucket)]

    def _table_from(self, node: int, other: int, fit: Shape) -> Floats:
        table = self._tables[node, other] if node < other else self._tables[other, node].T
        return table.reshape(fit)


@lru_cache(maxsize=64)
def _lowered(edges: tuple[tuple[int, int], ...], counts: tuple[int, ...]) -> tuple[EliminatedNode, ...]:
    """Return the buckets of the better of two greedy orders, by the sum of their tables.

    Cached: a search solves one graph with hundreds of costs, and the order does not depend on them.

    Args:
        edges: The pairs of joined nodes, the lower number first.
        counts: The number of options of each node.
    """
    neighbours = [0] * len(counts)  # bit sets: an order takes unions and counts of neighbors
    for a, b in edges:
        neighbours[a] |= 1 << b
        neighbours[b] |= 1 << a
    orders = (
        _greedy_order(neighbours, counts, lambda fill, size: (fill, size)),
        _greedy_order(neighbours, counts, lambda fill, size: (size, fill)),
    )
    cliques = min(orders, key=lambda order: sum(math.prod(counts[n] for n in each) for each in order))
    position = {clique[0]: number for number, clique in enumerate(cliques)}
    children: dict[int, list[tuple[int, ...]]] = {}  # scopes of the children of a node
    buckets: list[EliminatedNode] = []
    for node, *others in cliques:
        scope = (node, *sorted(others, key=position.__getitem__))

        def fit_of(inner: Collection[int], scope: tuple[int, ...] = scope) -> Shape:
            return tuple(counts[each] if each in inner else 1 for each in scope)

        joined = [other for other in scope[1:] if neighbours[node] >> other & 1]
        inner = children.pop(node, [])
        buckets.append(
            EliminatedNode(
                scope=scope,
                shape=fit_of(scope),
                edges=tuple((other, fit_of((node, other))) for other in joined),
                children=tuple((each[0], fit_of(each[1:])) for each in inner),
            )
        )
        if others:
            children.setdefault(scope[1], []).append(scope)
    return tuple(buckets)


def _pick(told: Mapping[int, Floats], bucket: EliminatedNode) -> list[Floats]:
    """Return the tables of the children of a bucket, shaped for it."""
    return [told[child].reshape(fit) for child, fit in bucket.children]


def _row(part: Floats, taken: Sequence[int]) -> Floats:
    """Return the first axis of a table at given indices of the others; an axis of extent 1 has one."""
    at = [index if extent > 1 else 0 for index, extent in zip(taken, part.shape[1:], strict=True)]
    row: Floats = np.moveaxis(part, 0, -1)[tuple(at)]
    return row


def _sums_without_each(parts: Sequence[Floats]) -> list[Floats]:
    """Return for each part the sum of all other parts."""
    zero = np.zeros(())
    before = list(itertools.accumulate(parts, np.add, initial=zero))[:-1]
    after = list(itertools.accumulate(reversed(parts), np.add, initial=zero))[-2::-1]
    return [left + right for left, right in zip(before, after, strict=True)]


def _minimum(
    parts: Sequence[Floats], shape: tuple[int, ...]
) -> tuple[Floats, npt.NDArray[np.unsignedinteger]]:
    """Return the minimum of a sum over the first axis, and the first index that has it.

    Args:
        parts: The terms, each broadcastable to `shape`, which is their common shape.
        shape: The shape of the sum.
    """
    dtype = np.uint8 if shape[0] <= 256 else np.uint32
    if math.prod(shape) <= _AT_ONCE:
        total = sum_of(parts)
        return total.min(axis=0), total.argmin(axis=0).astype(dtype)
    parts = sorted(parts, key=lambda part: part.size)  # the small sums first
    value = np.full(shape[1:], np.inf)
    index = np.zeros(shape[1:], dtype=dtype)
    for number in range(shape[0]):
        each = sum_of(part[number] for part in parts)
        np.copyto(index, number, where=each < value)
        np.minimum(value, each, out=value)
    return value, index


def _minimum_of_several(parts: Sequence[Floats], shape: Shape) -> Floats:
    """Return the minimum of sums over the first axis, added in the order of `_minimum`.

    Args:
        parts: The terms, each broadcastable to `shape` and a last axis of problems.
        shape: The shape of a sum.
    """
    if math.prod(shape) <= _AT_ONCE:
        return sum_of(parts).min(axis=0)  # type: ignore[no-any-return]
    parts = sorted(parts, key=lambda part: math.prod(part.shape[:-1]))
    return reduce(np.minimum, (sum_of(part[number] for part in parts) for number in range(shape[0])))


def _greedy_order(
    neighbours: Sequence[int], counts: Sequence[int], rank: Callable[[int, int], tuple[int, int]]
) -> list[list[int]]:
    """Remove nodes from a graph, at each step the first node of the lowest rank.

    Args:
        neighbours: Neighbors of each node, as bits.
        counts: The number of options of each node.
        rank: Rank of a node, from the number of pairs of neighbors newly joined and the size of its table.

    Returns:
        For each node in order of removal: the node, and its neighbors at that moment.
    """
    joined = list(neighbours)

    def rank_of(node: int) -> tuple[int, int]:
        around = joined[node]
        each = _bits(around)
        missing = sum((around & ~joined[other]).bit_count() - 1 for other in each)
        return rank(missing // 2, counts[node] * math.prod(counts[other] for other in each))

    ranks = {node: rank_of(node) for node in range(len(joined))}
    heap = [(each, node) for node, each in ranks.items()]
    heapq.heapify(heap)
    order = []
    while ranks:
        found, node = heapq.heappop(heap)
        if ranks.get(node) != found:
            continue  # outdated: the heap also has the node with its new rank
        del ranks[node]
        around = joined[node]
        others = _bits(around)
        order.append([node, *others])
        changed = around  # nodes to rank again: the neighbors, and common neighbors of newly joined pairs
        for other in others:
            joined[other] &= ~(1 << node)
        for other in others:
            for new in _bits(around & ~joined[other] & ~(1 << other)):
                changed |= joined[other] & joined[new]  # two of their neighbors are now joined
                joined[other] |= 1 << new
                joined[new] |= 1 << other
        for other in _bits(changed):
            if ranks[other] != (now := rank_of(other)):
                ranks[other] = now
                heapq.heappush(heap, (now, other))
    return order


def _bits(number: int) -> list[int]:
    found = []
    while number:
        low = number & -number
        found.append(low.bit_length() - 1)
        number ^= low
    return found


def solve_by_elimination(problem: ChoiceProblem, *, price: float = 0.0) -> ChoiceSolution:
    """Return the choice of the least cost + price * memory.

    The bound is for choices without a budget: the cost itself without a price, else 0.

    Args:
        problem: The problem.
        price: Seconds per byte.

    Raises:
        ValueError: `price` is negative or not finite, or a table would exceed `LARGEST_TABLE`.
        BudgetError: No choice is allowed.
    """
    if not 0 <= price < math.inf:
        raise ValueError(f"price={price}: give a finite number of seconds per byte, 0 or more")
    elimination = Elimination(problem)
    elimination.check_size()
    value, options = elimination.minimize(price)
    if value == math.inf:
        raise nothing_allowed(problem)
    cost = problem.cost_of(options)
    return ChoiceSolution(
        options=options,
        cost=cost,
        memory=problem.memory_of(options),
        bound=0.0 if price else cost,
        method="elimination",
    )


def elimination_width(problem: ChoiceProblem) -> int:
    """Return the largest number of neighbors of a node at its removal: tables have one axis more."""
    return Elimination(problem).width


def nothing_allowed(problem: ChoiceProblem) -> BudgetError:
    """Return the error of a problem whose every choice has an infinite cost."""
    blocked = [
        name
        for name, costs, tables in zip(problem.names, problem.cost_arrays, problem.tables_of, strict=True)
        if not np.stack([np.isfinite(costs), *(np.isfinite(t).any(axis=1) for t in tables.values())])
        .all(axis=0)
        .any()
    ]
    where = f": node {blocked[0]!r} has no option that any neighbour allows" if blocked else ""
    return BudgetError(
        f"no choice is allowed, whatever the budget{where}; allow more options or pairs of options", math.inf
    )
