"""Plans of conversions: the cheapest of a path and a direct exchange, found once for a mesh.

Terms of a sum are added by collectives only. So a conversion that leaves a sum behind is a path up to the
placement where the sums are those of the target, and from there on either more moves or a direct exchange.
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
    """What brings a tensor from a layout to another one.

    Attributes:
        source: The layout before.
        target: The layout after.
        steps: Moves, and at the end perhaps a direct exchange.
        path: The layouts before, between and after the steps.
        cost: What it costs: bytes and messages, or seconds, as the costs count.
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

        A plan without steps returns the tensor itself; else the result has memory of its own.
        """
        mesh, result = self.source.spec.mesh, tensor
        for step in self.steps:
            result = step.run(result, mesh)
        result = result.contiguous()
        if self.steps and result.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr():
            result = result.clone()  # a slice does not keep the whole alive
        return result


class ConversionPlanner:
    """Finds plans over a mesh and keeps them.

    All ranks find the same plans, because they search alike with the same costs.

    Args:
        mesh: The mesh.
        costs: What moves cost; default: bytes, and among equal ones collectives.
    """

    def __init__(self, mesh: Mesh, costs: CollectiveCosts | None = None) -> None:
        self.mesh = mesh
        self.costs: CollectiveCosts = MessageCosts(mesh.axes) if costs is None else costs
        self._axes = {axis: size for axis, size in mesh.axes.items() if size > 1}
        self._plans: dict[tuple[ShardingLayout, ShardingLayout, int], ConversionPlan] = {}
        self._paths: dict[tuple[ShardingLayout, int, bool], Mapping[AxisPlacement, Path]] = {}

    def plan(self, source: ShardingLayout, target: ShardingLayout, itemsize: int) -> ConversionPlan:
        """Return the cheapest plan; one that ends with a direct exchange is considered.

        Args:
            source: The layout of the tensor.
            target: The layout that it is to have.
            itemsize: Bytes of an element.

        Raises:
            ValueError: `target` is of another tensor or mesh than `source`, or has a sum where `source` has
                none.
        """
        key = (source, target, itemsize)
        if key not in self._plans:
            check_pair(source, target)
            self._plans[key] = self._cheapest(source, target, itemsize)
        return self._plans[key]

    def exact(self, source: ShardingLayout, target: ShardingLayout, itemsize: int) -> ConversionPlan | None:
        """Return the cheapest path by moves alone, None if there is none."""
        check_pair(source, target)
        return self._exact(source, target, self._paths_from(source, self._extents(source, target, itemsize)))

    def greedy(self, source: ShardingLayout, target: ShardingLayout, itemsize: int) -> ConversionPlan:
        """Return the path that the documented search finds."""
        check_pair(source, target)
        extents = self._extents(source, target, itemsize)
        path = greedy_path(source.placement, target.placement, extents, self.costs)
        return self._by_moves(source, target, path)

    def direct(self, source: ShardingLayout, target: ShardingLayout, itemsize: int) -> ConversionPlan:
        """Return the direct exchange alone.

        Raises:
            ValueError: `target` has not the same sums as `source`.
        """
        check_pair(source, target)
        if source.partial != target.partial:
            raise ValueError(f"boxes are exchanged, sums along {list(source.partial)} are not reduced")
        moved, cost = self._exchange(source, target, itemsize)
        return self._with_exchange(source, target, Path((), 0.0), moved, cost)

    def one_step(self, source: ShardingLayout, itemsize: int) -> list[tuple[ShardingLayout, Move, float]]:
        """Return the layouts that one move along a single axis reaches, the move and what it costs."""
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
        # Sums are reduced before the exchange, and after the last of them no move would make it cheaper: it
        # begins where a path leaves the last sum behind, or at the source.
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
            return None  # or the axes are the same, and what they cut is not
        return self._by_moves(source, target, path)

    def _by_moves(self, source: ShardingLayout, target: ShardingLayout, path: Path) -> ConversionPlan:
        layouts = [source, *(source.at(move.target) for move in path.moves[:-1])]
        if path.moves:
            layouts.append(target)
        return ConversionPlan(source, target, path.moves, tuple(layouts), path.cost)

    def _exchange(
        self, source: ShardingLayout, target: ShardingLayout, itemsize: int
    ) -> tuple[list[Transfer], float]:
        """Return who gives what to whom in an exchange, and what it costs."""
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
    """Refuse two layouts between which there is no conversion.

    Raises:
        ValueError: `target` is of another tensor or mesh than `source`, or has a sum where `source` has none.
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
            "unless somebody says so, with pad_to(tensor, shape) and a PaddedSpec of that shape on both sides"
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
