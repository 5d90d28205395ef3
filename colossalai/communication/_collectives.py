"""Collectives along an axis, on tensors of any layout; each is one entry of the ledger.

An axis is given as an `Axis` of a mesh, or as a parallel mode of the launched job. Along an axis of one rank
the tensor itself is returned.

With `async_op=True` a collective returns `(tensor, work)` at once. The tensor has its values after
`work.wait()`. Under a timed ledger the collective is complete on return, so that the ledger times it alone.
"""

from collections.abc import Callable, Hashable
from typing import Any, Literal, Protocol, overload

import torch
import torch.distributed as dist

from colossalai.communication._ledger import is_timed, open_ledgers, record
from colossalai.communication.shared_memory import empty_in_arena, is_within_machine, stamp_next
from colossalai.context import Axis, global_context

AxisLike = Axis | Hashable
Op = dist.ReduceOp.RedOpType
_SUM = dist.ReduceOp.SUM


class Work(Protocol):
    """A collective in flight."""

    def wait(self) -> Any:
        """Wait until the collective is complete."""

    def is_completed(self) -> bool:
        """Whether the collective is complete."""


class _CompleteWork:
    """The work of a complete collective."""

    def wait(self) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


_COMPLETE = _CompleteWork()
Pending = tuple[torch.Tensor, Work]

# torch has renamed both, and warns about the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@overload
def all_gather(
    tensor: torch.Tensor, dim: int, parallel_mode: AxisLike, async_op: Literal[False] = False
) -> torch.Tensor: ...
@overload
def all_gather(
    tensor: torch.Tensor, dim: int, parallel_mode: AxisLike, async_op: Literal[True]
) -> Pending: ...
def all_gather(
    tensor: torch.Tensor, dim: int, parallel_mode: AxisLike, async_op: bool = False
) -> torch.Tensor | Pending:
    """Return the slices of all ranks, concatenated along `dim`.

    Args:
        tensor: This rank's slice, of the same shape on all ranks.
        dim: Dimension of the concatenation.
        parallel_mode: The axis.
        async_op: Whether to return a pair of the tensor and its work at once.
    """
    axis = as_axis(parallel_mode)
    if axis.size == 1:
        return (tensor, _COMPLETE) if async_op else tensor
    source = tensor.movedim(dim, 0).contiguous()
    result = source.new_empty((axis.size * source.shape[0], *source.shape[1:]))
    # Joined by all ranks of the axis, which send their slices; `result` is complete after the wait.
    work = _issue("all_gather", axis, tensor, _all_gather, result, source, async_op=async_op)
    gathered = result.movedim(0, dim)
    return (gathered, work) if async_op else gathered


@overload
def reduce_scatter(
    tensor: torch.Tensor, dim: int, parallel_mode: AxisLike, op: Op = _SUM, async_op: Literal[False] = False
) -> torch.Tensor: ...
@overload
def reduce_scatter(
    tensor: torch.Tensor, dim: int, parallel_mode: AxisLike, op: Op = _SUM, *, async_op: Literal[True]
) -> Pending: ...
def reduce_scatter(
    tensor: torch.Tensor, dim: int, parallel_mode: AxisLike, op: Op = _SUM, async_op: bool = False
) -> torch.Tensor | Pending:
    """Return this rank's slice along `dim` of the sum over all ranks.

    Args:
        tensor: Term of the sum; `tensor.shape[dim]` is a multiple of the number of ranks.
        dim: Dimension to scatter.
        parallel_mode: The axis.
        op: Reduction. Default: sum.
        async_op: Whether to return a pair of the tensor and its work at once.
    """
    axis = as_axis(parallel_mode)
    if axis.size == 1:
        return (tensor, _COMPLETE) if async_op else tensor
    source = tensor.movedim(dim, 0).contiguous()
    result = source.new_empty((source.shape[0] // axis.size, *source.shape[1:]))
    # Joined by all ranks of the axis; rank i receives the sum of the i-th sections.
    work = _issue("reduce_scatter", axis, tensor, _reduce_scatter, result, source, op=op, async_op=async_op)
    scattered = result.movedim(0, dim)
    return (scattered, work) if async_op else scattered


class _CopyingWork:
    """An exchange in flight, whose parts are copied into the result at the end."""

    def __init__(self, work: Work, parts: torch.Tensor, result: torch.Tensor) -> None:
        self._work, self._parts, self._result = work, parts, result

    def wait(self) -> bool:
        self._work.wait()
        self._result.copy_(self._parts)
        return True

    def is_completed(self) -> bool:
        return self._work.is_completed()


@overload
def all_to_all(
    tensor: torch.Tensor,
    parallel_mode: AxisLike,
    *,
    split_dim: int,
    gather_dim: int,
    async_op: Literal[False] = False,
) -> torch.Tensor: ...
@overload
def all_to_all(
    tensor: torch.Tensor, parallel_mode: AxisLike, *, split_dim: int, gather_dim: int, async_op: Literal[True]
) -> Pending: ...
def all_to_all(
    tensor: torch.Tensor, parallel_mode: AxisLike, *, split_dim: int, gather_dim: int, async_op: bool = False
) -> torch.Tensor | Pending:
    """Change the sharded dimension of a tensor from `gather_dim` to `split_dim`.

    Each rank receives a part along `split_dim` from every rank and concatenates them along `gather_dim`.

    Args:
        tensor: This rank's slice, of the same shape on all ranks.
        parallel_mode: The axis.
        split_dim: Dimension to split, of a size that is a multiple of the number of ranks.
        gather_dim: Dimension to gather, different from `split_dim`.
        async_op: Whether to return a pair of the tensor and its work at once.
    """
    axis = as_axis(parallel_mode)
    if axis.size == 1:
        return (tensor, _COMPLETE) if async_op else tensor
    parts = tensor.unflatten(split_dim, (axis.size, -1))  # a new dimension before `split_dim`
    source = parts.movedim(split_dim % tensor.dim(), 0).contiguous()
    received = torch.empty_like(source)  # (source rank, ...)
    # Joined by all ranks of the axis: part i is sent to rank i.
    work = _issue("all_to_all", axis, tensor, dist.all_to_all_single, received, source, async_op=async_op)
    grown = gather_dim % tensor.dim()
    ordered = received.movedim(0, grown)
    if not async_op:
        return ordered.flatten(grown, grown + 1)
    shape = list(tensor.shape)
    shape[split_dim] //= axis.size
    shape[gather_dim] *= axis.size
    result = tensor.new_empty(shape)
    return result, _CopyingWork(work, ordered, result.unflatten(grown, (axis.size, -1)))


@overload
def all_reduce(
    tensor: torch.Tensor, parallel_mode: AxisLike, op: Op = _SUM, async_op: Literal[False] = False
) -> torch.Tensor: ...
@overload
def all_reduce(
    tensor: torch.Tensor, parallel_mode: AxisLike, op: Op = _SUM, *, async_op: Literal[True]
) -> Pending: ...
def all_reduce(
    tensor: torch.Tensor, parallel_mode: AxisLike, op: Op = _SUM, async_op: bool = False
) -> torch.Tensor | Pending:
    """Return the reduction over all ranks; `tensor` is not modified.

    Args:
        tensor: Term of the sum.
        parallel_mode: The axis.
        op: Reduction. Default: sum.
        async_op: Whether to return a pair of the tensor and its work at once.
    """
    axis = as_axis(parallel_mode)
    if axis.size == 1:
        return (tensor, _COMPLETE) if async_op else tensor
    result = tensor.clone(memory_format=torch.contiguous_format)
    # Joined by all ranks of the axis, in the memory of the copy: the caller keeps `tensor`.
    work = _issue("all_reduce", axis, tensor, dist.all_reduce, result, op=op, async_op=async_op)
    return (result, work) if async_op else result


def all_reduce_in_place(
    tensor: torch.Tensor, parallel_mode: AxisLike, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> torch.Tensor:
    """Replace a contiguous tensor by the reduction over all ranks, and return it."""
    axis = as_axis(parallel_mode)
    if axis.size > 1:
        # Joined by all ranks of the axis, in the memory of the caller's tensor. Blocking.
        _issue("all_reduce", axis, tensor, dist.all_reduce, tensor, op=op)
    return tensor


def start_all_reduce(tensor: torch.Tensor, parallel_mode: AxisLike) -> Callable[[], object]:
    """Start to replace a contiguous tensor by the sum over all ranks; return the function that waits.

    Under a timed ledger the collective is complete on return.
    """
    axis = as_axis(parallel_mode)
    if axis.size == 1:
        return _no_wait
    # Joined by all ranks of the axis. The tensor is in use until the wait.
    work = _issue("all_reduce", axis, tensor, dist.all_reduce, tensor, async_op=True)
    return work.wait


def start_sum_of_sections(flat: torch.Tensor, parallel_mode: AxisLike) -> Callable[[], object]:
    """Start to replace this rank's section of a flat tensor by its sum over all ranks.

    Returns the function that waits.

    Args:
        flat: One section per rank, of equal sizes. It must not be used before the end of the wait; afterwards
            the sections of the other ranks are undefined.
        parallel_mode: The axis.
    """
    axis = as_axis(parallel_mode)
    own = flat.view(axis.size, -1)[axis.rank]
    # Joined by all ranks of the axis. `own` is a view of `flat`: the sum overwrites this rank's term.
    work = _issue("reduce_scatter", axis, flat, _reduce_scatter, own, flat, async_op=True)
    return work.wait


def start_gather_of_sections(
    flat: torch.Tensor, parallel_mode: AxisLike, *, stamp: int = 0
) -> Callable[[], object]:
    """Start an in-place all-gather of a flat tensor, of which each rank has its own section.

    Args:
        flat: One section per rank, of equal sizes.
        parallel_mode: The axis.
        stamp: Number that ranks with shared memory compare. 0: none.

    Returns:
        The function that waits.
    """
    axis = as_axis(parallel_mode)
    own = flat.view(axis.size, -1)[axis.rank]
    if stamp:
        # For the next collective of this thread on this group, the one issued below.
        stamp_next(axis.group, stamp)
    # Joined by all ranks of the axis. This rank's section is read in place, the others are written.
    work = _issue("all_gather", axis, own, _all_gather, flat, own, async_op=True)
    return work.wait


def empty_to_send(
    numel: int, *, dtype: torch.dtype, device: torch.device, parallel_mode: AxisLike
) -> torch.Tensor:
    """Return an uninitialized flat tensor for data that is sent repeatedly.

    If the ranks of the axis share a machine, and as long as there is room, it is allocated in memory that the
    other ranks can read, so that its collectives copy less. Not for parameters: a forked child would not keep
    their values.

    Args:
        numel: Number of elements.
        dtype: Dtype of the elements.
        device: Device of the tensor.
        parallel_mode: The axis along which it is sent.
    """
    axis = as_axis(parallel_mode)
    if device.type == "cpu" and axis.size > 1 and dist.is_initialized():  # otherwise nothing is sent
        tensor = empty_in_arena(axis.group, numel, dtype)
        if tensor is not None:
            return tensor
    return torch.empty(numel, dtype=dtype, device=device)


def shares_memory(parallel_mode: AxisLike) -> bool:
    """Return whether the ranks of an axis communicate through the memory of one machine."""
    return as_axis(parallel_mode).size > 1 and is_within_machine(as_axis(parallel_mode).group)


@overload
def broadcast(
    tensor: torch.Tensor, src: int, parallel_mode: AxisLike, async_op: Literal[False] = False
) -> torch.Tensor: ...
@overload
def broadcast(
    tensor: torch.Tensor, src: int, parallel_mode: AxisLike, async_op: Literal[True]
) -> Pending: ...
def broadcast(
    tensor: torch.Tensor, src: int, parallel_mode: AxisLike, async_op: bool = False
) -> torch.Tensor | Pending:
    """Return the tensor of global rank `src`; on other ranks `tensor` has its shape and is overwritten.

    Args:
        tensor: Tensor to send on `src`, buffer on the other ranks.
        src: Global rank of the source.
        parallel_mode: The axis.
        async_op: Whether to return a pair of the tensor and its work at once.
    """
    axis = as_axis(parallel_mode)
    if axis.size == 1:
        return (tensor, _COMPLETE) if async_op else tensor
    result = tensor.contiguous()
    # Joined by all ranks of the axis; rank `src` alone sends.
    work = _issue("broadcast", axis, tensor, dist.broadcast, result, src=src, async_op=async_op)
    return (result, work) if async_op else result


@overload
def reduce(
    tensor: torch.Tensor, dst: int, parallel_mode: AxisLike, op: Op = _SUM, async_op: Literal[False] = False
) -> torch.Tensor: ...
@overload
def reduce(
    tensor: torch.Tensor, dst: int, parallel_mode: AxisLike, op: Op = _SUM, *, async_op: Literal[True]
) -> Pending: ...
def reduce(
    tensor: torch.Tensor, dst: int, parallel_mode: AxisLike, op: Op = _SUM, async_op: bool = False
) -> torch.Tensor | Pending:
    """Return the reduction over all ranks on global rank `dst`; the result is undefined on the others.

    Args:
        tensor: Term of the sum; it is not modified.
        dst: Global rank of the result.
        parallel_mode: The axis.
        op: Reduction. Default: sum.
        async_op: Whether to return a pair of the tensor and its work at once.
    """
    axis = as_axis(parallel_mode)
    if axis.size == 1:
        return (tensor, _COMPLETE) if async_op else tensor
    result = tensor.clone(memory_format=torch.contiguous_format)
    # Joined by all ranks of the axis; the copy receives partial sums on ranks other than `dst`.
    work = _issue("reduce", axis, tensor, dist.reduce, result, dst=dst, op=op, async_op=async_op)
    return (result, work) if async_op else result


def reduce_in_place(tensor: torch.Tensor, dst: int, parallel_mode: AxisLike) -> torch.Tensor:
    """Like `reduce`, in the memory of a contiguous tensor, which is undefined afterwards on other ranks."""
    axis = as_axis(parallel_mode)
    if axis.size > 1:
        # Joined by all ranks of the axis. Blocking.
        _issue("reduce", axis, tensor, dist.reduce, tensor, dst=dst)
    return tensor


def ring_forward(tensor_send_next: torch.Tensor, parallel_mode: AxisLike) -> torch.Tensor:
    """Send a tensor to the next rank of a ring, and return the tensor of the previous one."""
    axis = as_axis(parallel_mode)
    if axis.size == 1:
        return tensor_send_next
    sent = tensor_send_next.contiguous()
    received = torch.empty_like(sent)
    following, previous = axis.ranks[(axis.rank + 1) % axis.size], axis.ranks[axis.rank - 1]
    operations = [
        dist.P2POp(dist.isend, sent, following, axis.group),
        dist.P2POp(dist.irecv, received, previous, axis.group),
    ]
    with record("shift", axis.name, tensor_send_next, axis.size):
        # Joined by all ranks of the ring. Both are posted before the wait, so no rank waits for a later send.
        for request in dist.batch_isend_irecv(operations):
            request.wait()
    return received


def as_axis(axis: AxisLike) -> Axis:
    """Return the axis of a parallel mode of the launched job; an axis is returned as it is."""
    return axis if isinstance(axis, Axis) else global_context.axis(axis)


def _issue(
    name: str, axis: Axis, tensor: torch.Tensor, collective: Callable[..., Any], /, *args: Any, **options: Any
) -> Work:
    """Issue one collective along an axis; return its work, which is complete if the call has waited.

    Args:
        name: Name of the operation in the ledger.
        axis: The ranks, all of which call this in the same order.
        tensor: Tensor whose bytes the ledger counts.
        collective: The function of `torch.distributed`.
        args: Its tensors.
        options: Its other arguments except the group.
    """
    if not open_ledgers:
        return collective(*args, group=axis.group, **options) or _COMPLETE
    with record(name, axis.name, tensor, axis.size):
        work = collective(*args, group=axis.group, **options)
        if work is not None and is_timed():
            work.wait()  # within the entry, which so times this collective alone
            return _COMPLETE
    return work or _COMPLETE


def _no_wait() -> None:
    """Wait function of an axis of one rank."""
