"""Parameters of a rank: what it has of those of some places of a model, and what they cost in a step.

Places are numbers: 0 is before the blocks, then each block, and the last one is behind them. A parameter that
is used at several of them counts once. Where ranks share experts, fewer replicas have the same ones: their
parameters are summed up apart, at the costs of these replicas (`ParameterCosts.of_experts`).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from colossalai.auto_parallel._inner import CutChoice, InnerProblem
from colossalai.auto_parallel._parts import ModelParts
from colossalai.auto_parallel._setting import ParameterCosts


class RankParameters:
    """What a rank has of the parameters of a model.

    Args:
        inner: The problem of a setting.
        choice: How each layer is cut.
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
        self._known: dict[tuple[int, ...], tuple[_Sizes, ...]] = {}

    def bytes_at(self, places: Iterable[int]) -> float:
        """Return the bytes of the parameters of some places."""
        return sum(each.bytes for each in self._sizes(places))

    def states_at(self, places: Iterable[int]) -> dict[str, float]:
        """Return the bytes of parameters, gradients and states of some places, by kind."""
        found: dict[str, float] = {}
        for each in self._sizes(places):
            for kind, size in each.costs.states(each.bytes, each.numel).items():
                found[kind] = found.get(kind, 0.0) + size
        return found

    def seconds_at(self, places: Iterable[int]) -> dict[str, float]:
        """Return what replicas exchange of some places, and what the optimizer does, in a step."""
        sizes = self._sizes(places)
        return {
            "data communication": sum(each.costs.gradient_seconds(each.bytes) for each in sizes),
            "optimizer": sum(
                each.costs.optimizer_seconds(each.bytes, each.numel, each.num_tensors) for each in sizes
            ),
        }

    def tied_bytes(self) -> float:
        """Return the bytes of parameters that are used both before the blocks and behind them."""
        first, last = 0, len(self._parts.blocks) + 1
        return self.bytes_at([first]) + self.bytes_at([last]) - self.bytes_at([first, last])

    def gradient_bytes(self, operation: str) -> float:
        """Return the bytes of the gradients of parameters that the backward of an operation makes.

        One of a view of a parameter is made where the view is used, and handed on by the view as it is.
        """
        costs, trace = self._inner.costs, self._inner.trace
        made = [each.tensor for each in costs.profiles[operation].gradients if each.num_bytes > 0]
        return sum(
            costs.param_bytes(tensor) / self._divisors.get(owner, 1)
            for tensor in made
            if (owner := trace.storage_of(tensor)) in self._trainable
        )

    def _sizes(self, places: Iterable[int]) -> tuple["_Sizes", ...]:
        """Return the sizes of what all replicas have, and of experts that fewer have."""
        key = tuple(places)
        if (known := self._known.get(key)) is not None:
            return known
        shared: dict[str, int] = {}
        own: dict[str, int] = {}
        for name in dict.fromkeys(name for place in key for name in self._parts.params[place]):
            kind = own if name in self._of_experts else shared
            kind.setdefault(self._inner.trace.storage_of(name), self._divisors.get(name, 1))
        found = [self._sizes_of(shared, self._inner.params)]
        if own:
            found.append(self._sizes_of(own, self._inner.params.of_experts))
        self._known[key] = tuple(found)
        return self._known[key]

    def _sizes_of(self, divisors: Mapping[str, int], costs: ParameterCosts) -> "_Sizes":
        size_of = self._inner.costs.param_size
        sizes = [(*size_of(name), divisor) for name, divisor in divisors.items()]
        return _Sizes(
            costs=costs,
            bytes=sum(num_bytes / divisor for num_bytes, _, divisor in sizes),
            numel=sum(numel / divisor for _, numel, divisor in sizes),
            num_tensors=len(divisors),
        )


@dataclass(frozen=True, kw_only=True)
class _Sizes:
    """Bytes, numbers and tensors of some parameters on one rank, and what they cost."""

    costs: ParameterCosts
    bytes: float
    numel: float
    num_tensors: int
