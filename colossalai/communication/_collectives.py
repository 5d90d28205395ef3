"""Collectives along an axis, on tensors of any layout; each is one entry of the ledger.

An axis is given as an `Axis` of a mesh, or as a parallel mode of the launched job. Along an axis of one rank
nothing happens and the tensor itself is returned.
"""

from collections.abc import Hashable

import torch
import torch.distributed as dist

from colossalai.communication._ledger import record
from colossalai.context import Axis, global_context

AxisLike = Axis | Hashable


def all_gather(tensor: torch.Tensor, dim: int, parallel_mode: AxisLike) -> torch.Tensor:
    """Return the slices of all ranks, one after the other along `dim`.

    Args:
        tensor: This rank's slice; of the same shape on all ranks.
        dim: The dimension that grows.
        parallel_mode: The axis.
    """
    axis = as_axis(parallel_mode)
    if axis.size == 1:
        return tensor
    record("all_gather", axis.name, tensor, axis.size)
    source = tensor.movedim(dim, 0).contiguous()
    result = source.new_empty((axis.size * source.shape[0], *source.shape[1:]))
    dist.all_gather_into_tensor(result, source, group=axis.group)
    return result.movedim(0, dim)


def reduce_scatter(tensor: torch.Tensor, dim: int, parallel_mode: AxisLike) -> torch.Tensor:
    """Return this rank's slice along `dim` of the sum over all ranks.

    Args:
        tensor: A term of the sum; `dim` is a multiple of the number of ranks.
        dim: The dimension that shrinks.
        parallel_mode: The axis.
    """
    axis = as_axis(parallel_mode)
    if axis.size == 1:
        return tensor
    record("reduce_scatter", axis.name, tensor, axis.size)
    source = tensor.movedim(dim, 0).contiguous()
    result = source.new_empty((source.shape[0] // axis.size, *source.shape[1:]))
    dist.reduce_scatter_tensor(result, source, group=axis.group)
    return result.movedim(0, dim)


def all_reduce(
    tensor: torch.Tensor, parallel_mode: AxisLike, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> torch.Tensor:
    """Return the sum (or what `op` says) over all ranks; `tensor` is left as it is."""
    axis = as_axis(parallel_mode)
    if axis.size == 1:
        return tensor
    record("all_reduce", axis.name, tensor, axis.size)
    result = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(result, op=op, group=axis.group)
    return result


def broadcast(tensor: torch.Tensor, src: int, parallel_mode: AxisLike) -> torch.Tensor:
    """Return the tensor of global rank `src`; on other ranks `tensor` has its shape and is overwritten."""
    axis = as_axis(parallel_mode)
    if axis.size == 1:
        return tensor
    record("broadcast", axis.name, tensor, axis.size)
    result = tensor.contiguous()
    dist.broadcast(result, src=src, group=axis.group)
    return result


def reduce(tensor: torch.Tensor, dst: int, parallel_mode: AxisLike) -> torch.Tensor:
    """Return the sum over all ranks on global rank `dst`, and something undefined on the others."""
    axis = as_axis(parallel_mode)
    if axis.size == 1:
        return tensor
    record("reduce", axis.name, tensor, axis.size)
    result = tensor.clone(memory_format=torch.contiguous_format)
    dist.reduce(result, dst=dst, group=axis.group)
    return result


def ring_forward(tensor_send_next: torch.Tensor, parallel_mode: AxisLike) -> torch.Tensor:
    """Send a tensor to the next rank of a ring and return what the previous one sent, of the same shape."""
    axis = as_axis(parallel_mode)
    if axis.size == 1:
        return tensor_send_next
    record("shift", axis.name, tensor_send_next, axis.size)
    sent = tensor_send_next.contiguous()
    received = torch.empty_like(sent)
    following, previous = axis.ranks[(axis.rank + 1) % axis.size], axis.ranks[axis.rank - 1]
    operations = [
        dist.P2POp(dist.isend, sent, following, axis.group),
        dist.P2POp(dist.irecv, received, previous, axis.group),
    ]
    for request in dist.batch_isend_irecv(operations):
        request.wait()
    return received


def as_axis(axis: AxisLike) -> Axis:
    """Return the axis that an axis, or a parallel mode of the launched job, stands for."""
    return axis if isinstance(axis, Axis) else global_context.axis(axis)
