"""The inner problem: the cut of each layer, for given sizes of the mesh.

Sites and followers (`cuts/`) are the nodes of a `ChoiceProblem`, their strategies its options: least
seconds of a step, subject to bytes of a rank. An edge forbids incompatible options: a layer whose input is a
part of the features next to tensors that are whole. Equal blocks share their variables.

[Note: the bound of a choice]
The best cuts within a budget B depend on the recomputed blocks, and these on the cuts. Under any
recomputation, a step takes the seconds of its cuts, and once more the forward of all that is not kept. When
the backward begins, the memory has the states and all kept activations; at the update it has all gradients
and no activations. So for each price p of a byte,

    sum over nodes of (seconds + p * states then + min(p * kept, seconds of the forward)) - p * B
    sum over nodes of (seconds + p * states with all gradients) - p * B

are lower bounds of the seconds of any answer within B with these cuts (outside of the blocks nothing is
recomputed, and p * kept replaces the minimum). Over all cuts each bound is one more choice problem, whose
choices are enumerated in ascending order of the bound (`Elimination.cheapest_first`). Moment and price are
chosen to maximize the least bound (Lagrangian duality, as in `solver/_price.py`).
"""

import functools
import itertools
import math
import operator
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np

from colossalai.auto_parallel._costs import OperationCosts, Seconds
from colossalai.auto_parallel._setting import ParameterCosts, Setting
from colossalai.auto_parallel.cuts._strategies import (
    CutTransfer,
    Followers,
    Site,
    Strategies,
    Strategy,
    tied_alike,
)
from colossalai.auto_parallel.prediction._peak import gradient_memory
from colossalai.auto_parallel.solver._choice import ChoiceProblem, Floats, MergedChoices, Options, merge_equal
from colossalai.auto_parallel.solver._elimination import Elimination
from colossalai.auto_parallel.solver._ilp import solve_choices
from colossalai.auto_parallel.trace._trace import ModelTrace, Operation

_FAR_TOO_LONG = 1e6  # seconds
_PRICES = range(-12, 13)  # powers of two, of a step's seconds for a budget's bytes
_TENSOR_AXIS = "2"  # of a mesh of (data, pipeline, tensor)


@dataclass(frozen=True, kw_only=True)
class CutChoice:
    """The cut of each layer.

    Attributes:
        strategies: Strategy of each site.
        are_cut: For each set of followers, whether its tensors are cut.
        gap: Largest possible improvement of the seconds by another choice, as a fraction of them.
    """

    strategies: tuple[Strategy, ...]
    are_cut: tuple[bool, ...]
    gap: float = 0.0


@dataclass(frozen=True, kw_only=True)
class _NodeCost:
    """Costs of an option of a node.

    Attributes:
        seconds: Seconds of a step.
        again: Seconds of its forward if it is recomputed; math.inf: it is never recomputed.
        states: Bytes of parameters, gradients and optimizer states.
        held: Bytes of states and buckets that are alive when a backward begins.
        complete: The same at the update, with all gradients.
        kept: Bytes saved for backward, unless they are recomputed.
    """

    seconds: float
    again: float
    states: float
    held: float
    complete: float
    kept: float


def _at_begin(node: _NodeCost, price: float) -> float:
    """Return the contribution of a node to the bound, by its bytes when the backward begins."""
    return node.seconds + price * node.held + min(price * node.kept, node.again)


def _at_update(node: _NodeCost, price: float) -> float:
    """Return the same for its bytes at the update."""
    return node.seconds + price * node.complete


def _bounds(
    nodes: Sequence[Sequence[_NodeCost]],
    bound_of: Callable[[_NodeCost, float], float],
    price: float,
    number: int,
) -> list[float]:
    return [bound_of(each, price) for each in nodes[number]]


@dataclass(frozen=True, kw_only=True)
class CutGraph:
    """The graph of all choices for a number of tensor-parallel ranks, without costs.

    Attributes:
        trace: The operations.
        strategies: Sites and followers, with their strategies.
        alike: Kind of block and place in the block of each operation of equal blocks; see
            `places_in_blocks`.
    """

    trace: ModelTrace
    strategies: Strategies
    alike: Mapping[str, tuple[int, int]]

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the nodes: the sites, then the sets of followers."""
        return (
            *(site.name for site in self.strategies.sites),
            *(f"behind {self.trace.producers[each.tensors[0]].name}" for each in self.strategies.followers),
        )

    @cached_property
    def edges(self) -> dict[tuple[int, int], tuple[tuple[float, ...], ...]]:
        """Tables of infinite costs for incompatible options, by pair of nodes."""
        sites = self.strategies.sites
        tables: dict[tuple[int, int], list[list[float]]] = {}

        def forbid(pair: tuple[int, int], allowed: list[list[bool]]) -> None:
            known = tables.setdefault(pair, [[0.0] * len(row) for row in allowed])
            for own, row in zip(known, allowed, strict=True):
                for place, is_allowed in enumerate(row):
                    own[place] = own[place] if is_allowed else math.inf

        for number, site in enumerate(sites):
            for group, is_part in (
                (site.takes, [each.takes_part for each in site.strategies]),
                (site.gives, [each.gives_part for each in site.strategies]),
            ):
                if group is not None:
                    forbid((number, len(sites) + group), [[not part, part] for part in is_part])
        for first, second in self.strategies.ties:
            forbid(
                (first, second),
                [
                    [tied_alike(one, other) for other in sites[second].strategies]
                    for one in sites[first].strategies
                ],
            )
        return {pair: tuple(map(tuple, table)) for pair, table in sorted(tables.items())}

    @cached_property
    def classes(self) -> list[Hashable]:
        """For each node, a key that is the same for the equal nodes of all blocks."""
        sites, followers = self.strategies.sites, self.strategies.followers
        classes: list[Hashable] = [
            self._class(site.operations[0], (len(site.strategies), len(site.operations), site.takes is None))
            for site in sites
        ]
        num_ends = [0] * len(followers)
        for site in sites:
            for number in {each for each in (site.takes, site.gives) if each is not None}:
                num_ends[number] += 1
        for number, each in enumerate(followers):
            first = self.trace.producers[each.tensors[0]].name
            classes.append(self._class(first, ("followers", len(each.tensors), num_ends[number])))
        return classes

    def _class(self, operation: str, kind: Hashable) -> Hashable:
        return self.alike.get(operation, operation), kind

    @cached_property
    def merged(self) -> MergedChoices:
        """The problem with zero costs, with one node for the equal ones of all blocks."""
        sites, followers = self.strategies.sites, self.strategies.followers
        counts = [*(len(site.strategies) for site in sites), *(2 for _ in followers)]
        nothing = tuple((0.0,) * count for count in counts)
        problem = ChoiceProblem(names=self.names, costs=nothing, memory=nothing, edges=self.edges)
        return merge_equal(problem, self.classes)

    @cached_property
    def elimination(self) -> Elimination:
        """The elimination of the nodes of `merged`."""
        return Elimination(self.merged.problem)

    @cached_property
    def members(self) -> tuple[tuple[int, int], ...]:
        """For each node of `merged`, the first node that it represents, and their number."""
        counts = Counter(self.merged.numbers)
        return tuple((self.merged.numbers.index(number), counts[number]) for number in sorted(counts))

    def merge(self, costs: Sequence[Sequence[float]], memory: Sequence[Sequence[float]]) -> MergedChoices:
        """Return the problem with given seconds and bytes, with one node for the equal ones of all blocks.

        Equal nodes have equal seconds and bytes.
        """
        problem = self.merged.problem
        own = [_times(costs[first], count) for first, count in self.members]
        with_edges = (
            tuple(map(operator.add, row, inside)) for row, inside in zip(own, problem.costs, strict=True)
        )
        sizes = tuple(_times(memory[first], count) for first, count in self.members)
        return MergedChoices(problem=problem.with_own(tuple(with_edges), sizes), numbers=self.merged.numbers)


def _times(row: Sequence[float], count: int) -> tuple[float, ...]:
    """Return the sums of `count` equal rows, added one after the other."""
    return tuple(functools.reduce(operator.add, itertools.repeat(each, count)) for each in row)


class InnerProblem:
    """The choices under given sizes, with their costs.

    Args:
        costs: Costs of the operations.
        params: Costs of the parameters under the setting.
        graph: The choices.
        in_blocks: Names of the operations that can be recomputed.
        must_cut: Whether to leave a layer whole only where it has no other option.
    """

    def __init__(
        self,
        costs: OperationCosts,
        params: ParameterCosts,
        graph: CutGraph,
        *,
        in_blocks: Collection[str] = frozenset(),
        must_cut: bool = False,
    ) -> None:
        self.costs, self.params, self.strategies = costs, params, graph.strategies
        self.setting: Setting = params.setting
        self.trace = costs.trace
        self._graph = graph
        self._in_blocks = in_blocks
        self._of_whole = _FAR_TOO_LONG if must_cut else 0.0

    def transfer_seconds(self, transfers: Sequence[CutTransfer]) -> float:
        """Return the seconds of some collectives of the tensor ranks, for one microbatch of a rank."""
        return sum(
            self.params.speed.cost(
                each.op, self.costs.activation_bytes(each.tensor) * self.setting.share, _TENSOR_AXIS
            )
            for each in transfers
        )

    def operation_seconds(self, name: str, choice: CutChoice) -> Seconds:
        """Return the seconds of an operation on a rank, for one microbatch."""
        operation = self._operation(name)
        divisor, cut = 1, ""
        if (number := self.strategies.site_of.get(name)) is not None:
            strategy = choice.strategies[number]
            if strategy.is_cut:
                divisor, cut = self.setting.tensor, self._cut_of(number, strategy, operation.module)
        elif (group := self.strategies.followers_of.get(name)) is not None and choice.are_cut[group]:
            divisor = self.setting.tensor
        return self.costs.seconds(operation, share=self.setting.share, divisor=divisor, cut=cut)

    def part_of_tensor(self, name: str, choice: CutChoice) -> float:
        """Return the fraction of the features of a tensor that a rank has."""
        group = self.strategies.followers_by_tensor.get(name)
        if group is not None and choice.are_cut[group]:
            return 1 / self.setting.tensor
        producer = self.trace.producers.get(name)
        number_of_site = None if producer is None else self.strategies.site_of.get(producer.name)
        if number_of_site is None:
            return 1.0
        site = self.strategies.sites[number_of_site]
        is_inside = site.rule is not None and name not in site.results
        return 1 / self.setting.tensor if choice.strategies[number_of_site].is_cut and is_inside else 1.0

    def kind_of_block(self, operations: Sequence[str]) -> int | None:
        """Return the number of the kind of a block with these operations; None: equal to no other block."""
        found = self._graph.alike.get(operations[0])
        return found[0] if found is not None else None

    def whole(self) -> CutChoice:
        """Return the choice with all layers whole."""
        return CutChoice(
            strategies=tuple(site.strategies[0] for site in self.strategies.sites),
            are_cut=(False,) * len(self.strategies.followers),
        )

    def solve(
        self, *, budget: float | None, keeps_activations: bool, time_limit: float, gap: float
    ) -> CutChoice:
        """Return the best choice.

        Args:
            budget: Bytes on a rank for all nodes. None: no limit.
            keeps_activations: Whether activations are saved for backward; otherwise they are recomputed, and
                only parameters take memory.
            time_limit: Seconds of the search.
            gap: Gap at which the search stops, as a fraction of the seconds.

        Raises:
            BudgetError: `budget` is less than any choice needs.
        """
        if not self.strategies.sites:
            return self.whole()
        merged = self.merged(keeps_activations=keeps_activations)
        solution = solve_choices(merged.problem, budget=budget, time_limit=time_limit, gap=gap)
        return self.choice_of(merged.expand(solution.options), solution.gap)

    def choice_of(self, options: Sequence[int], gap: float = 0.0) -> CutChoice:
        """Return the choice with the given options of the nodes of `problem`."""
        num_sites = len(self.strategies.sites)
        return CutChoice(
            strategies=tuple(
                site.strategies[option]
                for site, option in zip(self.strategies.sites, options[:num_sites], strict=True)
            ),
            are_cut=tuple(option == 1 for option in options[num_sites:]),
            gap=gap,
        )

    def options_of(self, choice: CutChoice) -> Options:
        """Return the options of the nodes of `problem` in a choice."""
        sites = zip(self.strategies.sites, choice.strategies, strict=True)
        return (*(site.strategies.index(each) for site, each in sites), *map(int, choice.are_cut))

    @property
    def is_narrow(self) -> bool:
        """Whether elimination can solve the problem, which `by_bound` requires."""
        return self._graph.elimination.is_small

    # See [Note: the bound of a choice].
    def by_bound(
        self, free: CutChoice, *, seconds: float, floors: tuple[float, float], budget: float
    ) -> Iterator[tuple[float, CutChoice]]:
        """Yield choices with a lower bound of the seconds of their answers within a budget, least first.

        With a pipeline, all figures are those of the average stage. `is_narrow` must be true.

        Args:
            free: The fastest choice.
            seconds: Seconds of its step.
            floors: Bytes of `free` when the backward begins, without recomputable activations, and at the
                update.
            budget: Bytes of a rank.
        """
        options, nodes = self.options_of(free), self._node_costs
        taken = [node[option] for node, option in zip(nodes, options, strict=True)]
        # The part that all choices share follows from the difference for one of them.
        same = seconds - sum(each.seconds for each in taken)
        begin, update = floors
        rooms = {
            _at_begin: budget - begin + sum(each.held + each.kept * math.isinf(each.again) for each in taken),
            _at_update: budget - update + sum(each.complete for each in taken),
        }
        merged, highest, taken_off = self._graph.merged, -math.inf, 0.0
        prices = [seconds / max(budget, 1.0) * 2.0**exponent for exponent in _PRICES]
        for bound_of, room in rooms.items():
            least_of = self._least_bounds(bound_of, prices).tolist()
            for price, cost in zip(prices, least_of, strict=True):
                if (least := cost - price * room) > highest:
                    highest, taken_off = least, price * room
                    merged = self._graph.merged.with_more(partial(_bounds, nodes, bound_of, price))
        for cost, each in Elimination(merged.problem).cheapest_first():
            yield cost - taken_off + same, self.choice_of(merged.expand(each))

    def _least_bounds(self, bound_of: Callable[[_NodeCost, float], float], prices: Sequence[float]) -> Floats:
        """Return the least bound over all choices, for each price of a byte."""
        costs = []
        for (first, count), inside in zip(self._graph.members, self._graph.merged.problem.costs, strict=True):
            bounds = [[bound_of(each, price) for price in prices] for each in self._node_costs[first]]
            costs.append(np.array(inside)[:, None] + count * np.array(bounds))
        return self._graph.elimination.least_costs(costs, len(prices))

    def merged(self, *, keeps_activations: bool) -> MergedChoices:
        """Return the problem with one variable for the equal nodes of all blocks."""
        return self._graph.merge(*self._own(keeps_activations=keeps_activations))

    def problem(self, *, keeps_activations: bool) -> ChoiceProblem:
        """Return the problem with a node for each site and each set of followers."""
        costs, memory = self._own(keeps_activations=keeps_activations)
        graph = self._graph
        return ChoiceProblem(names=graph.names, costs=tuple(costs), memory=tuple(memory), edges=graph.edges)

    def memory_of(self, choice: CutChoice, *, keeps_activations: bool) -> float:
        """Return the bytes of all nodes under a choice."""
        _, memory = self._own(keeps_activations=keeps_activations)
        return math.fsum(row[option] for row, option in zip(memory, self.options_of(choice), strict=True))

    def _own(self, *, keeps_activations: bool) -> tuple[list[tuple[float, ...]], list[tuple[float, ...]]]:
        """Return seconds and bytes of the options of each node."""
        nodes = self._node_costs
        return (
            [tuple(each.seconds for each in node) for node in nodes],
            [tuple(each.states + each.kept * keeps_activations for each in node) for node in nodes],
        )

    @cached_property
    def _node_costs(self) -> list[tuple[_NodeCost, ...]]:
        """Return the costs of each option of each node."""
        sites, followers = self.strategies.sites, self.strategies.followers
        classes = self._graph.classes
        known: dict[Hashable, tuple[_NodeCost, ...]] = {}  # equal nodes have equal costs
        per_byte = self.params.seconds_per_byte(self.costs.all_params)
        for number, site in enumerate(sites):
            if classes[number] not in known:
                known[classes[number]] = tuple(
                    self._site_node(number, site, each, per_byte) for each in site.strategies
                )
        for number, group in enumerate(followers, len(sites)):
            if classes[number] not in known:
                parts = (1, self.setting.tensor)
                known[classes[number]] = tuple(self._follower_node(group, divisor) for divisor in parts)
        return [known[each] for each in classes]

    def _site_node(self, number: int, site: Site, strategy: Strategy, per_byte: float) -> _NodeCost:
        """Return the costs of a strategy of a site."""
        divisor = self.setting.tensor if strategy.is_cut else 1
        found = Seconds(self.transfer_seconds(strategy.forward), self.transfer_seconds(strategy.backward))
        for name in site.operations:
            if self.strategies.site_of[name] == number:
                operation = self._operation(name)
                cut = self._cut_of(number, strategy, operation.module) if divisor > 1 else ""
                found = found + self.costs.seconds(
                    operation, share=self.setting.share, divisor=divisor, cut=cut
                )
        storages = dict.fromkeys(map(self.trace.storage_of, site.params))
        params = [name for name in storages if self._holder_of[name] == number]
        sizes = self.costs.param_sizes(dict.fromkeys(params, divisor))
        states = self.params.states(sizes)
        total = sum(states.values())
        memory = gradient_memory(
            self.setting,
            sizes.trained_bytes,
            is_first=self.setting.microbatches == 1,
            master_ratio=self.params.master_ratio,
        )
        without = total - states["gradients"]
        seconds = 0.0 if strategy.is_cut or len(site.strategies) == 1 else self._of_whole
        seconds += self.setting.microbatches * found.total + per_byte * sizes.trained_bytes
        kept = self._kept_inside(number, site) if site.rule is not None else 0.0
        own = (name for name in site.operations if self.strategies.site_of[name] == number)
        casts = sum(self.costs.casts_of_weights.get(name, 0.0) for name in own)
        return _NodeCost(
            seconds=seconds,
            again=self._again(site.operations[0], found),
            states=total / self.setting.pipeline,
            held=(without + memory.held) / self.setting.pipeline,
            complete=(without + memory.held + memory.part * sizes.trained_bytes) / self.setting.pipeline,
            kept=self._num_live() * (self.setting.share * kept + casts) / divisor,
        )

    @cached_property
    def _holder_of(self) -> Mapping[str, int]:
        """The first site with a parameter, by storage, so that tied parameters count once."""
        found: dict[str, int] = {}
        for number, site in enumerate(self.strategies.sites):
            for name in site.params:
                found.setdefault(self.trace.storage_of(name), number)
        return found

    def _follower_node(self, group: Followers, divisor: int) -> _NodeCost:
        found = Seconds()
        for name in group.operations:
            found = found + self.costs.seconds(
                self._operation(name), share=self.setting.share, divisor=divisor
            )
        tensors, extra = self.costs.saved_by
        kept = sum(tensors.get(name, 0.0) for name in group.tensors)
        kept += sum(extra.get(name, 0.0) for name in group.operations)
        return _NodeCost(
            seconds=self.setting.microbatches * found.total,
            again=self._again(self.trace.producers[group.tensors[0]].name, found),
            states=0.0,
            held=0.0,
            complete=0.0,
            kept=self._num_live() * self.setting.share * kept / divisor,
        )

    def _again(self, operation: str, seconds: Seconds) -> float:
        """Return the seconds that recomputing a node adds to a step; math.inf: it is never recomputed."""
        return self.setting.microbatches * seconds.forward if operation in self._in_blocks else math.inf

    def _kept_inside(self, number: int, site: Site) -> float:
        """Return the bytes of tensors inside a site that are saved for backward, for the whole batch."""
        tensors, extra = self.costs.saved_by
        kept = 0.0
        for name in site.operations:
            if self.strategies.site_of[name] == number:
                made = set(self._operation(name).outputs) - site.results
                kept += sum(tensors.get(each, 0.0) for each in sorted(made)) + extra.get(name, 0.0)
        return kept

    def _cut_of(self, number: int, strategy: Strategy, module: str) -> str:
        """Return whether the ranks share the output or the input features of a product in a site."""
        site = self.strategies.sites[number]
        return site.layers.get(module, "") if site.rule is not None else strategy.cut

    def _operation(self, name: str) -> Operation:
        return self.trace.operations[self.trace.places[name]]

    def _num_live(self) -> float:
        """Return the number of live microbatches of a rank, on average over the stages."""
        return min(self.setting.microbatches, self.setting.pipeline) / self.setting.pipeline
