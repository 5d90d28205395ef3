"""Parameters of a rank at some places of a model: their sizes and their costs in a step.

Places are numbers: 0 is before the blocks, then each block, and the last one is behind them. A parameter
that is used at several of them counts once. If ranks share experts, each expert has fewer replicas: expert
parameters are summed up separately, with the costs of these replicas (`ParameterCosts.of_experts`).
"""

from collections.abc import Iterable

from colossalai.auto_parallel._costs import ParamSizes
from colossalai.auto_parallel._inner import CutChoice, InnerProblem
from colossalai.auto_parallel._parts import ModelParts
from colossalai.auto_parallel._setting import ParameterCosts


class RankParameters:
    """The parameters of a model on a rank.

    Args:
        inner: The problem of a setting.
        choice: The cut of each layer.
        parts: The parts of the model.
    """

    def __init__(self, inner: InnerProblem, choice: CutChoice, parts: ModelParts) -> None:
        self._inner, self._parts = inner, parts
        setting, sites = inner.setting, zip(inner.strategies.sites, choice.strategies, strict=True)
        self._divisors = {
            name: setting.tensor for site, strategy in sites if strategy.is_cut for name in site.params
        }
        is_shared = setting.expert > 1
        self._of_experts = frozenset(name for each in parts.experts for name in each.params if is_shared)
        self._divisors |= dict.fromkeys(self._of_experts, setting.expert)
        self._trainable = frozenset(inner.trace.trainable)
        self._known: dict[tuple[int, ...], tuple[tuple[ParameterCosts, ParamSizes], ...]] = {}

    def bytes_at(self, places: Iterable[int]) -> float:
        """Return the bytes of the parameters at some places."""
        return sum(sizes.bytes for _, sizes in self._sizes(places))

    def trained_bytes_at(self, places: Iterable[int]) -> float:
        """Return the bytes of the trained parameters at some places."""
        return sum(sizes.trained_bytes for _, sizes in self._sizes(places))

    def states_at(self, places: Iterable[int]) -> dict[str, float]:
        """Return the bytes of parameters, gradients and states at some places, by kind."""
        found: dict[str, float] = {}
        for costs, sizes in self._sizes(places):
            for kind, size in costs.states(sizes).items():
                found[kind] = found.get(kind, 0.0) + size
        return found

    def seconds_at(self, places: Iterable[int]) -> dict[str, float]:
        """Return the seconds of data communication and of the optimizer for some places, in a step."""
        found = self._sizes(places)
        return {
            "data communication": sum(costs.gradient_seconds(sizes) for costs, sizes in found),
            "optimizer": sum(costs.optimizer_seconds(sizes) for costs, sizes in found),
        }

    def tied_bytes(self) -> float:
        """Return the bytes of trained parameters that are used both before and behind the blocks."""
        first, last = 0, len(self._parts.blocks) + 1
        both = self.trained_bytes_at([first, last])
        return self.trained_bytes_at([first]) + self.trained_bytes_at([last]) - both

    def gradient_bytes(self, operation: str) -> float:
        """Return the bytes of parameter gradients that the backward of an operation makes.

        The gradient of a view of a parameter is made by the user of the view; the view passes it on
        unchanged.
        """
        costs, trace = self._inner.costs, self._inner.trace
        made = [each.tensor for each in costs.profiles[operation].gradients if each.num_bytes > 0]
        return sum(
            costs.param_bytes(tensor) / self._divisors.get(owner, 1)
            for tensor in made
            if (owner := trace.storage_of(tensor)) in self._trainable
        )

    def _sizes(self, places: Iterable[int]) -> tuple[tuple[ParameterCosts, ParamSizes], ...]:
        """Return the sizes and costs of fully replicated parameters and of experts with fewer replicas."""
        key = tuple(places)
        if (known := self._known.get(key)) is not None:
            return known
        shared: dict[str, int] = {}
        own: dict[str, int] = {}
        for name in dict.fromkeys(name for place in key for name in self._parts.params[place]):
            kind = own if name in self._of_experts else shared
            kind.setdefault(self._inner.trace.storage_of(name), self._divisors.get(name, 1))
        size_of, costs = self._inner.costs.param_sizes, self._inner.params
        found = [(costs, size_of(shared)), *([(costs.of_experts, size_of(own))] if own else [])]
        self._known[key] = tuple(found)
        return self._known[key]
