"""One-step moves between layouts: all-gather, shard, all-to-all, all-reduce, reduce-scatter.

A move takes axes off the end of a dimension's list, or off the sum, and puts them at the end of another list,
or nowhere:

    all-gather       end of a dimension -> nowhere
    shard            nowhere            -> end of a dimension      (local)
    all-to-all       end of a dimension -> end of another one
    all-reduce       the sum            -> nowhere
    reduce-scatter   the sum            -> end of a dimension

Axes that are neighbours in the mesh, in its order, move together: their ranks, row by row, are the slices in
their order. That is one collective over the joined axis where single axes would be several.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from colossalai.communication import all_gather, all_reduce, all_to_all, reduce_scatter
from colossalai.context import Mesh
from colossalai.tensor.conversion._costs import CollectiveCosts
from colossalai.tensor.conversion._layout import AxisPlacement, Extents


@dataclass(frozen=True)
class Move:
    """One collective, or one local step.

    Attributes:
        op: "all_gather", "shard", "all_to_all", "all_reduce" or "reduce_scatter".
        axes: Axes of the collective, flattened.
        target: Placement after the move.
        gather_dim: Dimension that is gathered, or None.
        split_dim: Dimension that is split, or None.
    """

    op: str
    axes: tuple[str, ...]
    target: AxisPlacement
    gather_dim: int | None = None
    split_dim: int | None = None

    def __str__(self) -> str:
        of_dims = "".join(
            f" {word} dimension {dim}"
            for word, dim in (("gathers", self.gather_dim), ("splits", self.split_dim))
            if dim is not None
        )
        return f"{self.op} over {'*'.join(self.axes)}{of_dims}"

    def cost(self, costs: CollectiveCosts, num_bytes: float) -> float:
        """Return the cost of the move; `num_bytes` is the larger of the slices before and after it."""
        return 0.0 if self.op == "shard" else costs.cost(self.op, num_bytes, self.axes)

    def run(self, tensor: torch.Tensor, mesh: Mesh) -> torch.Tensor:
        """Return this rank's slice after the move; collective, and for `shard` a view."""
        axis = mesh.axis(self.axes)
        if self.op == "all_reduce":
            return all_reduce(tensor, axis)
        if self.gather_dim is None:
            assert self.split_dim is not None, f"{self} does nothing"
            if self.op == "shard":
                return tensor.chunk(axis.size, self.split_dim)[axis.rank]
            return reduce_scatter(tensor, self.split_dim, axis)
        if self.split_dim is None:
            return all_gather(tensor, self.gather_dim, axis)
        return all_to_all(tensor, axis, split_dim=self.split_dim, gather_dim=self.gather_dim)


def one_step_moves(placement: AxisPlacement, extents: Extents, *, joined: bool) -> Iterator[Move]:
    """Yield the moves from a placement to placements whose axes divide the shape.

    Args:
        placement: Placement before the moves.
        extents: Shape and mesh.
        joined: Whether to include moves over several axes at once.
    """
    runs = _runs(tuple(extents.axes), joined=joined)
    dims, partial = placement
    for axes in runs:
        if set(axes) <= set(partial):
            rest = AxisPlacement(dims, tuple(axis for axis in partial if axis not in axes))
            yield Move("all_reduce", axes, rest)
            for dim in _dims_that_take(axes, rest, extents):
                yield Move("reduce_scatter", axes, _with(rest, dim, axes), split_dim=dim)
        elif not any(axis in placement.partial or any(axis in cut for cut in dims) for axis in axes):
            for dim in _dims_that_take(axes, placement, extents):
                yield Move("shard", axes, _with(placement, dim, axes), split_dim=dim)
        for dim, cut in enumerate(dims):
            if cut[-len(axes) :] != axes or extents.is_cut_by_parts:
                continue
            shorter = AxisPlacement((*dims[:dim], cut[: -len(axes)], *dims[dim + 1 :]), partial)
            yield Move("all_gather", axes, shorter, gather_dim=dim)
            for other in _dims_that_take(axes, shorter, extents):
                if other != dim:
                    moved = _with(shorter, other, axes)
                    yield Move("all_to_all", axes, moved, gather_dim=dim, split_dim=other)


def _runs(axes: tuple[str, ...], *, joined: bool) -> list[tuple[str, ...]]:
    """Return the axes of single moves: each axis, and with `joined` runs of adjacent axes."""
    longest = len(axes) if joined else 1
    return [
        axes[begin : begin + count]
        for count in range(1, longest + 1)
        for begin in range(len(axes) - count + 1)
    ]


def _dims_that_take(axes: tuple[str, ...], placement: AxisPlacement, extents: Extents) -> Iterator[int]:
    """Yield the dimensions that can be sharded over additional axes."""
    if extents.is_cut_by_parts:  # parts are sharded separately, which a single collective cannot do
        return
    for dim, (size, cut) in enumerate(zip(extents.shape, placement.dims, strict=True)):
        if size % extents.num_ranks((*cut, *axes)) == 0:
            yield dim


def _with(placement: AxisPlacement, dim: int, axes: tuple[str, ...]) -> AxisPlacement:
    dims = placement.dims
    return AxisPlacement((*dims[:dim], (*dims[dim], *axes), *dims[dim + 1 :]), placement.partial)
