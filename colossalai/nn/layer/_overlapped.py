"""The product of operands that stay where they are, with what it communicates behind what it computes.

Where nothing is gathered or scattered, a rank multiplies the slices that it has: forward and backward are one
local linear layer, and sums over ranks. They are one autograd function here, so that

- the input's gradient is summed over the ranks while the weight's is computed;
- the product, which nobody else holds yet, is summed in place;
- the bias is added by the matrix product where no sum comes between.
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from colossalai.communication import all_reduce, all_reduce_in_place, outside_graphs, start_all_reduce
from colossalai.context import Axis


def overlapped_product(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    copy_x: Axis,
    copy_w: Axis,
    reduce_y: Axis,
    num_chunks: int = 1,
) -> torch.Tensor:
    """Return this rank's slice of x w + bias.

    Args:
        x: Slice of the input, (batch, ..., in).
        w: Slice of the weight, (in, out).
        bias: Slice of the bias; its gradient is this rank's.
        copy_x: The axis along which `x` is the same: its gradient is summed over it.
        copy_w: The same for `w`.
        reduce_y: The axis along which the product is summed.
        num_chunks: Parts of the output features: one is summed while the next is computed.
    """
    if copy_x.size == copy_w.size == reduce_y.size == 1:
        return functional.linear(x, w.t(), bias)
    return outside_graphs(_Product.apply)(x, w, bias, copy_x, copy_w, reduce_y, num_chunks)


class _Product(torch.autograd.Function):
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
