"""The product of an activation and a weight, both cut over a mesh, along a scheme.

[Note: panels]
SUMMA (van de Geijn and Watts, 1997) computes a product of two operands that are both cut along the contracted
dimension panel by panel: in round k the ranks of column k of the grid broadcast their slice of x along the
rows, the ranks of row k their slice of w along the columns, and every rank adds the product of the two. No
rank ever holds more than one panel of each operand beside its own slices. The backward runs the same rounds:
it fetches each panel again, and sums each panel's gradient to its owner.
"""

from typing import Any

import torch

from colossalai.communication import (
    broadcast,
    copy_forward_reduce_backward,
    gather_forward_scatter_backward,
    reduce,
    reduce_forward_copy_backward,
    scatter_forward_gather_backward,
)
from colossalai.context import Axis, Mesh
from colossalai.nn.layer._scheme import LinearScheme


def product(
    x: torch.Tensor, w: torch.Tensor, scheme: LinearScheme, mesh: Mesh, *, in_panels: bool = True
) -> torch.Tensor:
    """Return this rank's slice of x w.

    Args:
        x: Slice of the input, (batch, ..., in).
        w: Slice of the weight, (in, out); a transposed view costs nothing.
        scheme: How they are cut and moved.
        mesh: The ranks.
        in_panels: Where both operands would be gathered along `in`, fetch one panel of each at a time instead
            (see [Note: panels]): less memory, more messages.
    """
    for name in scheme.copy_x:
        x = copy_forward_reduce_backward(x, mesh.axis(name))
    for name in scheme.copy_w:
        w = copy_forward_reduce_backward(w, mesh.axis(name))
    if scheme.contracts_in_panels and in_panels:
        return _Panels.apply(x, w, mesh.axis(scheme.gather_x), mesh.axis(scheme.gather_w))
    if scheme.yields_in_panels and in_panels:
        return _TransposedPanels.apply(x, w.t(), mesh.axis(scheme.scatter_y), mesh.axis(scheme.gather_w))

    for name in scheme.gather_x:
        x = gather_forward_scatter_backward(x, mesh.axis(name), 0 if name in scheme.x.batch else -1)
    for name in scheme.gather_w:
        w = gather_forward_scatter_backward(w, mesh.axis(name), 0 if name in scheme.w_in else 1)
    y = x @ w
    for name in scheme.reduce_y:
        y = reduce_forward_copy_backward(y, mesh.axis(name))
    for name in scheme.scatter_y:
        y = scatter_forward_gather_backward(y, mesh.axis(name), 0 if name in scheme.y.batch else -1)
    return y


class _Panels(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, row: Axis, col: Axis) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        ctx.row, ctx.col = row, col
        y = x.new_zeros((*x.shape[:-1], w.shape[1]))
        flat = y.view(-1, w.shape[1])
        for k in range(row.size):
            x_panel, w_panel = _panel(x, row, k), _panel(w, col, k)
            flat.addmm_(x_panel.reshape(-1, x_panel.shape[-1]), w_panel)
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        x, w = ctx.saved_tensors
        flat = dy.reshape(-1, dy.shape[-1])
        dx, dw = x, w  # replaced in the round in which this rank is the owner
        for k in range(ctx.row.size):
            w_panel = _panel(w, ctx.col, k)
            dx_panel = reduce((flat @ w_panel.t()).view_as(x), ctx.row.ranks[k], ctx.row)
            del w_panel
            x_panel = _panel(x, ctx.row, k)
            dw_panel = reduce(x_panel.reshape(-1, x_panel.shape[-1]).t() @ flat, ctx.col.ranks[k], ctx.col)
            dx = dx_panel if ctx.row.rank == k else dx
            dw = dw_panel if ctx.col.rank == k else dw
        return dx, dw, None, None


class _TransposedPanels(torch.autograd.Function):
    """The same for x v^T, where x and v are cut alike along the contracted dimension; v is (out, in)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, v: torch.Tensor, row: Axis, col: Axis) -> torch.Tensor:
        ctx.save_for_backward(x, v)
        ctx.row, ctx.col = row, col
        flat = x.reshape(-1, x.shape[-1])
        mine = flat.new_empty(0)
        for k in range(row.size):
            term = reduce(flat @ _panel(v, col, k).t(), row.ranks[k], row)
            mine = term if row.rank == k else mine
        return mine.view(*x.shape[:-1], v.shape[0])

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        x, v = ctx.saved_tensors
        flat = x.reshape(-1, x.shape[-1])
        dx, dv = torch.zeros_like(flat), v  # dv is replaced in the round in which this rank is the owner
        for k in range(ctx.row.size):
            dy_panel = _panel(dy, ctx.row, k).reshape(-1, dy.shape[-1])
            dx.addmm_(dy_panel, _panel(v, ctx.col, k))
            term = reduce(dy_panel.t() @ flat, ctx.col.ranks[k], ctx.col)
            dv = term if ctx.col.rank == k else dv
        return dx.view_as(x), dv, None, None


def _panel(tensor: torch.Tensor, axis: Axis, k: int) -> torch.Tensor:
    """Return the slice of rank `k` along an axis, in memory of its own unless this is that rank."""
    mine = axis.rank == k
    return broadcast(tensor if mine else torch.empty_like(tensor), axis.ranks[k], axis)
