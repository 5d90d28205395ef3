"""Collectives with their conjugates: the forward and the backward communication along an axis.

Each function is named by the operations in both directions. An activation is replicated, sharded (slices) or
partial (terms of a sum) over the ranks; the placement of its gradient follows from that:

    forward    backward    from                   to
    gather     scatter     slices                 replicated, used differently on every rank
    gather     split       slices                 replicated, used alike on every rank
    split      gather      replicated             slices
    scatter    gather      terms of a sum         slices of the sum
    reduce     copy        terms of a sum         the sum, used alike on every rank
    copy       reduce      replicated             replicated, used differently on every rank
    all-to-all all-to-all  slices along one dim   slices along another
    exchange   exchange    rows of this rank      rows for this rank
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from colossalai.communication._collectives import all_gather, all_reduce, all_to_all, reduce_scatter
from colossalai.communication._exchange import exchange
from colossalai.context import Axis


def outside_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """Exclude a communicating function from the graphs of `torch.compile`."""
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
    """Sum over the ranks; the gradient of the sum is the gradient of every term."""
    return outside_graphs(_ReduceCopy.apply)(tensor, axis) if axis.size > 1 else tensor


def copy_forward_reduce_backward(tensor: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Return a view of a replicated tensor; sum its gradients over the ranks."""
    return outside_graphs(_CopyReduce.apply)(tensor, axis) if axis.size > 1 else tensor


def slice_of(tensor: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """Return this rank's slice of a replicated tensor, contiguous."""
    return tensor.chunk(axis.size, dim)[axis.rank].contiguous()


def all_to_all_forward_all_to_all_backward(
    tensor: torch.Tensor, axis: Axis, *, split_dim: int, gather_dim: int
) -> torch.Tensor:
    """Change the sharded dimension from `gather_dim` to `split_dim`; the gradient is exchanged back.

    For a slice of n bytes and p ranks, each direction sends (p - 1)/p n bytes.

    Args:
        tensor: This rank's slice, of the same shape on all ranks.
        axis: The ranks.
        split_dim: Sharded dimension of the result, of a size that is a multiple of the number of ranks.
        gather_dim: Sharded dimension of `tensor`.
    """
    if axis.size == 1:
        return tensor
    exchanged: torch.Tensor = outside_graphs(_AllToAll.apply)(tensor, axis, split_dim, gather_dim)
    return exchanged


def exchange_forward_exchange_backward(
    rows: torch.Tensor, axis: Axis, *, num_sent: Sequence[int], num_received: Sequence[int]
) -> torch.Tensor:
    """Send each rank its rows; the gradients of the received rows are sent back.

    Args:
        rows: Rows to send, in the order of their target ranks; shape (sum of `num_sent`, ...).
        axis: The ranks.
        num_sent: Number of rows for each rank.
        num_received: Number of rows from each rank.

    Returns:
        The received rows, in the order of their source ranks; shape (sum of `num_received`, ...).
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
        # The inverse exchange: gather along `split_dim`, in the order of the ranks, and split `gather_dim`.
        back = all_to_all(grad, ctx.axis, split_dim=ctx.gather_dim, gather_dim=ctx.split_dim)
        return back, None, None, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, axis: Axis, num_sent: Sequence[int], num_received: Sequence[int]
    ) -> torch.Tensor:
        ctx.axis, ctx.num_sent, ctx.num_received = axis, num_sent, num_received
        return _exchange_rows(rows, axis, num_sent, num_received)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _exchange_rows(grad, ctx.axis, ctx.num_received, ctx.num_sent), None, None, None


def _exchange_rows(
    rows: torch.Tensor, axis: Axis, num_sent: Sequence[int], num_received: Sequence[int]
) -> torch.Tensor:
    received = rows.new_empty((sum(num_received), *rows.shape[1:]))
    exchange(rows.contiguous().split(list(num_sent)), received.split(list(num_received)), axis)
    return received
