"""Collectives with their conjugates: what the forward does along an axis, and what the backward has to do.

Each is named by what happens to the data in both directions. Of an activation every rank holds the whole, a
slice, or a term of a sum; that decides what it holds of the gradient:

    forward    backward    from                   to
    gather     scatter     slices                 the whole, used differently on every rank
    gather     split       slices                 the whole, used alike on every rank
    split      gather      the whole, alike       slices
    scatter    gather      terms of a sum         slices of the sum
    reduce     copy        terms of a sum         the sum, used alike on every rank
    copy       reduce      the whole, alike       the whole, used differently on every rank
    all-to-all all-to-all  slices along one dim   slices along another
    exchange   exchange    rows where they are    rows where they are needed
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from colossalai.communication._collectives import all_gather, all_reduce, all_to_all, reduce_scatter
from colossalai.communication._exchange import exchange
from colossalai.context import Axis


def outside_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that communicates, such that `torch.compile` does not look into it."""
    return torch.compiler.disable(function) if torch.compiler.is_compiling() else function


def gather_forward_scatter_backward(tensor: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """Gather slices along `dim`; sum the gradients and keep this rank's slice."""
    return outside_graphs(_GatherScatter.apply)(tensor, axis, dim) if axis.size > 1 else tensor


def gather_forward_split_backward(tensor: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """Gather slices along `dim`; keep this rank's slice of the gradient, which is the same on all ranks."""
    return outside_graphs(_GatherSplit.apply)(tensor, axis, dim) if axis.size > 1 else tensor


def split_forward_gather_backward(tensor: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """Keep this rank's slice along `dim`; gather the slices of the gradient."""
    return outside_graphs(_SplitGather.apply)(tensor, axis, dim) if axis.size > 1 else tensor


def scatter_forward_gather_backward(tensor: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """Sum over the ranks and keep this rank's slice along `dim`; gather the slices of the gradient."""
    return outside_graphs(_ScatterGather.apply)(tensor, axis, dim) if axis.size > 1 else tensor


def reduce_forward_copy_backward(tensor: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Sum over the ranks; the gradient of the sum is that of every term."""
    return outside_graphs(_ReduceCopy.apply)(tensor, axis) if axis.size > 1 else tensor


def copy_forward_reduce_backward(tensor: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Use a tensor that all ranks hold; sum what they find as its gradient."""
    return outside_graphs(_CopyReduce.apply)(tensor, axis) if axis.size > 1 else tensor


def slice_of(tensor: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """Return this rank's slice of a tensor that all ranks hold, contiguous."""
    return tensor.chunk(axis.size, dim)[axis.rank].contiguous()


def all_to_all_forward_all_to_all_backward(
    tensor: torch.Tensor, axis: Axis, *, split_dim: int, gather_dim: int
) -> torch.Tensor:
    """Exchange slices along `gather_dim` for slices along `split_dim`; the gradient goes the way back.

    With n bytes of a slice and p ranks each direction sends (p - 1)/p n.

    Args:
        tensor: A slice; of the same shape on all ranks.
        axis: The ranks.
        split_dim: The dimension that the result is cut along, a multiple of the number of ranks.
        gather_dim: The dimension that `tensor` is cut along.
    """
    if axis.size == 1:
        return tensor
    exchanged: torch.Tensor = outside_graphs(_AllToAll.apply)(tensor, axis, split_dim, gather_dim)
    return exchanged


def exchange_forward_exchange_backward(
    rows: torch.Tensor, axis: Axis, *, num_sent: Sequence[int], num_received: Sequence[int]
) -> torch.Tensor:
    """Send each rank the rows that are for it; the gradients of what came go the way back.

    Args:
        rows: (sum of `num_sent`, ...): those for the first rank, then those for the second, and so on.
        axis: The ranks.
        num_sent: How many go to each.
        num_received: How many come from each.

    Returns:
        (sum of `num_received`, ...), in the order of the ranks that sent them.
    """
    if axis.size == 1:
        return rows
    received: torch.Tensor = outside_graphs(_Exchange.apply)(rows, axis, num_sent, num_received)
    return received


class _GatherScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
        ctx.axis, ctx.dim = axis, dim
        return all_gather(tensor, dim, axis)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return reduce_scatter(grad, ctx.dim, ctx.axis), None, None


class _GatherSplit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
        ctx.axis, ctx.dim = axis, dim
        return all_gather(tensor, dim, axis)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return slice_of(grad, ctx.axis, ctx.dim), None, None


class _SplitGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
        ctx.axis, ctx.dim = axis, dim
        return slice_of(tensor, axis, dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return all_gather(grad, ctx.dim, ctx.axis), None, None


class _ScatterGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
        ctx.axis, ctx.dim = axis, dim
        return reduce_scatter(tensor, dim, axis)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return all_gather(grad, ctx.dim, ctx.axis), None, None


class _ReduceCopy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, axis: Axis) -> torch.Tensor:
        return all_reduce(tensor, axis)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class _CopyReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, axis: Axis) -> torch.Tensor:
        ctx.axis = axis
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return all_reduce(grad, ctx.axis), None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, axis: Axis, split_dim: int, gather_dim: int) -> torch.Tensor:
        ctx.axis, ctx.split_dim, ctx.gather_dim = axis, split_dim, gather_dim
        return all_to_all(tensor, axis, split_dim=split_dim, gather_dim=gather_dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        # What was split is gathered again, in the order of the ranks, and what was gathered is split.
        back = all_to_all(grad, ctx.axis, split_dim=ctx.gather_dim, gather_dim=ctx.split_dim)
        return back, None, None, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, axis: Axis, num_sent: Sequence[int], num_received: Sequence[int]
    ) -> torch.Tensor:
        ctx.axis, ctx.num_sent, ctx.num_received = axis, num_sent, num_received
        return _exchanged(rows, axis, num_sent, num_received)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _exchanged(grad, ctx.axis, ctx.num_received, ctx.num_sent), None, None, None


def _exchanged(
    rows: torch.Tensor, axis: Axis, num_sent: Sequence[int], num_received: Sequence[int]
) -> torch.Tensor:
    received = rows.new_empty((sum(num_received), *rows.shape[1:]))
    exchange(rows.contiguous().split(list(num_sent)), received.split(list(num_received)), axis)
    return received
