"""Placement: the tiers of the chunks of a model, and its eviction plan.

All ranks that share chunks have the same plan, as it decides the order of collectives. So measurements (other
bytes, bytes of states, free bytes on disk) are combined over these ranks before they are used.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from colossalai.cluster import gather_values
from colossalai.context import Axis
from colossalai.zero._layout import FlatBucket
from colossalai.zero.gemini._tiers import TierMemory
from colossalai.zero.gemini.planning import (
    DoesNotFit,
    EvictionPlan,
    Home,
    ModelData,
    Placement,
    PlacementPolicy,
    Trace,
    plan_evictions,
)

_WIDE = 4  # bytes of an element in which an optimizer updates, at least
_ASSUMED_STATES = 2  # tensors of an optimizer for each parameter, before it has made them: Adam's


def assumed_state_bytes(dtype: torch.dtype) -> int:
    """Return the assumed bytes of states per element of a chunk, before an optimizer creates them."""
    return _ASSUMED_STATES * max(dtype.itemsize, _WIDE)


class ChunkPlacement:
    """The tiers of the chunks of a model: a policy applied to their sizes.

    Args:
        dtypes: The chunks, in the order of initialization, and the dtype of each.
        policy: The policy.
        tiers: The memory tiers of this rank.
        replicas: The ranks that plan together.

    Attributes:
        chunk_budget: Bytes of the compute tier for present chunks: at least two of them.

    Raises:
        ValueError: The policy does not suit the tiers, or a tier has too little room.
    """

    def __init__(
        self,
        dtypes: Mapping[FlatBucket, torch.dtype],
        policy: PlacementPolicy,
        tiers: TierMemory,
        replicas: Axis,
    ) -> None:
        self._policy = policy
        self._replicas = replicas
        self._layouts = list(dtypes)
        self._item_sizes = [dtype.itemsize for dtype in dtypes.values()]
        free = self._exchange([tiers.bounds[home] for home in tiers.bounds])
        self._bounds = {
            home: None if None in bounds else min(bounds)
            for home, bounds in zip(tiers.bounds, zip(*free, strict=True), strict=True)
        }
        self._data = self._model_data([assumed_state_bytes(dtype) for dtype in dtypes.values()])
        self._placement = policy.place(self._data, self._bounds)
        self.chunk_budget = self._bytes_for_chunks(None)

    @property
    def is_bounded(self) -> bool:
        """Whether there is a budget, so that an iteration is recorded and planned."""
        return bool(self._layouts) and self._budget(None) is not None

    @property
    def memory_budget(self) -> int | None:
        """Limit in bytes of all memory of the compute tier. None: no bound is known or set."""
        bound = (
            self._bounds[Home.COMPUTE] if self._policy.memory_budget is None else self._policy.memory_budget
        )
        return bound if self.is_bounded else None

    def set_state_margin(self, ratio: float) -> None:
        """Give states a fraction of the compute tier that sections leave, from the next plan on."""
        self._policy = replace(self._policy, gpu_margin_mem_ratio=ratio)

    def homes_of(self, number: int) -> tuple[Home, Home]:
        """Return the tiers of a chunk's section and of its states."""
        section, states = self._placement.sections[number], self._placement.states[number]
        is_trained = self._layouts[number].params[0].requires_grad
        has_master = self._item_sizes[number] < _WIDE
        if is_trained and not has_master and Home.HOST in (section, states) and section is not states:
            section = states  # the optimizer updates the section itself, so both are on one device
        return section, states

    def plan(
        self, trace: Trace, state_bytes: Mapping[FlatBucket, float], names: Sequence[Sequence[str]]
    ) -> EvictionPlan:
        """Choose tiers from a trace, and plan evictions; collective.

        Args:
            trace: The iteration of this rank.
            state_bytes: For each trained chunk the bytes of states of an element that this rank updates.
            names: The names of the parameters of each chunk.

        Raises:
            ValueError: The chunks of a function and the other memory exceed the budget; or ranks have used
                chunks in different orders. The previous plan remains.
        """
        per_element = [state_bytes.get(layout, 0.0) for layout in self._layouts]
        held = [sorted(beside) for beside in trace.held]
        # All ranks get the values of all ranks, so that they compute the same plan.
        everywhere = self._exchange((list(trace.uses), list(trace.other_bytes), held, per_element))
        for uses, other_bytes, its_held, its_bytes in everywhere:
            if tuple(uses) != trace.uses:
                raise ValueError(
                    "ranks have used parameters in different orders in the first iteration: gather the "
                    "modules in which they differ as a whole (whole_modules=[...])"
                )
            trace = trace.covering(Trace(trace.uses, tuple(other_bytes), tuple(map(frozenset, its_held))))
            per_element = list(map(max, per_element, its_bytes))
        data = self._model_data(per_element)
        placement = self._policy.place(data, self._bounds, trace)
        budget = self._budget_of(placement, data, trace)
        sizes = placement.bytes_when_present(data)
        written = [number for number, layout in enumerate(self._layouts) if layout.params[0].requires_grad]
        plan = plan_evictions(trace, sizes, budget, out_of_date=written)
        if isinstance(plan, DoesNotFit):
            at_home = placement.bytes_at(Home.COMPUTE, data)
            raise ValueError(
                f"the use of {', '.join(names[plan.chunk][:3])} takes {plan.needed_bytes} bytes with what is "
                f"there beside it, and memory_budget leaves {plan.allowed_bytes}: "
                f"memory_budget={plan.needed_bytes + at_home} would do, or smaller batches"
            )
        self._data, self._placement = data, placement
        self.chunk_budget = self._bytes_for_chunks(trace)
        return plan

    def _bytes_for_chunks(self, trace: Trace | None) -> int:
        """Return the bytes of the compute tier for present chunks without a plan."""
        budget = self._budget(trace)
        if budget is None:
            return self._data.two_chunks
        beside = 0 if trace is None else max(trace.other_bytes, default=0)
        return max(self._data.two_chunks, budget - beside)

    def _budget(self, trace: Trace | None) -> int | None:
        """Return the bytes for present chunks, and with a trace for other memory as well. None: no bound.

        Without `memory_budget` two chunks are present, as stage 3 guarantees.
        """
        return self._budget_of(self._placement, self._data, trace)

    def _budget_of(self, placement: Placement, data: ModelData, trace: Trace | None) -> int | None:
        if self._policy.memory_budget is None and self._policy.name not in ("auto", "nvme"):
            return None
        return self._policy.chunk_budget(placement, data, self._bounds, trace)

    def _model_data(self, state_bytes: Sequence[float]) -> ModelData:
        """Return the sizes of chunks, sections and states, these with mean gradients and masters."""
        chunks, sections, states = [], [], []
        for layout, item, per_element in zip(self._layouts, self._item_sizes, state_bytes, strict=True):
            section = max(layout.section_sizes)
            chunks.append(layout.numel * item)
            sections.append(section * item)
            wide = max(item, _WIDE)
            its_own = wide + (wide if item < wide else 0) + per_element  # the mean, and a master
            states.append(int(section * its_own) if layout.params[0].requires_grad else 0)
        return ModelData(tuple(chunks), tuple(sections), tuple(states))

    def _exchange(self, value: Any) -> list[Any]:
        """Return the values of all ranks that plan together; collective."""
        return [value] if self._replicas.size == 1 else gather_values(value, self._replicas.group)
