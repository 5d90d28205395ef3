"""The product of an activation and a weight, both cut over a mesh, along a scheme.

[Note: panels]
SUMMA (van de Geijn and Watts, 1997) computes a product of two operands that are both cut along the contracted
dimension panel by panel: in round k the ranks of column k of the grid broadcast their slice of x along the
rows, the ranks of row k their slice of w along the columns, and every rank adds the product of the two. No
rank ever holds more than one panel of each operand beside its own slices. The backward runs the same rounds:
it fetches each panel again, and sums each panel's gradient to its owner. The sum over the panels is in
float32 or better: in half precision each panel's product is rounded, and their sum once, at its end.

[Note: what is kept for the backward]
For slices of |x| and |w| bytes: |x| + |w| where nothing is gathered, and with panels, which are fetched
again; q (|x| + |w|) where operands are gathered whole, as in 3D and with `in_panels=False`. To fetch those
again would take (q-1) (|x| + |w|) more bytes, up to half of what 3D sends in forward and backward. Where
memory is short, recomputation of the block (`recompute=True`) keeps none of it.
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from colossalai.communication import (
    all_reduce,
    all_reduce_in_place,
    broadcast,
    copy_forward_reduce_backward,
    gather_forward_scatter_backward,
    outside_graphs,
    reduce_forward_copy_backward,
    reduce_in_place,
    scatter_forward_gather_backward,
    start_all_reduce,
)
from colossalai.context import Axis, Mesh
from colossalai.nn.layer.tensor_parallel._scheme import LinearScheme


class _Product(torch.autograd.Function):
    """x w + bias where nothing is gathered: the sum of dx travels while dw is computed.

    `copy_x` is the axis along which `x` is the same, so its gradient is summed over it; `copy_w` the same for
    `w`; over `reduce_y` the product is summed.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None,
        copy_x: Axis,
        copy_w: Axis,
        reduce_y: Axis,
        num_chunks: int,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        ctx.copy_x, ctx.copy_w = copy_x, copy_w
        if reduce_y.size == 1:
            return functional.linear(x, w.t(), bias)
        if num_chunks > 1:
            y = _summed_in_chunks(x, w, reduce_y, num_chunks)
        else:
            y = all_reduce_in_place(functional.linear(x, w.t()), reduce_y)
        return y if bias is None else y.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, w = ctx.saved_tensors
        needs_dx, needs_dw, needs_db, *_ = ctx.needs_input_grad
        dx = dw = db = None
        flat = dy.reshape(-1, dy.shape[-1])
        if needs_dx:
            dx = (flat @ w.t()).view_as(x)
            pending = start_all_reduce(dx, ctx.copy_x)
        if needs_dw:
            dw = _weight_gradient(x.reshape(-1, x.shape[-1]), flat, w)
            dw = all_reduce(dw, ctx.copy_w)
        if needs_db:
            db = flat.sum(0)
        if needs_dx:
            pending()
        return dx, dw, db, None, None, None, None


def _summed_in_chunks(x: torch.Tensor, w: torch.Tensor, axis: Axis, num_chunks: int) -> torch.Tensor:
    """Return x w summed over the ranks; each part of the columns is sent while the next is multiplied."""
    parts, waits = [], []
    for columns in w.chunk(num_chunks, dim=1):
        parts.append(functional.linear(x, columns.t()))
        waits.append(start_all_reduce(parts[-1], axis))
    for wait in waits:
        wait()
    return torch.cat(parts, dim=-1)


def _weight_gradient(x: torch.Tensor, dy: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Return x^T dy, in memory as `w` is: what is stored transposed gets a gradient without a copy."""
    return x.t() @ dy if w.is_contiguous() else (dy.t() @ x).t()


class ParallelMatmul:
    """The product of an activation and a weight along a scheme, with the axes of the scheme found once.

    What a rank keeps for the backward: see [Note: what is kept for the backward].

    Args:
        scheme: How x, w and y are cut, and what moves.
        mesh: The ranks.
    """

    def __init__(self, scheme: LinearScheme, mesh: Mesh) -> None:
        self.scheme = scheme
        self._moves = bool(scheme.gather_x or scheme.gather_w or scheme.scatter_y)
        if not self._moves:
            taken = (scheme.copy_x, scheme.copy_w, scheme.reduce_y)
            self._copy_x, self._copy_w, self._reduce_y = map(mesh.axis, taken)
            self._is_local = self._copy_x.size == self._copy_w.size == self._reduce_y.size == 1
        names = (*scheme.copy_x, *scheme.copy_w, *scheme.gather_x, *scheme.gather_w)
        if scheme.contracts_in_panels or scheme.yields_in_panels:
            self._panel_axes = tuple(map(mesh.axis, (scheme.gather_x or scheme.scatter_y, scheme.gather_w)))
        self._axes = {name: mesh.axis(name) for name in (*names, *scheme.reduce_y, *scheme.scatter_y)}

    def __call__(
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        in_panels: bool = True,
        num_chunks: int = 1,
    ) -> torch.Tensor:
        """Return this rank's slice of x w, or of x w + bias.

        Args:
            x: Slice of the input, (batch, ..., in).
            w: Slice of the weight, (in, out); a transposed view costs nothing.
            bias: Slice of the bias, whose gradient is this rank's.
            in_panels: Where both operands would be gathered along `in`, fetch one panel of each at a time
                instead (see [Note: panels]): less memory, more messages.
            num_chunks: Where nothing is gathered, but the product is summed over ranks: compute it in so many
                parts of the output features, and sum one while the next is computed.
        """
        x, w, bias = as_autocast(x), as_autocast(w), None if bias is None else as_autocast(bias)
        if self._moves:
            y = self._moving_product(x, w, in_panels=in_panels)
            return y if bias is None else y + bias
        if self._is_local:
            return functional.linear(x, w.t(), bias)
        axes = (self._copy_x, self._copy_w, self._reduce_y)
        product = outside_graphs(_Product.apply) if torch.compiler.is_compiling() else _Product.apply
        result: torch.Tensor = product(x, w, bias, *axes, num_chunks)
        return result

    def _moving_product(self, x: torch.Tensor, w: torch.Tensor, *, in_panels: bool) -> torch.Tensor:
        """Return the product where slices of an operand or of the result move between the ranks."""
        scheme, axes = self.scheme, self._axes
        for name in scheme.copy_x:
            x = copy_forward_reduce_backward(x, axes[name])
        for name in scheme.copy_w:
            w = copy_forward_reduce_backward(w, axes[name])
        if scheme.contracts_in_panels and in_panels:
            product: torch.Tensor = _Panels.apply(x, w, *self._panel_axes)
            return product
        if scheme.yields_in_panels and in_panels:
            transposed: torch.Tensor = _TransposedPanels.apply(x, w.t(), *self._panel_axes)
            return transposed
        for name in scheme.gather_x:
            x = gather_forward_scatter_backward(x, axes[name], 0 if name in scheme.x.batch else -1)
        for name in scheme.gather_w:
            w = gather_forward_scatter_backward(w, axes[name], 0 if name in scheme.w_in else 1)
        y = x @ w
        for name in scheme.reduce_y:
            y = reduce_forward_copy_backward(y, axes[name])
        for name in scheme.scatter_y:
            y = scatter_forward_gather_backward(y, axes[name], 0 if name in scheme.y.batch else -1)
        return y


def product(
    x: torch.Tensor,
    w: torch.Tensor,
    scheme: LinearScheme,
    mesh: Mesh,
    *,
    bias: torch.Tensor | None = None,
    in_panels: bool = True,
    num_chunks: int = 1,
) -> torch.Tensor:
    """Return this rank's slice of a product that is computed once; see `ParallelMatmul`."""
    return ParallelMatmul(scheme, mesh)(x, w, bias=bias, in_panels=in_panels, num_chunks=num_chunks)


def as_autocast(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in the type of autocast where it is on: it does not see into our autograd functions."""
    device_type = tensor.device.type
    if not torch.is_autocast_enabled(device_type) or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(device_type))


class _Panels(torch.autograd.Function):
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


class _TransposedPanels(torch.autograd.Function):
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
