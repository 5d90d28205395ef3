"""Conversion plans: the cheaper of a path and a direct exchange, cached for a mesh.

Only collectives reduce sums. So a conversion that reduces a sum is a path up to a placement with the sums of
the target, followed by either more moves or a direct exchange.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from colossalai.context import Mesh
from colossalai.tensor.conversion._costs import CollectiveCosts, MessageCosts, exchange_cost
from colossalai.tensor.conversion._direct import (
    DirectExchange,
    Transfer,
    axes_between,
    busiest,
    direct_exchange,
    transfers,
)
from colossalai.tensor.conversion._layout import AxisPlacement, Extents, ShardingLayout
from colossalai.tensor.conversion._moves import Move, one_step_moves
from colossalai.tensor.conversion._path import Path, greedy_path, shortest_paths

Step = Move | DirectExchange


@dataclass(frozen=True)
class ConversionPlan:
    """Steps that convert a tensor between two layouts.

    Attributes:
        source: Layout before the steps.
        target: Layout after the steps.
        steps: Moves, optionally with a direct exchange at the end.
        path: Layouts before, between and after the steps.
        cost: Cost of the steps in the unit of the cost model: bytes and messages, or seconds.
    """

    source: ShardingLayout
    target: ShardingLayout
    steps: tuple[Step, ...]
    path: tuple[ShardingLayout, ...]
    cost: float

    def __str__(self) -> str:
        return "; ".join(map(str, self.steps)) or "nothing"

    def run(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's slice in the target's layout, contiguous; collective.

        A plan without steps returns the tensor itself; otherwise the result is new memory.
        """
        mesh, result = self.source.spec.mesh, tensor
        for step in self.steps:
            result = step.run(result, mesh)
        result = result.contiguous()
        if self.steps and result.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr():
            result = result.clone()  # frees the full tensor, which a view would keep alive
        return result


class ConversionPlanner:
    """Find plans over a mesh and cache them.

    All ranks find the same plans, because they run the same search with the same costs.

    Args:
        mesh: The mesh.
        costs: Costs of moves. Default: bytes, with ties resolved by the number of collectives.
    """

    def __init__(self, mesh: Mesh, costs: CollectiveCosts | None = None) -> None:
        self.mesh = mesh
        self.costs: CollectiveCosts = MessageCosts(mesh.axes) if costs is None else costs
        self._axes = {axis: size for axis, size in mesh.axes.items() if size > 1}
        self._plans: dict[tuple[ShardingLayout, ShardingLayout, int], ConversionPlan] = {}
        self._paths: dict[tuple[ShardingLayout, int, bool], Mapping[AxisPlacement, Path]] = {}

    def plan(self, source: ShardingLayout, target: ShardingLayout, itemsize: int) -> ConversionPlan:
        """Return the cheapest plan; plans with a direct exchange at the end are included.

        Args:
            source: Layout of the tensor.
            target: Layout of the result.
            itemsize: Size of an element in bytes.

        Raises:
            ValueError: `target` is of another tensor or mesh than `source`, or has a sum that `source`
                lacks.
        """
        key = (source, target, itemsize)
        if key not in self._plans:
            check_pair(source, target)
            self._plans[key] = self._cheapest(source, target, itemsize)
        return self._plans[key]

    def exact(self, source: ShardingLayout, target: ShardingLayout, itemsize: int) -> ConversionPlan | None:
        """Return the cheapest plan without a direct exchange, None if no such plan exists."""
        check_pair(source, target)
        return self._exact(source, target, self._paths_from(source, self._extents(source, target, itemsize)))

    def greedy(self, source: ShardingLayout, target: ShardingLayout, itemsize: int) -> ConversionPlan:
        """Return the plan of the documented greedy search."""
        check_pair(source, target)
        extents = self._extents(source, target, itemsize)
        path = greedy_path(source.placement, target.placement, extents, self.costs)
        return self._by_moves(source, target, path)

    def direct(self, source: ShardingLayout, target: ShardingLayout, itemsize: int) -> ConversionPlan:
        """Return the plan of a single direct exchange.

        Raises:
            ValueError: `target` does not have the sums of `source`.
        """
        check_pair(source, target)
        if source.partial != target.partial:
            raise ValueError(f"boxes are exchanged, sums along {list(source.partial)} are not reduced")
        moved, cost = self._exchange(source, target, itemsize)
        return self._with_exchange(source, target, Path((), 0.0), moved, cost)

    def one_step(self, source: ShardingLayout, itemsize: int) -> list[tuple[ShardingLayout, Move, float]]:
        """Return the layouts after one move along a single axis, each with the move and its cost."""
        extents = self._extents(source, source, itemsize)
        return [
            (
                source.at(move.target),
                move,
                move.cost(self.costs, extents.largest(source.placement, move.target)),
            )
            for move in one_step_moves(source.placement, extents, joined=False)
        ]

    def _cheapest(self, source: ShardingLayout, target: ShardingLayout, itemsize: int) -> ConversionPlan:
        if _is_same(source, target):
            return ConversionPlan(source, target, (), (source,), 0.0)
        paths = self._paths_from(source, self._extents(source, target, itemsize))
        best = self._exact(source, target, paths)
        # Sums are reduced before the exchange, and no move after the last reduction makes the exchange
        # cheaper: it begins after the last reduction of a path, or at the source.
        for placement, path in paths.items():
            begins_here = not path.moves or path.moves[-1].op in ("all_reduce", "reduce_scatter")
            if not begins_here or placement.partial != target.partial:
                continue
            if best is not None and path.cost >= best.cost:
                continue
            moved, cost = self._exchange(source.at(placement), target, itemsize)
            if best is None or path.cost + cost < best.cost:
                best = self._with_exchange(source, target, path, moved, cost)
        assert best is not None, f"no way from {source} to {target}"
        return best

    def _exact(
        self, source: ShardingLayout, target: ShardingLayout, paths: Mapping[AxisPlacement, Path]
    ) -> ConversionPlan | None:
        path = paths.get(target.placement)
        if path is None or source.spec.parts_of_dims != target.spec.parts_of_dims:
            return None  # or the axes are the same, but the parts of the dimensions differ
        return self._by_moves(source, target, path)

    def _by_moves(self, source: ShardingLayout, target: ShardingLayout, path: Path) -> ConversionPlan:
        layouts = [source, *(source.at(move.target) for move in path.moves[:-1])]
        if path.moves:
            layouts.append(target)
        return ConversionPlan(source, target, path.moves, tuple(layouts), path.cost)

    def _exchange(
        self, source: ShardingLayout, target: ShardingLayout, itemsize: int
    ) -> tuple[list[Transfer], float]:
        """Return the transfers of an exchange, and its cost."""
        moved = transfers(source.spec, target.spec)
        axes = axes_between(moved, self.mesh)
        num_bytes = busiest(moved, self.mesh.world_size) * itemsize
        return moved, exchange_cost(self.costs, num_bytes, axes, self.mesh.axis_size(axes))

    def _with_exchange(
        self, source: ShardingLayout, target: ShardingLayout, path: Path, moved: list[Transfer], cost: float
    ) -> ConversionPlan:
        layouts = [source, *(source.at(move.target) for move in path.moves)]
        last = direct_exchange(layouts[-1].spec, target.spec, moved)
        return ConversionPlan(source, target, (*path.moves, last), (*layouts, target), path.cost + cost)

    def _extents(self, source: ShardingLayout, target: ShardingLayout, itemsize: int) -> Extents:
        by_parts = any(count > 1 for layout in (source, target) for count in layout.spec.parts_of_dims)
        return Extents(source.spec.shape, self._axes, itemsize, by_parts)

    def _paths_from(self, source: ShardingLayout, extents: Extents) -> Mapping[AxisPlacement, Path]:
        key = (source, extents.itemsize, extents.is_cut_by_parts)
        if key not in self._paths:
            self._paths[key] = shortest_paths(source.placement, extents, self.costs)
        return self._paths[key]


def _is_same(source: ShardingLayout, target: ShardingLayout) -> bool:
    return source.placement == target.placement and source.spec.parts_of_dims == target.spec.parts_of_dims


def check_pair(source: ShardingLayout, target: ShardingLayout) -> None:
    """Refuse a pair of layouts without a conversion.

    Raises:
        ValueError: `target` is of another tensor or mesh than `source`, or has a sum that `source` lacks.
    """
    of_source, of_target = source.spec, target.spec
    if of_source.mesh is not of_target.mesh:
        raise ValueError(
            f"a tensor is converted over one mesh, not from {of_source.mesh!r} to another one, "
            f"{of_target.mesh!r}"
        )
    if of_source.shape != of_target.shape:
        raise ValueError(
            f"the layouts are of tensors of shape {of_source.shape} and {of_target.shape}: nothing is padded "
            "unless you request it, with pad_to(tensor, shape) and a PaddedSpec of that shape on both sides"
        )
    if of_source.stored_as != of_target.stored_as:
        raise ValueError(
            f"stored_as is {of_source.stored_as} and {of_target.stored_as}: permute the dimensions "
            "before or after"
        )
    more = sorted(set(target.partial) - set(source.partial))
    if more:
        raise ValueError(
            f"the target holds terms of a sum along {more}, along which the source holds none: a value "
            "that is there is not taken apart"
        )
