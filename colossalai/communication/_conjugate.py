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
from functools import partial
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
    along = {"dim": dim, "parallel_mode": axis}
    return _apply(tensor, axis, partial(all_gather, **along), partial(reduce_scatter, **along))


def gather_forward_split_backward(tensor: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """Gather slices along `dim`; keep this rank's slice of the gradient, which is the same on all ranks."""
    gather = partial(all_gather, dim=dim, parallel_mode=axis)
    return _apply(tensor, axis, gather, partial(slice_of, axis=axis, dim=dim))


def split_forward_gather_backward(tensor: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """Keep this rank's slice along `dim`; gather the slices of the gradient."""
    gather = partial(all_gather, dim=dim, parallel_mode=axis)
    return _apply(tensor, axis, partial(slice_of, axis=axis, dim=dim), gather)


def scatter_forward_gather_backward(tensor: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """Sum over the ranks and keep this rank's slice along `dim`; gather the slices of the gradient."""
    along = {"dim": dim, "parallel_mode": axis}
    return _apply(tensor, axis, partial(reduce_scatter, **along), partial(all_gather, **along))


def reduce_forward_copy_backward(tensor: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Sum over the ranks; the gradient of the sum is the gradient of every term."""
    return _apply(tensor, axis, partial(all_reduce, parallel_mode=axis), _unchanged)


def copy_forward_reduce_backward(tensor: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Return a view of a replicated tensor; sum its gradients over the ranks."""
    return _apply(tensor, axis, _view, partial(all_reduce, parallel_mode=axis))


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
    exchange_dims = partial(all_to_all, parallel_mode=axis)
    return _apply(
        tensor,
        axis,
        partial(exchange_dims, split_dim=split_dim, gather_dim=gather_dim),
        # The inverse exchange: gather along `split_dim`, in the order of the ranks, and split `gather_dim`.
        partial(exchange_dims, split_dim=gather_dim, gather_dim=split_dim),
    )


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
    return _apply(
        rows,
        axis,
        partial(_exchange_rows, axis=axis, num_sent=num_sent, num_received=num_received),
        partial(_exchange_rows, axis=axis, num_sent=num_received, num_received=num_sent),
    )


Communicate = Callable[[torch.Tensor], torch.Tensor]


class _ConjugatePair(torch.autograd.Function):
    """A communication in the forward, and another one in the backward."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, forward: Communicate, backward: Communicate) -> torch.Tensor:
        ctx.conjugate = backward
        return forward(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.conjugate(grad), None, None


def _apply(tensor: torch.Tensor, axis: Axis, forward: Communicate, backward: Communicate) -> torch.Tensor:
    """Apply a pair; along an axis of one rank nothing is sent, and the tensor itself is returned."""
    return outside_graphs(_ConjugatePair.apply)(tensor, forward, backward) if axis.size > 1 else tensor


def _unchanged(grad: torch.Tensor) -> torch.Tensor:
    return grad


def _view(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view_as(tensor)


def _exchange_rows(
    rows: torch.Tensor, axis: Axis, num_sent: Sequence[int], num_received: Sequence[int]
) -> torch.Tensor:
    received = rows.new_empty((sum(num_received), *rows.shape[1:]))
    exchange(rows.contiguous().split(list(num_sent)), received.split(list(num_received)), axis)
    return received
