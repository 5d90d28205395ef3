"""Norms over all parameters of a model, wherever their slices are.

A parameter that is cut over some ranks adds the p-th powers of its slices over those ranks; a replicated one
is counted once. Which is which is read off the parameter itself. The stages of a pipeline hold different
parameters: they add theirs.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from colossalai.tensor._spec import by_sharding_groups, local_grads, local_slice

Windows = Callable[[list[Any]], Iterable[Sequence[Any]]]


def _all_at_once(params: list[torch.Tensor]) -> Iterable[Sequence[torch.Tensor]]:
    return [params]


def global_grad_norm(
    params: Iterable[torch.Tensor],
    norm_type: float = 2.0,
    *,
    stages: dist.ProcessGroup | None = None,
    counts: Callable[[torch.Tensor], bool] | None = None,
    windows: Windows = _all_at_once,
) -> torch.Tensor:
    """Return the norm of the gradients of `params` taken as one vector; the same value on every rank.

    One all-reduce of one scalar per group that a parameter is cut over; none if all are replicated; one more
    over `stages`. The parameters must be the same on all ranks of a stage; whether they have a gradient may
    differ.

    Args:
        params: Parameters, whole or sharded.
        norm_type: The p of the p-norm, at least 1; infinity for the largest absolute value.
        stages: The ranks of a pipeline, each of which holds other parameters.
        counts: False for a parameter that another stage holds, too, and counts; default: all count.
        windows: Yields runs of some parameters, whose gradients may be in memory together.

    Returns:
        A scalar in float32 (float64 for float64 and complex128 gradients).

    Raises:
        ValueError: `norm_type` is below 1.
    """
    if norm_type < 1:
        raise ValueError(f"norm_type is {norm_type}; it must be at least 1 (float('inf') for the maximum)")
    maximum = norm_type == float("inf")
    op = dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM

    def measure(members: list[torch.Tensor]) -> torch.Tensor:
        return _power_sum(members, norm_type, windows)

    total = _over_all_slices(params, measure, op=op, stages=stages, counts=counts)
    return total if maximum else total.pow(1.0 / norm_type)


def count_zero_grads(
    params: Iterable[torch.Tensor],
    *,
    stages: dist.ProcessGroup | None = None,
    counts: Callable[[torch.Tensor], bool] | None = None,
    windows: Windows = _all_at_once,
) -> int:
    """Return how many elements of the gradients are 0; arguments and communication as `global_grad_norm`."""

    def measure(members: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([_num_zeros(window) for window in windows(members)]).sum()

    return int(_over_all_slices(params, measure, op=dist.ReduceOp.SUM, stages=stages, counts=counts))


def scale_grads(params: Iterable[torch.Tensor], factor: float | torch.Tensor) -> None:
    """Multiply the gradients of `params` by `factor`, in place."""
    grads = local_grads(params)
    if grads:
        if isinstance(factor, torch.Tensor):
            factor = factor.to(grads[0].device)  # offloaded gradients are on the host
        torch._foreach_mul_([grad for grad in grads if not grad.is_sparse], factor)
        for grad in grads:
            if grad.is_sparse:
                grad.mul_(factor)


def _over_all_slices(
    params: Iterable[torch.Tensor],
    measure: Callable[[list[torch.Tensor]], torch.Tensor],
    *,
    op: dist.ReduceOp.RedOpType,
    stages: dist.ProcessGroup | None,
    counts: Callable[[torch.Tensor], bool] | None,
) -> torch.Tensor:
    """Return the sum (or the maximum, as `op` says) of a measure of the parameters over all their slices."""
    counted = params if counts is None else filter(counts, params)
    parts = []
    for groups, members in by_sharding_groups(counted).items():
        part = measure(members)
        for group in groups:
            dist.all_reduce(part, op=op, group=group)
        parts.append(part)
    if parts:
        stacked = torch.stack(parts)
        total = stacked.max() if op == dist.ReduceOp.MAX else stacked.sum()
    else:
        total = torch.zeros((), device=_device_of_nothing() if stages is not None else None)
    return total if stages is None else _over_stages(total, op, stages)


def _over_stages(total: torch.Tensor, op: dist.ReduceOp.RedOpType, stages: dist.ProcessGroup) -> torch.Tensor:
    # In one dtype on all of them, though one may hold float64 parameters and another none at all.
    wide = total.to(_widest(total.device))
    dist.all_reduce(wide, op=op, group=stages)
    return wide.to(total.dtype)


def _power_sum(params: list[torch.Tensor], norm_type: float, windows: Windows) -> torch.Tensor:
    """Return the sum of the p-th powers (the maximum for p = infinity) over this rank's slices.

    They are added in the order of `params`, whatever the windows: the sum is the same bits.
    """
    wide = (torch.float64, torch.complex128)
    dtype = torch.float64 if any(param.dtype in wide for param in params) else torch.float32
    norm_of: dict[torch.Tensor, torch.Tensor] = {}
    for window in windows(params):
        placed = [
            (param, _magnitudes(_entries(local_slice(param.grad)), norm_type))
            for param in window
            if param.grad is not None
        ]
        placed = [(param, grad) for param, grad in placed if grad.numel() > 0]
        if placed:
            norms_here = torch._foreach_norm([grad for _, grad in placed], norm_type, dtype=dtype)
            norm_of.update(zip((param for param, _ in placed), norms_here, strict=True))
    if not norm_of:
        return torch.zeros((), dtype=dtype, device=local_slice(params[0]).device)
    norms = torch.stack([norm_of[param].to(dtype) for param in params if param in norm_of])
    return norms.max() if norm_type == float("inf") else norms.pow(norm_type).sum()


def _num_zeros(params: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return how many elements of this rank's slices of the gradients are 0."""
    device = local_slice(params[0]).device
    result = torch.zeros((), dtype=_widest(device), device=device)
    for grad in local_grads(params):
        result += grad.numel() - _entries(grad).count_nonzero()
    return result


def _entries(grad: torch.Tensor) -> torch.Tensor:
    """Return the elements of a gradient, of a sparse one those that it has, each once."""
    return grad.coalesce().values() if grad.is_sparse else grad


def _magnitudes(grad: torch.Tensor, norm_type: float) -> torch.Tensor:
    """Return real numbers with the p-norm of a gradient, whose elements can be complex."""
    if not grad.is_complex():
        return grad
    return torch.view_as_real(grad) if norm_type == 2.0 else grad.abs()  # (..., 2) or (...)


def _widest(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64


def _device_of_nothing() -> torch.device | None:
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
