"""Products of pairs whose first residues are cut over ranks, with one block of an operand at a time.

[Note: triangles in a ring]
Each of p ranks has the rows i of both projections, (batch, dim, n/p, n). Outgoing edges need products of its
rows with the rows of all ranks: blocks of one operand are shifted around a ring, and each rank multiplies one
while the next one arrives. Incoming edges need sums over k, the dimension that is cut: partial sums are
shifted, and each rank adds its part. The gradient of a shifted block is a shifted sum, and the reverse. No
rank has a whole operand: two blocks of n^2/p at a time are enough.

`torch.export` records no messages between two ranks. In its traces, the channels are cut into p panels, and
each panel of the operand is gathered, or its partial sums are scattered: the same bytes, as much memory.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from colossalai.communication import (
    RingSum,
    gather_forward_scatter_backward,
    outside_graphs,
    ring_blocks,
    scatter_forward_gather_backward,
)
from colossalai.context import Axis


def product_of_rows(left: Tensor, right: Tensor, axis: Axis) -> Tensor:
    """Return left @ right.mT with the rows of all ranks as the columns of the result.

    With p ranks and the bytes b of `right` on a rank, the forward sends (p - 1) b, and the backward twice as
    much, in float32 or better.

    Args:
        left: Rows of this rank, (batch, dim, n/p, n).
        right: The same shape.
        axis: The ranks.

    Returns:
        (batch, dim, n/p, n).
    """
    left, right = _as_autocast(left, right)
    if torch.compiler.is_exporting():
        panels = zip(left.chunk(axis.size, 1), right.chunk(axis.size, 1), strict=True)
        return torch.cat([x @ gather_forward_scatter_backward(y, axis, -2).mT for x, y in panels], 1)
    product: Tensor = outside_graphs(_ProductOfRows.apply)(left, right, axis)
    return product


def product_over_rows(left: Tensor, right: Tensor, axis: Axis) -> Tensor:
    """Return rows of left.mT @ right, where the sum is over the rows of all ranks.

    With p ranks and the bytes b of the result on a rank, forward and backward each send (p - 1) b; the
    forward in float32 or better, in which the products of the ranks are summed.

    Args:
        left: Rows of this rank, (batch, dim, n/p, n).
        right: The same shape.
        axis: The ranks.

    Returns:
        (batch, dim, n/p, n).
    """
    left, right = _as_autocast(left, right)
    if torch.compiler.is_exporting():
        exact = torch.promote_types(left.dtype, torch.float32)
        panels = zip(left.chunk(axis.size, 1), right.chunk(axis.size, 1), strict=True)
        sums = [scatter_forward_gather_backward((x.mT @ y).to(exact), axis, -2) for x, y in panels]
        return torch.cat(sums, 1).to(left.dtype)
    product: Tensor = outside_graphs(_ProductOverRows.apply)(left, right, axis)
    return product


class _ProductOfRows(torch.autograd.Function):
    """See [Note: triangles in a ring]."""

    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor, axis: Axis) -> Tensor:
        ctx.save_for_backward(left, right)
        ctx.axis = axis
        product = left.new_empty(*left.shape[:-1], axis.size * right.shape[-2])
        for owner, (block,) in ring_blocks((right,), axis):
            product[..., _columns(owner, right)] = left @ block.mT
        return product

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        left, right = ctx.saved_tensors
        grad_left, grad_right = _zeros_of_sum(left), RingSum(ctx.axis)
        for owner, (block,) in ring_blocks((right,), ctx.axis):
            part = grad[..., _columns(owner, right)]
            grad_left += part @ block
            grad_right.add((part.mT @ left).to(grad_left.dtype))
        return grad_left.to(left.dtype), grad_right.finish()[0].to(right.dtype), None


class _ProductOverRows(torch.autograd.Function):
    """See [Note: triangles in a ring]."""

    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor, axis: Axis) -> Tensor:
        ctx.save_for_backward(left, right)
        ctx.axis = axis
        exact = torch.promote_types(left.dtype, torch.float32)
        product = RingSum(axis)
        for step in range(axis.size):  # blocks in the order of `ring_blocks`
            columns = _columns((axis.rank - step) % axis.size, left)
            product.add((left[..., columns].mT @ right).to(exact))
        return product.finish()[0].to(left.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        left, right = ctx.saved_tensors
        grad_left, grad_right = torch.empty_like(left), _zeros_of_sum(right)
        for owner, (block,) in ring_blocks((grad,), ctx.axis):
            columns = _columns(owner, left)
            grad_left[..., columns] = right @ block.mT
            grad_right += left[..., columns] @ block
        return grad_left, grad_right.to(right.dtype), None


def _columns(owner: int, rows: Tensor) -> slice:
    """Return the residues whose rows a rank has."""
    return slice(owner * rows.shape[-2], (owner + 1) * rows.shape[-2])


def _zeros_of_sum(like: Tensor) -> Tensor:
    return torch.zeros_like(like, dtype=torch.promote_types(like.dtype, torch.float32))


def _as_autocast(*operands: Tensor) -> tuple[Tensor, ...]:
    """Return the operands in the dtype in which autocast multiplies, contiguous."""
    device = operands[0].device.type
    if not torch.is_autocast_enabled(device) or operands[0].dtype == torch.float64:
        return tuple(x.contiguous() for x in operands)
    return tuple(x.to(torch.get_autocast_dtype(device)).contiguous() for x in operands)
