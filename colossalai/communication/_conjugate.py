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

[Note: conjugates in flight]
A pair is two nodes of the graph: one starts the forward communication, the other one waits for it. In the
backward they change places: the node that has waited starts the conjugate, and the node that has started
waits. The backward runs later operations first, so operations between the two nodes overlap with the
communication in both directions. The tensor between the two nodes is incomplete, and only connects them: the
second one returns the result. The gradient between them, whose shape autograd checks, is a placeholder
without memory. A flight has no reference to a node: a graph is freed without a wait, as after an error.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from colossalai.communication._collectives import (
    Pending,
    all_gather,
    all_reduce,
    all_to_all,
    reduce_scatter,
)
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
    @once_differentiable
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


Start = Callable[[torch.Tensor], Pending]


class _Flight:
    """A pair of communications, of which one is in flight at a time.

    Args:
        forward: Starts the communication of the forward.
        backward: Starts the conjugate.
    """

    def __init__(self, forward: Start, backward: Start) -> None:
        self.forward, self.backward = forward, backward
        self._pending: Pending | None = None

    def start(self, communicate: Start, tensor: torch.Tensor) -> torch.Tensor:
        """Start a communication and return the tensor that will have its result."""
        result, work = communicate(tensor)
        self._pending = result, work
        return result.detach()

    def wait(self) -> torch.Tensor:
        """Wait for the communication in flight, and return its result."""
        assert self._pending is not None, "each communication is waited for once"
        (result, work), self._pending = self._pending, None
        work.wait()
        return result


class _Started(torch.autograd.Function):
    """Starts the communication of the forward, and waits for its conjugate in the backward."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, flight: _Flight) -> torch.Tensor:
        ctx.flight = flight
        return flight.start(flight.forward, tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.flight.wait(), None


class _Finished(torch.autograd.Function):
    """Waits for the communication of the forward, and starts its conjugate in the backward."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, flight: _Flight) -> torch.Tensor:
        ctx.flight, ctx.shape = flight, tensor.shape
        ctx.save_for_backward(tensor.new_empty(0))  # a recomputation, which ends with saved tensors, waits
        return flight.wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.flight.start(ctx.flight.backward, grad)
        return grad.new_zeros(()).expand(ctx.shape), None


class TensorInFlight:
    """The result of a communication with a conjugate, not complete before `wait`.

    See [Note: conjugates in flight].

    Args:
        tensor: The incomplete tensor; the result itself along an axis of one rank.
        flight: The communication; None along an axis of one rank.
    """

    def __init__(self, tensor: torch.Tensor, flight: _Flight | None) -> None:
        self._tensor, self._flight = tensor, flight

    def wait(self) -> torch.Tensor:
        """Wait for the communication, once, and return its result."""
        if self._flight is None:
            return self._tensor
        flight, self._flight = self._flight, None
        self._tensor = outside_graphs(_Finished.apply)(self._tensor, flight)
        return self._tensor


def all_to_all_forward_all_to_all_backward_async(
    tensor: torch.Tensor, axis: Axis, *, split_dim: int, gather_dim: int
) -> TensorInFlight:
    """Start to change the sharded dimension; see `all_to_all_forward_all_to_all_backward`.

    Args:
        tensor: This rank's slice, of the same shape on all ranks.
        axis: The ranks.
        split_dim: Sharded dimension of the result, of a size that is a multiple of the number of ranks.
        gather_dim: Sharded dimension of `tensor`.
    """

    def forward(x: torch.Tensor) -> Pending:
        return all_to_all(x, axis, split_dim=split_dim, gather_dim=gather_dim, async_op=True)

    def backward(grad: torch.Tensor) -> Pending:
        return all_to_all(grad, axis, split_dim=gather_dim, gather_dim=split_dim, async_op=True)

    if torch.compiler.is_exporting():
        whole = all_to_all_forward_all_to_all_backward(
            tensor, axis, split_dim=split_dim, gather_dim=gather_dim
        )
        return TensorInFlight(whole, None)
    return _start(tensor, axis, forward, backward)


def gather_forward_scatter_backward_async(tensor: torch.Tensor, axis: Axis, dim: int) -> TensorInFlight:
    """Start to gather slices along `dim`; see `gather_forward_scatter_backward`."""

    def forward(x: torch.Tensor) -> Pending:
        return all_gather(x, dim, axis, async_op=True)

    def backward(grad: torch.Tensor) -> Pending:
        return reduce_scatter(grad, dim, axis, async_op=True)

    if torch.compiler.is_exporting():
        return TensorInFlight(gather_forward_scatter_backward(tensor, axis, dim), None)
    return _start(tensor, axis, forward, backward)


def _start(tensor: torch.Tensor, axis: Axis, forward: Start, backward: Start) -> TensorInFlight:
    if axis.size == 1:
        return TensorInFlight(tensor, None)
    flight = _Flight(forward, backward)
    return TensorInFlight(outside_graphs(_Started.apply)(tensor, flight), flight)
