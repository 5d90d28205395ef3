"""Choice problem: one option for each node of a graph, least seconds within a budget of bytes.

An option is a way to run a part of the model. It has its own seconds and bytes, and seconds that depend on
the option of each neighbor in the graph: the conversion of tensors between the two. This module has the
problem and its answers as values, and two ways to make a problem smaller before it is solved.

[Note: dominated options]
An option is dominated if another option of the same node costs no more, keeps no more memory, and costs no
more with any option of any neighbor. In every solution the other option can replace it, at no higher cost and
no larger size. So the optimum for every budget, and without one, survives when the dominated one is dropped.
Dropping an option of a node removes columns from the comparisons at its neighbors, which are therefore
checked again. Of options that dominate each other the first is kept. Options that no allowed solution
contains are dropped too: options of infinite cost, or incompatible with all options of a neighbor.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Booleans = npt.NDArray[np.bool_]
Options = tuple[int, ...]
Table = tuple[tuple[float, ...], ...]


class BudgetError(ValueError):
    """No allowed choice keeps within the budget.

    Attributes:
        least_bytes: Smallest memory of an allowed choice. math.inf: no choice is allowed.
    """

    def __init__(self, message: str, least_bytes: float) -> None:
        super().__init__(message, least_bytes)
        self.least_bytes = least_bytes

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True, kw_only=True)
class ChoiceProblem:
    """A choice of one option for each node of a graph.

    Attributes:
        names: Names of the nodes, for errors.
        costs: Seconds, [node][option]; math.inf forbids the option.
        memory: Bytes, [node][option].
        edges: For pairs of nodes a < b the seconds [option of a][option of b]; math.inf forbids the pair.

    Raises:
        ValueError: The shapes disagree, a node has no option, an edge is not between two nodes a < b, seconds
            are negative or not a number, or bytes are negative or not finite.
    """

    names: tuple[str, ...]
    costs: Table = field(repr=False)
    memory: Table = field(repr=False)
    edges: Mapping[tuple[int, int], Table] = field(repr=False)

    def __post_init__(self) -> None:
        if not len(self.names) == len(self.costs) == len(self.memory):
            raise ValueError(
                f"{len(self.names)} names, {len(self.costs)} rows of costs and {len(self.memory)} of memory: "
                "give one of each for every node"
            )
        for name, costs, memory in zip(self.names, self.costs, self.memory, strict=True):
            if not len(costs) == len(memory) > 0:
                raise ValueError(
                    f"node {name!r} has {len(costs)} costs and {len(memory)} sizes of memory: give one of "
                    "each for every option, and one option at least"
                )
            if not all(cost >= 0 for cost in costs):
                raise ValueError(f"node {name!r} costs {costs}: give 0 seconds or more, math.inf forbids")
            if not all(0 <= size < math.inf for size in memory):
                raise ValueError(
                    f"node {name!r} keeps {memory}: give finite bytes of 0 or more; give math.inf seconds to "
                    "an option that is not allowed"
                )
        for (a, b), table in self.edges.items():
            self._check_edge(a, b, table)

    def with_own(self, costs: Table, memory: Table) -> "ChoiceProblem":
        """Return the problem with other seconds and bytes of its options, and with the same edges.

        Raises:
            ValueError: `costs` or `memory` has another number of options, or invalid values.
        """
        alone = ChoiceProblem(names=self.names, costs=costs, memory=memory, edges={})
        if alone.num_options != self.num_options:
            raise ValueError(f"{alone.num_options} options: the edges are those of {self.num_options}")
        # Edges were checked and converted to arrays with this problem.
        alone.__dict__.update(edges=self.edges, edge_arrays=self.edge_arrays)
        return alone

    def _check_edge(self, a: int, b: int, table: Table) -> None:
        if not 0 <= a < b < len(self.names):
            raise ValueError(f"edge ({a}, {b}): give the numbers a < b of two of {len(self.names)} nodes")
        between = f"the edge of {self.names[a]!r} and {self.names[b]!r}"
        num_rows, num_columns = len(self.costs[a]), len(self.costs[b])
        if len(table) != num_rows or any(len(row) != num_columns for row in table):
            raise ValueError(
                f"{between} has rows of lengths {sorted({len(row) for row in table})}, {len(table)} of them: "
                f"give {num_rows} rows of {num_columns}, one number for each pair of options"
            )
        for row in table:
            if not all(cost >= 0 for cost in row):
                raise ValueError(f"{between} costs {row}: give 0 seconds or more, math.inf forbids a pair")

    @cached_property
    def num_options(self) -> tuple[int, ...]:
        """The number of options of each node."""
        return tuple(map(len, self.costs))

    @cached_property
    def cost_arrays(self) -> tuple[Floats, ...]:
        """`costs`, for arithmetic."""
        return tuple(np.array(row, dtype=np.float64) for row in self.costs)

    @cached_property
    def memory_arrays(self) -> tuple[Floats, ...]:
        """`memory`, for arithmetic."""
        return tuple(np.array(row, dtype=np.float64) for row in self.memory)

    @cached_property
    def edge_arrays(self) -> dict[tuple[int, int], Floats]:
        """`edges`, for arithmetic; in ascending order, independent of the order of the mapping."""
        return {pair: np.array(self.edges[pair], dtype=np.float64) for pair in sorted(self.edges)}

    @cached_property
    def tables_of(self) -> tuple[dict[int, Floats], ...]:
        """Neighbors of each node, with the seconds [own option][option of the neighbor]."""
        tables: tuple[dict[int, Floats], ...] = tuple({} for _ in self.names)
        for (a, b), table in self.edge_arrays.items():
            tables[a][b] = table
            tables[b][a] = table.T
        return tables

    def cost_of(self, options: Sequence[int]) -> float:
        """Return the seconds of a choice, math.inf if it is not allowed.

        Raises:
            ValueError: `options` is not one option of each node.
        """
        self._check(options)
        own = (row[option] for row, option in zip(self.costs, options, strict=True))
        return math.fsum([*own, *(table[options[a]][options[b]] for (a, b), table in self.edges.items())])

    def memory_of(self, options: Sequence[int]) -> float:
        """Return the bytes of a choice.

        Raises:
            ValueError: `options` is not one option of each node.
        """
        self._check(options)
        return math.fsum(row[option] for row, option in zip(self.memory, options, strict=True))

    def _check(self, options: Sequence[int]) -> None:
        if len(options) != len(self.names):
            raise ValueError(f"{len(options)} options for {len(self.names)} nodes: give one for each")
        for name, option, count in zip(self.names, options, self.num_options, strict=True):
            if not 0 <= option < count:
                raise ValueError(f"node {name!r} has no option {option}: it has 0 to {count - 1}")


@dataclass(frozen=True, kw_only=True)
class ChoiceSolution:
    """A choice with a bound of its quality.

    Attributes:
        options: The option of each node.
        cost: Its seconds.
        memory: Its bytes.
        bound: Lower bound of the seconds of all choices within the budget, up to the rounding of float64.
        method: Last method that was needed: "elimination", "price" or "ilp".
    """

    options: Options
    cost: float
    memory: float
    bound: float
    method: str

    @property
    def gap(self) -> float:
        """Largest fraction of the cost that a better choice could save."""
        return (self.cost - self.bound) / self.cost if self.cost else 0.0


@dataclass(frozen=True, kw_only=True)
class MergedChoices:
    """A problem whose nodes represent classes of nodes of another one.

    Attributes:
        problem: One node for each class, in the order of their first members.
        numbers: Number of the class of each node of the original.
    """

    problem: ChoiceProblem
    numbers: tuple[int, ...]

    def with_more(self, costs_of: Callable[[int], Sequence[float]]) -> "MergedChoices":
        """Return the same with additional seconds of each node of the original, equal within a class."""
        firsts: dict[int, int] = {}
        for node, number in enumerate(self.numbers):
            firsts.setdefault(number, node)
        counts = Counter(self.numbers)
        more = tuple(
            tuple(
                own + counts[number] * cost for own, cost in zip(row, costs_of(firsts[number]), strict=True)
            )
            for number, row in enumerate(self.problem.costs)
        )
        return MergedChoices(problem=self.problem.with_own(more, self.problem.memory), numbers=self.numbers)

    def expand(self, options: Sequence[int]) -> Options:
        """Return the choice of the original for a choice of `problem`.

        Raises:
            ValueError: `options` is not one option of each class.
        """
        if len(options) != len(self.problem.names):
            raise ValueError(
                f"{len(options)} options for {len(self.problem.names)} classes: give one for each"
            )
        return tuple(options[number] for number in self.numbers)


def merge_equal(problem: ChoiceProblem, classes: Sequence[Hashable]) -> MergedChoices:
    """Give nodes of the same class the same option: 96 equal layers are then as few variables as one.

    Costs and memory are summed. So are the edges between two classes; an edge inside one adds its diagonal to
    the cost.

    Args:
        problem: The problem.
        classes: Class of each node.

    Raises:
        ValueError: `classes` is not one for each node, or two nodes of a class differ in their number of
            options.
    """
    if len(classes) != len(problem.names):
        raise ValueError(f"{len(classes)} classes for {len(problem.names)} nodes: give one for each")
    members: dict[Hashable, list[int]] = {}
    for node, each in enumerate(classes):
        members.setdefault(each, []).append(node)
    firsts = [nodes[0] for nodes in members.values()]
    number_of = {each: number for number, each in enumerate(members)}
    numbers = tuple(number_of[each] for each in classes)
    for node, number in enumerate(numbers):
        first = firsts[number]
        if problem.num_options[node] != problem.num_options[first]:
            raise ValueError(
                f"nodes {problem.names[first]!r} and {problem.names[node]!r} are of one class, but have "
                f"{problem.num_options[first]} and {problem.num_options[node]} options: equal nodes have the "
                "same ones"
            )
    costs = [sum_of(problem.cost_arrays[node] for node in nodes) for nodes in members.values()]
    edges: dict[tuple[int, int], Floats] = {}
    for (a, b), table in problem.edge_arrays.items():
        pair = numbers[a], numbers[b]
        if pair[0] == pair[1]:
            costs[pair[0]] = costs[pair[0]] + table.diagonal()
            continue
        # Nodes of one class can be at either end of an edge; between two classes there is one table.
        if pair[0] > pair[1]:
            pair, table = pair[::-1], table.T
        edges[pair] = edges[pair] + table if pair in edges else table
    merged = problem_of(
        [
            problem.names[nodes[0]] + (f" (x{len(nodes)})" if len(nodes) > 1 else "")
            for nodes in members.values()
        ],
        costs,
        [sum_of(problem.memory_arrays[node] for node in nodes) for nodes in members.values()],
        edges,
    )
    return MergedChoices(problem=merged, numbers=numbers)


def drop_dominated(problem: ChoiceProblem) -> tuple[ChoiceProblem, tuple[Options, ...]]:
    """Drop options that no budget needs; see [Note: dominated options].

    Every node keeps at least one option: if no choice is allowed, none is afterwards.

    Returns:
        The smaller problem, and for each node the original numbers of its remaining options.
    """
    kept = [np.arange(count) for count in problem.num_options]
    waiting = deque(range(len(kept)))
    while waiting:
        node = waiting.popleft()
        rows = [problem.cost_arrays[node][:, None], problem.memory_arrays[node][:, None]]
        rows += [table[:, kept[other]] for other, table in problem.tables_of[node].items()]
        stays = _undominated([row[kept[node]] for row in rows])
        if not stays.all():
            kept[node] = kept[node][stays]
            waiting.extend(other for other in problem.tables_of[node] if other not in waiting)
    choice = tuple(tuple(each.tolist()) for each in kept)
    return restrict(problem, choice), choice


def _undominated(rows: Sequence[Floats]) -> Booleans:
    """Return a mask of the options to keep; each of `rows` is of shape (options, values to compare)."""
    allowed: Booleans = np.logical_and.reduce([np.isfinite(row).any(axis=1) for row in rows])
    if not allowed.any():
        allowed[0] = True  # no choice is allowed: the remaining option is forbidden, too
        return allowed
    # Pairs are compared in all columns at once. Since inf <= inf, a column that both forbid protects neither.
    joined = np.concatenate(rows, axis=1)
    no_dearer: Booleans = np.logical_and.reduce(
        joined[:, None] <= joined[None], axis=2
    )  # [dominating][dominated]
    is_first = np.triu(np.ones_like(no_dearer), 1)
    drops = no_dearer & (~no_dearer.T | is_first)
    stays: Booleans = allowed & ~np.logical_or.reduce(drops)
    return stays


def restrict(problem: ChoiceProblem, kept: Sequence[Sequence[int]]) -> ChoiceProblem:
    """Return the problem with some of the options, given by their numbers for each node."""
    if all(len(each) == count for each, count in zip(kept, problem.num_options, strict=True)):
        return problem
    indices = [np.asarray(each, dtype=np.int64) for each in kept]
    return problem_of(
        problem.names,
        [costs[each] for costs, each in zip(problem.cost_arrays, indices, strict=True)],
        [memory[each] for memory, each in zip(problem.memory_arrays, indices, strict=True)],
        {(a, b): table[np.ix_(indices[a], indices[b])] for (a, b), table in problem.edge_arrays.items()},
    )


def problem_of(
    names: Sequence[str],
    costs: Sequence[Floats],
    memory: Sequence[Floats],
    edges: Mapping[tuple[int, int], Floats],
) -> ChoiceProblem:
    """Make a problem from arrays."""
    return ChoiceProblem(
        names=tuple(names),
        costs=tuple(tuple(row.tolist()) for row in costs),
        memory=tuple(tuple(row.tolist()) for row in memory),
        edges={pair: tuple(map(tuple, table.tolist())) for pair, table in edges.items()},
    )


def sum_of(arrays: Iterable[Floats]) -> Floats:
    """Return the sum of at least one array, added in order; shapes are broadcast."""
    return reduce(np.add, arrays)
