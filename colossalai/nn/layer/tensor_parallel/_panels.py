"""Products in panels (SUMMA): both operands are cut along the contracted dimension, and never gathered whole.

[Note: panels]
SUMMA (van de Geijn and Watts, 1997) computes a product of two operands that are both cut along the contracted
dimension panel by panel: in round k the ranks of column k of the grid broadcast their slice of x along the
rows, the ranks of row k their slice of w along the columns, and every rank adds the product of the two. No
rank ever holds more than one panel of each operand in addition to its own slices. The backward runs the same
rounds: it fetches each panel again, and sums each panel's gradient to its owner. The sum over the panels is
in float32 or better: in half precision each panel's product is rounded, and their sum once, at its end.
"""

from typing import Any

import torch

from colossalai.communication import broadcast, reduce_in_place
from colossalai.context import Axis


class Panels(torch.autograd.Function):
    """x w, where x is cut along `row` and w along `col`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, row: Axis, col: Axis) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        ctx.row, ctx.col = row, col
        y = _zeros_of_sum(x, (*x.shape[:-1], w.shape[1]))
        flat = y.view(-1, w.shape[1])
        for k in range(row.size):  # no name for a panel: it would keep it while the next ones come
            _add_product(flat, _panel(x, row, k).view(-1, x.shape[-1]), _panel(w, col, k))
        return y.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        x, w = ctx.saved_tensors
        row, col = ctx.row, ctx.col
        flat = dy.reshape(-1, dy.shape[-1])
        dx, dw = x, w  # replaced in the round in which this rank is the owner
        for k in range(row.size):
            dx = _sum_for(k, row, flat @ _panel(w, col, k).t(), otherwise=dx)
            dw = _sum_for(k, col, _panel(x, row, k).view(-1, x.shape[-1]).t() @ flat, otherwise=dw)
        return dx.view_as(x), dw, None, None


class TransposedPanels(torch.autograd.Function):
    """The same for x v^T, where x and v are cut alike along the contracted dimension; v is (out, in)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, v: torch.Tensor, row: Axis, col: Axis) -> torch.Tensor:
        ctx.save_for_backward(x, v)
        ctx.row, ctx.col = row, col
        flat = x.reshape(-1, x.shape[-1])
        y = flat  # replaced in the round in which this rank is the owner
        for k in range(row.size):
            y = _sum_for(k, row, flat @ _panel(v, col, k).t(), otherwise=y)
        return y.view(*x.shape[:-1], v.shape[0])

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        x, v = ctx.saved_tensors
        row, col = ctx.row, ctx.col
        flat = x.reshape(-1, x.shape[-1])
        dx, dv = (
            _zeros_of_sum(x, flat.shape),
            v,
        )  # dv is replaced in the round in which this rank is the owner
        for k in range(row.size):
            dy_panel = _panel(dy, row, k).view(-1, dy.shape[-1])
            _add_product(dx, dy_panel, _panel(v, col, k))
            dv = _sum_for(k, col, dy_panel.t() @ flat, otherwise=dv)
            del dy_panel  # before the next one comes
        return dx.to(x.dtype).view_as(x), dv, None, None


def _zeros_of_sum(like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return zeros to which products are added, in float32 or better."""
    return like.new_zeros(shape, dtype=torch.promote_types(like.dtype, torch.float32))


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Add a b to the total, without other memory where the types are the same."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total.add_(a @ b)


def _panel(tensor: torch.Tensor, axis: Axis, k: int) -> torch.Tensor:
    """Return the slice of rank `k` along an axis, contiguous, in new memory unless this is that rank."""
    mine = axis.rank == k
    panel = tensor if mine else torch.empty_like(tensor, memory_format=torch.contiguous_format)
    return broadcast(panel, axis.ranks[k], axis).contiguous()


def _sum_for(k: int, axis: Axis, term: torch.Tensor, *, otherwise: torch.Tensor) -> torch.Tensor:
    """Sum a term over an axis, in its memory; return the sum on rank `k`, and `otherwise` on the others."""
    reduce_in_place(term, axis.ranks[k], axis)
    return term if axis.rank == k else otherwise
