"""The outer problem: sizes, stage of ZeRO, microbatches and recomputation with the least seconds.

For each setting the inner problem finds the cuts of layers, first without a memory limit: no answer under a
budget takes fewer seconds, so settings are tried in ascending order of that bound, and the search ends with
the first that cannot improve on the best answer so far. If the unlimited answer does not fit, cuts and
recomputation are chosen together: cuts are tried one after the other, each with as much recomputation as it
needs. Likely candidates come first, then all others in the order of [Note: the bound of a choice], until the
bound exceeds the best answer. For large models this ends early: `_MOST_TRIED` limits the number of choices.
"""

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

from torch import nn

from colossalai.auto_parallel._costs import OperationCosts
from colossalai.auto_parallel._inner import CutChoice, CutGraph, InnerProblem
from colossalai.auto_parallel._parts import ModelParts
from colossalai.auto_parallel._setting import ParameterCosts, Setting
from colossalai.auto_parallel.checkpoint._rotor import solve_rotor
from colossalai.auto_parallel.cuts._find import find_strategies
from colossalai.auto_parallel.cuts._strategies import Strategies, Strategy
from colossalai.auto_parallel.prediction._prediction import Prediction, Predictor
from colossalai.auto_parallel.solver._choice import BudgetError
from colossalai.auto_parallel.trace._live_bytes import live_bytes
from colossalai.auto_parallel.trace._trace import EqualBlocks, places_in_blocks
from colossalai.runtime import RecomputeSegment

_MOST_TRIED = 6000  # operations of all tried choices together, for one setting
_FEWER = 6  # divisor of the number of tries if the choices of least bytes do not fit
_SLACK = 3  # retries with a smaller budget, as the peak is not the sum over the cut layers


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """An answer under a setting.

    Attributes:
        setting: The sizes.
        strategies: Sites and followers, with their strategies.
        choice: The cut of each layer.
        prediction: Predicted costs of a step.
    """

    setting: Setting
    strategies: Strategies
    choice: CutChoice
    prediction: Prediction

    @property
    def is_redundant(self) -> bool:
        """Whether tensor-parallel ranks share no layer, so that each computes the whole model."""
        return self.setting.tensor > 1 and not any(each.is_cut for each in self.choice.strategies)


@dataclass(frozen=True, kw_only=True)
class SearchLimits:
    """Time and quality of the search.

    Attributes:
        time_limit: Seconds for each inner problem.
        gap: Gap at which the search of an inner problem stops, as a fraction of its seconds.
        must_cut: Whether to cut all layers that can be cut, even where this is slower.
    """

    time_limit: float = 10.0
    gap: float = 1e-3
    must_cut: bool = False


class Search:
    """The outer problem of a model on a machine.

    Args:
        costs: Costs of the operations.
        model: The model.
        parts: Its parts.
        equal: Its equal blocks.
        optimizer: A key of `OPTIMIZER_STATES`.
        limits: Time and quality of the search.

    Attributes:
        num_tried: Number of choices of cuts that are tried for one setting in the order of their bounds.
    """

    def __init__(
        self,
        costs: OperationCosts,
        model: nn.Module,
        parts: ModelParts,
        equal: Sequence[EqualBlocks],
        *,
        optimizer: str,
        limits: SearchLimits,
    ) -> None:
        self._costs, self._model, self._parts = costs, model, parts
        self._alike = places_in_blocks(equal)
        # Blocks that do not form a chain are not recomputed.
        self._in_blocks = frozenset(name for names in parts.within for name in names if parts.is_chain)
        self.num_tried = max(_MOST_TRIED // max(len(costs.trace.operations), 1), 1)
        self._optimizer, self._limits = optimizer, limits
        names = [name for each in parts.experts for name in each.params]
        self._of_experts = costs.param_sizes(dict.fromkeys(names, 1))
        self._graphs: dict[int, CutGraph] = {}  # by the number of tensor-parallel ranks
        self._problems: dict[Setting, InnerProblem] = {}
        self._left_out = self._find_left_out()

    def run(self, settings: Sequence[Setting], *, budget: float | None) -> list[Candidate]:
        """Return answers that fit, fastest first: at least the best, and the best of other sizes.

        Raises:
            BudgetError: `budget` is less than any plan needs; the error has the least peak that was found.
        """
        found: list[Candidate] = []
        redundant: list[Candidate] = []  # used only if no sharing pays, as in tiny models
        least = math.inf
        for setting, free in self._by_seconds(settings, budget):
            if len(found) >= 2 and free.prediction.step_seconds >= sorted_seconds(found)[1]:
                break  # the rest contains neither the best nor the second best
            if budget is None or free.prediction.peak_bytes <= budget:
                (redundant if free.is_redundant else found).append(free)
                continue
            fitting = self._fitting(setting, free, budget)
            least = min(least, *(each.prediction.peak_bytes for each in (free, *fitting)))
            inside = [each for each in fitting if each.prediction.peak_bytes <= budget]
            if inside:
                best = min(inside, key=lambda each: each.prediction.step_seconds)
                (redundant if best.is_redundant else found).append(best)
        found = found or redundant
        if not found:
            assert budget is not None, "without a budget every setting has an answer"
            least = math.ceil(self._least_bytes(settings, budget, least))
            raise BudgetError(
                f"no plan for {settings[0].world_size} ranks fits into {budget:,.0f} bytes a rank: the "
                f"smallest budget that was found to work is {least:,}",
                least,
            )
        return sorted(found, key=lambda each: each.prediction.step_seconds)

    def _by_seconds(
        self, settings: Sequence[Setting], budget: float | None
    ) -> Iterator[tuple[Setting, Candidate]]:
        """Yield settings whose states fit, with their fastest answers, fastest first.

        A setting is predicted only when its cheap lower bound is the least of all that are left.
        """
        waiting: list[tuple[float, int, tuple[InnerProblem, CutChoice, Predictor] | Candidate]] = []
        for place, setting in enumerate(settings):
            if budget is not None and self._least_states(setting) > budget:
                continue
            inner = self.problem_of(setting)
            choice = inner.solve(budget=None, keeps_activations=True, **self.how)
            predictor = self.predictor(inner, choice)
            heapq.heappush(waiting, (predictor.least_seconds, place, (inner, choice, predictor)))
        while waiting:
            _, place, known = heapq.heappop(waiting)
            if isinstance(known, Candidate):
                yield settings[place], known
                continue
            inner, choice, predictor = known
            free = self.candidate(inner, predictor, choice, ())
            heapq.heappush(waiting, (free.prediction.step_seconds, place, free))

    def _least_states(self, setting: Setting) -> float:
        """Return a lower bound of the bytes of states on some rank, for any cuts."""
        costs, parts = self._params_of(setting), setting.tensor * setting.pipeline
        shared = costs.states((self._costs.all_params - self._of_experts) / parts)
        own = costs.of_experts.states(self._of_experts / (parts * setting.expert))
        return sum(shared.values()) + sum(own.values())

    def _least_bytes(self, settings: Sequence[Setting], budget: float, least: float) -> float:
        """Return the smallest peak found: `least`, or the peak of a setting whose states do not fit."""
        too_big = sorted(
            (states, place)
            for place, setting in enumerate(settings)
            if (states := self._least_states(setting)) > budget
        )
        for states, place in too_big:
            if states >= least:
                break
            free = self._free(settings[place])
            fitting = self._fitting(settings[place], free, budget)
            least = min(least, *(each.prediction.peak_bytes for each in (free, *fitting)))
        return least

    # See [Note: the peak of a step].
    def _find_left_out(self) -> float:
        """Return the bytes that predictions omit, for the whole batch and a model without cuts."""
        # `live_bytes` counts tensors in their own dtypes, so the prediction has to use them, too.
        inner = self.problem_of(Setting(), costs=self._costs.in_own_types())
        plain = Predictor(inner, inner.whole(), self._parts, has_loss=False).predict()
        predicted = sum(plain.bytes[name] for name in ("gradients", "activations", "working memory"))
        counted = live_bytes(self._costs.trace, self._costs.profiles, with_param_grads=True)
        found = max(counted - predicted, 0.0)
        return found * self._costs.activation_ratio

    def predictor(self, inner: InnerProblem, choice: CutChoice) -> Predictor:
        """Return the predictor of the answers with given cuts."""
        return Predictor(inner, choice, self._parts, left_out=self._left_out)

    def problem_of(self, setting: Setting, *, costs: OperationCosts | None = None) -> InnerProblem:
        """Return the inner problem of a setting, with other costs if given."""
        if costs is None and (known := self._problems.get(setting)) is not None:
            return known
        if setting.tensor not in self._graphs:
            trace = self._costs.trace
            self._graphs[setting.tensor] = CutGraph(
                trace=trace,
                strategies=find_strategies(trace, self._model, setting.tensor),
                alike=self._alike,
            )
        found = InnerProblem(
            costs or self._costs,
            self._params_of(setting, costs),
            self._graphs[setting.tensor],
            in_blocks=self._in_blocks,
            must_cut=self._limits.must_cut,
        )
        if costs is None:
            self._problems[setting] = found
        return found

    def _params_of(self, setting: Setting, costs: OperationCosts | None = None) -> ParameterCosts:
        costs = costs or self._costs
        return ParameterCosts(
            setting=setting,
            machine=costs.machine,
            speed=costs.machine.mesh_speed(setting.shape),
            precision=costs.precision,
            optimizer=self._optimizer,
        )

    def answer(
        self, setting: Setting, choice: CutChoice, segments: Sequence[RecomputeSegment] = ()
    ) -> Candidate:
        """Return the answer with given cuts and recomputation under a setting."""
        inner = self.problem_of(setting)
        return self.candidate(inner, self.predictor(inner, choice), choice, segments)

    def _free(self, setting: Setting) -> Candidate:
        """Return the fastest answer of a setting without a memory limit."""
        inner = self.problem_of(setting)
        choice = inner.solve(budget=None, keeps_activations=True, **self.how)
        return self.candidate(inner, self.predictor(inner, choice), choice, ())

    def _fitting(self, setting: Setting, free: Candidate, budget: float) -> list[Candidate]:
        """Return answers with less memory. Those that do not fit give a bound of the budget."""
        return _BudgetSearch(self, self.problem_of(setting), free, budget).run()

    def candidate(
        self,
        inner: InnerProblem,
        predictor: Predictor,
        choice: CutChoice,
        segments: Sequence[RecomputeSegment],
    ) -> Candidate:
        """Return the answer with given recomputed segments."""
        return Candidate(
            setting=inner.setting,
            strategies=inner.strategies,
            choice=choice,
            prediction=predictor.predict(segments),
        )

    @property
    def how(self) -> Mapping[str, float]:
        """Keyword arguments of `InnerProblem.solve`: time limit and gap."""
        return {"time_limit": self._limits.time_limit, "gap": self._limits.gap}


class _BudgetSearch:
    """The search for answers of one setting within a budget.

    Args:
        search: The search over all settings.
        inner: The problem of the setting.
        free: The fastest answer without a memory limit.
        budget: Bytes of a rank.
    """

    def __init__(self, search: Search, inner: InnerProblem, free: Candidate, budget: float) -> None:
        self._search, self._inner, self._free, self._budget = search, inner, free, budget
        self._tried: dict[tuple[Strategy, ...], list[Candidate]] = {}  # by the strategies of all sites
        self._best = math.inf  # seconds of the best answer that fits

    def run(self) -> list[Candidate]:
        """Return all answers that were tried.

        Likely candidates come first: the fastest cuts, those that fit if all activations are kept, and those
        that fit if none are, or need the least bytes. Then all choices follow in the order of their bounds,
        up to the limit. The largest possible improvement by the rest is the gap of all answers.
        """
        self._try(self._free.choice)
        if self._inner.strategies.sites:  # otherwise there is a single choice
            self._try_fitting(keeps_activations=True)
            self._try_fitting(keeps_activations=False)
        left_out = self._try_all()
        gap = max(0.0, 1 - left_out / self._best) if left_out < self._best < math.inf else 0.0
        return [replace(each, choice=replace(each.choice, gap=gap)) for each in chain(*self._tried.values())]

    def _try_all(self) -> float:
        """Try choices in the order of their bounds; return a lower bound of the seconds of the others."""
        least, setting = self._free.prediction.step_seconds, self._inner.setting
        if not self._inner.is_narrow:
            return least  # no answer is faster than without a budget
        begin, update = self._search.predictor(self._inner, self._free.choice).least_bytes
        floors = begin / setting.pipeline, update / setting.pipeline
        found = self._inner.by_bound(self._free.choice, seconds=least, floors=floors, budget=self._budget)
        for number, (bound, choice) in enumerate(found):
            # Stages work in parallel, so additional seconds are divided among them.
            bound = least + (bound - least) / (setting.pipeline if bound > least else 1)
            most_tried = self._search.num_tried
            if self._best == math.inf:
                # The choices of least bytes have been tried: if these do not fit, others rarely do.
                most_tried = max(most_tried // _FEWER, 1)
            if number >= most_tried or bound >= self._best:
                return bound  # all later choices have a higher bound
            self._try(choice)
        return math.inf

    def _try(self, choice: CutChoice) -> list[Candidate]:
        """Return the answers of a choice of cuts: all kept, and, if that does not fit, with recomputation."""
        if (known := self._tried.get(choice.strategies)) is not None:
            return known
        predictor = self._search.predictor(self._inner, choice)
        found = [self._search.candidate(self._inner, predictor, choice, ())]
        if found[0].prediction.peak_bytes > self._budget:
            found += self._recomputed(predictor, choice)
        inside = [each.prediction for each in found if each.prediction.peak_bytes <= self._budget]
        self._best = min(self._best, *(each.step_seconds for each in inside), math.inf)
        self._tried[choice.strategies] = found
        return found

    def _try_fitting(self, *, keeps_activations: bool) -> None:
        """Try the best cuts for the budget, for smaller budgets while they exceed it, and the smallest cuts.

        The peak is known only after a prediction: it is not the sum over the cut layers.
        """
        inner, free = self._inner, self._free
        own = inner.memory_of(free.choice, keeps_activations=keeps_activations)
        fixed = free.prediction.peak_bytes - own  # bytes that do not depend on the choice
        if not keeps_activations:
            fixed -= sum(free.prediction.bytes[name] for name in ("activations", "working memory"))
        solve = partial(inner.solve, keeps_activations=keeps_activations, **self._search.how)
        room = self._budget - fixed
        for number in range(_SLACK + 1):
            try:
                choice = solve(budget=max(room, 0.0) if number < _SLACK else 0.0)
            except BudgetError as error:
                if math.isinf(error.least_bytes):
                    return
                number, choice = _SLACK, solve(budget=math.ceil(error.least_bytes))
            found = self._try(choice)
            peaks = [each.prediction.peak_bytes for each in found]
            excess = (peaks[0] if keeps_activations else min(peaks)) - self._budget
            if excess <= 0 or number == _SLACK:
                return
            room -= excess

    def _recomputed(self, predictor: Predictor, choice: CutChoice) -> Iterator[Candidate]:
        """Yield a choice with recomputed blocks: all of them, and as few as fit."""
        if (with_head := predictor.chain_with_head()) is None:
            return
        blocks, beside = with_head
        num_blocks = len(blocks.blocks) - 1
        everything = tuple(RecomputeSegment(place, place + 1) for place in range(num_blocks))
        most = self._search.candidate(self._inner, predictor, choice, everything)
        yield most
        if self._inner.setting.pipeline > 1:
            return
        room = self._budget - beside
        # Rounding in the chain can exceed the room, and double counting can leave some of it unused.
        for _ in range(_SLACK):
            if room <= 0:
                return
            try:
                segments = solve_rotor(blocks, int(room))
            except BudgetError:
                return  # even rotor's smallest peak does not fit: `most` has the required bytes
            found = self._search.candidate(self._inner, predictor, choice, segments)
            yield found
            if found.prediction.peak_bytes <= self._budget:
                return
            room -= found.prediction.peak_bytes - self._budget


def sorted_seconds(found: Sequence[Candidate]) -> list[float]:
    """Return the seconds of the best answer of each layout of the ranks, in ascending order."""
    best: dict[Setting, float] = {}
    for each in found:
        key = replace(each.setting, zero=0, microbatches=1)
        best[key] = min(best.get(key, math.inf), each.prediction.step_seconds)
    ordered = sorted(best.values())
    return [*ordered, math.inf, math.inf]
