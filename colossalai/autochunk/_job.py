"""Search and rewriting of one traced model: from a budget or a plan to the chunked graph."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from torch import Tensor, fx, nn

from colossalai.autochunk._calls import has_effects, shape_of
from colossalai.autochunk._flow import MOST_OPERATIONS, follow
from colossalai.autochunk._loop import ChunkLoop
from colossalai.autochunk._plan import ChunkPlan, ChunkRegion, common_module, digest_of
from colossalai.autochunk._profile import GraphProfile, GraphProfiler
from colossalai.autochunk._recompute import with_recomputation
from colossalai.autochunk._rewrite import GraphRewriter, loop_name
from colossalai.autochunk._search import RegionChoice, RegionSearch
from colossalai.autochunk._trace import module_of
from colossalai.runtime.memory import bytes_text

_MOST_REPEATS = 20

ChunkedGraph = tuple[fx.Graph, Mapping[str, ChunkLoop]]
"""A rewritten graph, and its loops by the names of their modules."""

_Measured = tuple[Sequence[RegionChoice], ChunkedGraph, GraphProfile]
"""Regions, the rewritten graph, and its profile."""


class ChunkJob:
    """The model of one call of `autochunk`.

    Args:
        model: Name of its class.
        root: Module with the attributes of the graph.
        traced: Graph of its trace.
        inputs: Flat arguments of the trace.
        inplace: Whether outputs of regions take the memory of inputs.

    Attributes:
        unchunked_peak: Peak without chunks.
    """

    def __init__(
        self, model: str, root: nn.Module, traced: fx.Graph, inputs: Sequence[Any], *, inplace: bool
    ) -> None:
        self._model = model
        self._traced = traced
        self._inplace = inplace
        self._is_recomputed = False
        self._profiler = GraphProfiler(root, inputs)
        self._profile = self._profiler.profile(traced)
        self._rewriter = GraphRewriter(traced, self._profile, inplace=inplace)
        self._digest = digest_of(traced)
        self._seconds = sum(self._profile.seconds)
        self.unchunked_peak = self._profile.peak

    def search(self, budget: int) -> tuple[ChunkedGraph, ChunkPlan]:
        """Return the chunked model of the least estimated time within a budget.

        Raises:
            ValueError: No plan fits into `budget`.
        """
        found = self._fastest(budget)
        if found is None:
            self._recompute()
            # The excess was measured for larger chunks than those of one element.
            found = self._fastest(budget) or self._smallest()
        regions, chunked, result = found
        if result.peak > budget:
            raise self._refusal(budget, result)
        return chunked, self._plan(regions, result, budget)

    def _fastest(self, budget: int) -> _Measured | None:
        """Return the regions of the least estimated time within a budget; None if there are none."""
        # Peaks are estimated for each region alone, and other regions change the live tensors around it. An
        # excess in the rewritten graph corrects the estimate, and the choice is made again.
        search = RegionSearch(self._profile, inplace=self._inplace)
        for _ in range(_MOST_REPEATS):
            fastest = search.fastest(budget)
            if fastest is None:
                break
            chunked, result = self._rewrite(fastest)
            if result.peak <= budget:
                return fastest, chunked, result
            _correct(search, fastest, result, budget)
        return None

    def _recompute(self) -> None:
        """Continue with the graph in which cheap results are computed again for each use."""
        graph = with_recomputation(self._traced, self._profile)
        self._profile = self._profiler.profile(graph)
        self._rewriter = GraphRewriter(graph, self._profile, inplace=self._inplace)
        self._is_recomputed = True

    def apply(self, plan: ChunkPlan) -> tuple[ChunkedGraph, ChunkPlan]:
        """Return the chunked model of a plan.

        Raises:
            ValueError: The plan belongs to another trace.
        """
        if plan.digest != self._digest:
            raise ValueError(
                f"the plan is of a {plan.model} with other operations or shapes than this {self._model}: "
                "call autochunk with a budget"
            )
        if plan.recompute:
            self._recompute()
        regions = [self._choice_of(each, f"region {number}") for number, each in enumerate(plan.regions)]
        for number, (one, other) in enumerate(pairwise(regions)):
            if other.first <= one.last:
                raise ValueError(f"regions {number} and {number + 1} of the plan overlap or are out of order")
        chunked, result = self._rewrite(regions)
        if result.peak > plan.memory_budget:
            raise ValueError(
                f"the plan has a peak of {bytes_text(result.peak)}, more than its budget of "
                f"{bytes_text(plan.memory_budget)}: make the chunks smaller again, or plan anew"
            )
        peaks = _peaks(result, len(regions))
        updated = tuple(replace(each, peak=peak) for each, peak in zip(plan.regions, peaks, strict=True))
        return chunked, replace(plan, peak=result.peak, regions=updated)

    def _choice_of(self, region: ChunkRegion, name: str) -> RegionChoice:
        """Return the positions of a region of a plan.

        Raises:
            ValueError: The trace has no such region, as after a change by hand.
        """
        positions = {node.name: position for node, position in self._profile.positions.items()}
        if unknown := [each for each in (region.first, region.last, *region.dims) if each not in positions]:
            raise ValueError(
                f"{name} of the plan names {unknown[0]!r}, which is not an operation of the model"
            )
        first, last = positions[region.first], positions[region.last]
        nodes = self._profile.nodes[first : last + 1]
        fixed = [
            each
            for each in nodes
            if has_effects(each) and positions[each.name] not in self._profile.own_writes
        ]
        if not nodes or last - first >= MOST_OPERATIONS or fixed:
            raise ValueError(
                f"{name} of the plan, {region.first} to {region.last}, is not a range of at most "
                f"{MOST_OPERATIONS} operations without random numbers, collectives and changed arguments"
            )
        choices = {positions[each]: dim for each, dim in region.dims.items()}
        for position, dim in choices.items():
            shape = shape_of(self._profile.nodes[position])
            is_known = first <= position <= last and 0 <= dim < len(shape)
            if not (is_known and shape[dim] == region.extent and 1 <= region.size <= region.extent):
                raise ValueError(
                    f"{name} of the plan cuts {self._profile.nodes[position].name} of shape {shape} along "
                    f"dimension {dim} in chunks of {region.size} of {region.extent}: it must be in the "
                    "region, and the extent one of its shape"
                )
        walk = follow(self._profile, first, last, choices) if last in choices else None
        if walk is None or last not in walk.cuts or not (walk.is_valid and walk.is_complete):
            raise ValueError(f"{name} of the plan cannot be cut along that dimension of {region.last}")
        return RegionChoice(first, last, choices, region.size)

    def _rewrite(self, regions: Sequence[RegionChoice]) -> tuple[ChunkedGraph, GraphProfile]:
        graph, loops = self._rewriter.rewrite(regions)
        return (graph, loops), self._profiler.profile(graph, loops)

    def _plan(self, regions: Sequence[RegionChoice], result: GraphProfile, budget: int) -> ChunkPlan:
        added = sum(self._profile.seconds) - self._seconds + sum(each.seconds for each in regions)
        peaks = _peaks(result, len(regions))
        return ChunkPlan(
            model=self._model,
            digest=self._digest,
            memory_budget=budget,
            inplace=self._inplace,
            recompute=self._is_recomputed,
            peak=result.peak,
            unchunked_peak=self.unchunked_peak,
            slowdown=round(1 + added / max(self._seconds, 1e-9), 4),
            regions=tuple(self._region(each, peak) for each, peak in zip(regions, peaks, strict=True)),
        )

    def _region(self, region: RegionChoice, peak: int) -> ChunkRegion:
        nodes = self._profile.nodes[region.first : region.last + 1]
        last = self._profile.nodes[region.last]
        return ChunkRegion(
            module=common_module([module_of(each) for each in nodes]),
            first=nodes[0].name,
            last=last.name,
            dims={self._profile.nodes[each].name: dim for each, dim in sorted(region.choices.items())},
            extent=int(last.meta["val"].shape[region.choices[region.last]]),
            size=region.size,
            peak=peak,
            unchunked_peak=int(self._profile.live[region.first : region.last + 1].max()),
        )

    def _smallest(self) -> _Measured:
        """Return the regions of the smallest possible peak."""
        search = RegionSearch(self._profile, inplace=self._inplace)
        found: list[_Measured] = []
        for _ in range(_MOST_REPEATS):
            regions, estimate = search.smallest()
            if found and estimate >= min(result.peak for _, _, result in found):
                break
            chunked, result = self._rewrite(regions)
            found.append((regions, chunked, result))
            _correct(search, regions, result, estimate)
        best = min(found, key=lambda each: each[2].peak)
        # Corrections are those of small chunks; other regions can have a smaller peak.
        while (better := self._fastest(best[2].peak - 1)) is not None:
            best = better
        return best

    def _refusal(self, budget: int, result: GraphProfile) -> ValueError:
        """Return the error for a budget that no plan keeps.

        Args:
            budget: The budget.
            result: The profile of the plan of the smallest possible peak.
        """
        largest = result.largest_at(int(result.live.argmax()))
        named = largest.node
        if named.op == "call_module":  # the output of a loop has the name of the operation
            named = max(named.users, key=lambda each: each.meta["val"].nbytes)
        value = named.meta["val"]
        shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
        module = module_of(named)
        where = f" in {module}" if module else ""
        return ValueError(
            f"no plan for {self._model} fits into {bytes_text(budget)} ({budget} bytes): the smallest "
            f"possible budget is {bytes_text(result.peak)} ({result.peak} bytes), and without chunks the "
            f"peak is {bytes_text(self.unchunked_peak)}; the largest tensor there is {named.name}{shape}"
            f"{where}, {bytes_text(largest.size)}"
        )


def _peaks(result: GraphProfile, num_regions: int) -> list[int]:
    """Return the live bytes during each region of a rewritten graph."""
    targets = {str(node.target): at for at, node in enumerate(result.nodes) if node.op == "call_module"}
    return [int(result.live[targets[loop_name(number)]]) for number in range(num_regions)]


def _correct(
    search: RegionSearch, regions: Sequence[RegionChoice], result: GraphProfile, budget: int
) -> None:
    """Correct the estimates of the regions that are beyond the budget."""
    names = {loop_name(number): region for number, region in enumerate(regions)}
    corrected: set[Any] = set()  # repeated blocks have one estimate
    hoisted = 0  # bytes beyond the budget during the operations that run before the next loop
    for node, live in zip(result.nodes, result.live, strict=True):
        region = names.get(str(node.target)) if node.op == "call_module" else None
        if region is None:
            hoisted = max(hoisted, int(live) - budget)
            continue
        missing = int(live) - region.estimate if live > budget else 0
        if max(missing, hoisted) > 0 and region.key not in corrected:
            corrected.add(region.key)
            search.correct(region, max(missing, hoisted))
        hoisted = 0
    if hoisted > 0 and regions[-1].key not in corrected:
        search.correct(regions[-1], hoisted)
