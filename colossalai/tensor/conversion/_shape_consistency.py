"""The documented manager of conversions: paths between specs, and tensors converted along them.

See the documentation's page "Layout converting management". `spec_of` returns the spec of a tensor.
"""

from functools import partial
from typing import TYPE_CHECKING

import torch

from colossalai._not_landed import refuse_name
from colossalai.context import Mesh
from colossalai.tensor._spec import ShardingSpec, set_spec, spec_of
from colossalai.tensor.conversion._convert import convert
from colossalai.tensor.conversion._costs import CollectiveCosts
from colossalai.tensor.conversion._layout import ShardingLayout
from colossalai.tensor.conversion._moves import Move
from colossalai.tensor.conversion._plan import ConversionPlanner, Step


class ShapeConsistencyManager:
    """Convert tensors between sharding specs.

    Args:
        costs: Costs of moves, such as measured seconds of a mesh. Default: bytes, with ties resolved by the
            number of collectives.
        itemsize: Size of an element in bytes, for the cost of plans without a tensor.
    """

    def __init__(self, costs: CollectiveCosts | None = None, *, itemsize: int = 4) -> None:
        self._costs = costs
        self._itemsize = itemsize
        self._planners: dict[Mesh, ConversionPlanner] = {}

    def shape_consistency(
        self, source: ShardingSpec, target: ShardingSpec
    ) -> tuple[list[ShardingSpec], list[Step], float]:
        """Return the specs from the source to the target, the moves between them, and their cost.

        Args:
            source: Current spec of the tensor.
            target: New spec of the tensor.
        """
        planner = self._planner(source.mesh)
        plan = planner.plan(ShardingLayout(source), ShardingLayout(target), self._itemsize)
        return [layout.spec for layout in plan.path], list(plan.steps), plan.cost

    def apply(self, tensor: torch.Tensor, target: ShardingSpec) -> torch.Tensor:
        """Return this rank's slice under another spec, with that spec attached; collective.

        Args:
            tensor: A slice with its spec; a tensor without a spec is replicated.
            target: New spec of the tensor.
        """
        source = spec_of(tensor)
        if source is None:
            source = ShardingSpec(target.shape, ((),) * len(target.shape), target.mesh, target.stored_as)
        converted = convert(tensor, source, target, planner=self._planner(target.mesh))
        if converted is not tensor:
            set_spec(converted, target)
        return converted

    def get_all_one_step_transform_spec(self, source: ShardingSpec) -> dict[ShardingSpec, tuple[Move, float]]:
        """Return the specs after one move along a single axis, each with the move and its cost."""
        found = self._planner(source.mesh).one_step(ShardingLayout(source), self._itemsize)
        return {layout.spec: (move, cost) for layout, move, cost in found}

    def _planner(self, mesh: Mesh) -> ConversionPlanner:
        if self._costs is None:
            return mesh.derived(ConversionPlanner)
        if mesh not in self._planners:
            self._planners[mesh] = ConversionPlanner(mesh, self._costs)
        return self._planners[mesh]


if not TYPE_CHECKING:
    __getattr__ = partial(refuse_name, "colossalai.tensor.shape_consistency")  # PEP 562
__path__: list[str] = []  # as a package, so that the import of a missing name uses the finder
