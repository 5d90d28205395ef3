"""Norms over all parameters of a model, wherever their slices are.

A parameter that is sharded over some ranks adds the p-th powers of its slices over those ranks; a replicated
one is counted once. Which is which follows from its spec, which `norm_groups` reads once. The stages of a
pipeline hold different parameters: they add theirs.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from colossalai.tensor._spec import Groups, by_sharding_groups, local_grads, local_slice

Windows = Callable[[Any], Iterable[Sequence[Any]]]


@dataclass(frozen=True, eq=False)
class NormGroup:
    """Parameters that are sharded over the same ranks.

    Attributes:
        params: The parameters.
        process_groups: Those over which norms are reduced; none for replicated parameters.
        dtype: The dtype of norms.
    """

    params: tuple[torch.Tensor, ...]
    process_groups: Groups
    dtype: torch.dtype


def norm_groups(params: Iterable[torch.Tensor]) -> tuple[NormGroup, ...]:
    """Return parameters by the ranks over which they are sharded.

    Args:
        params: Parameters, whole or sharded; the same on all ranks of a pipeline stage.
    """
    wide = (torch.float64, torch.complex128)
    return tuple(
        NormGroup(
            tuple(members),
            process_groups,
            torch.float64 if any(param.dtype in wide for param in members) else torch.float32,
        )
        for process_groups, members in by_sharding_groups(params).items()
    )


def global_grad_norm(
    params: Iterable[torch.Tensor],
    norm_type: float = 2.0,
    *,
    stages: dist.ProcessGroup | None = None,
    counts: Callable[[torch.Tensor], bool] | None = None,
) -> torch.Tensor:
    """Return the norm of the gradients of `params` taken as one vector; the same value on every rank.

    Args:
        params: Parameters, whole or sharded; the same on all ranks of a pipeline stage.
        norm_type: As in `grad_norm`, as the result and the communication.
        stages: As in `grad_norm`.
        counts: False for a parameter that another stage holds, too, and counts. Default: all count.

    Raises:
        ValueError: `norm_type` is below 1.
    """
    counted = params if counts is None else filter(counts, params)
    return grad_norm(norm_groups(counted), norm_type, stages=stages)


def grad_norm(
    groups: Sequence[NormGroup],
    norm_type: float = 2.0,
    *,
    stages: dist.ProcessGroup | None = None,
    windows: Windows | None = None,
) -> torch.Tensor:
    """Return the norm of the gradients of all groups taken as one vector; the same value on every rank.

    One all-reduce of one scalar per process group of each norm group, and one more over `stages`. Whether a
    parameter has a gradient may differ between ranks.

    Args:
        groups: The parameters, as `norm_groups` returns them.
        norm_type: The p of the p-norm, at least 1; infinity for the largest absolute value.
        stages: The ranks of a pipeline, each of which holds other parameters.
        windows: Yields runs of parameters whose gradients can be in memory together. Default: all at once.

    Returns:
        A scalar in float32 (float64 for float64 and complex128 gradients).

    Raises:
        ValueError: `norm_type` is below 1.
    """
    if norm_type < 1:
        raise ValueError(f"norm_type is {norm_type}; it must be at least 1 (float('inf') for the maximum)")
    maximum = norm_type == float("inf")
    op = dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM
    parts = [_power_sum(group, norm_type, windows) for group in groups]
    total = _over_all_slices(parts, groups, op, stages)
    return total if maximum else total.pow(1.0 / norm_type)


def count_zero_grads(
    params: Iterable[torch.Tensor],
    *,
    stages: dist.ProcessGroup | None = None,
    counts: Callable[[torch.Tensor], bool] | None = None,
) -> int:
    """Return how many elements of the gradients are 0; arguments and communication as `global_grad_norm`."""
    counted = params if counts is None else filter(counts, params)
    return num_zero_grads(norm_groups(counted), stages=stages)


def num_zero_grads(
    groups: Sequence[NormGroup],
    *,
    stages: dist.ProcessGroup | None = None,
    windows: Windows | None = None,
) -> int:
    """Return how many elements of the gradients are 0; arguments and communication as `grad_norm`."""
    parts = []
    for group in groups:
        runs = (group.params,) if windows is None else windows(group.params)
        parts.append(torch.stack([_num_zeros(run) for run in runs]).sum())
    return int(_over_all_slices(parts, groups, dist.ReduceOp.SUM, stages))


def scale_grads(params: Iterable[torch.Tensor], factor: float | torch.Tensor) -> None:
    """Multiply the gradients of `params` by `factor`, in place."""
    grads = local_grads(params)
    if grads:
        if isinstance(factor, torch.Tensor):
            factor = factor.to(grads[0].device)  # offloaded gradients are on the host
        if dense := [grad for grad in grads if not grad.is_sparse]:
            torch._foreach_mul_(dense, factor)
        for grad in grads:
            if grad.is_sparse:
                grad.mul_(factor)


def _over_all_slices(
    parts: Sequence[torch.Tensor],
    groups: Sequence[NormGroup],
    op: dist.ReduceOp.RedOpType,
    stages: dist.ProcessGroup | None,
) -> torch.Tensor:
    """Return the sum (or the maximum, by `op`) of one scalar of each group over all slices and stages."""
    for part, group in zip(parts, groups, strict=True):
        for process_group in group.process_groups:
            # Of one scalar. The ranks of a stage have the same groups in the same order.
            dist.all_reduce(part, op=op, group=process_group)
    if parts:
        stacked = torch.stack(list(parts))
        total = stacked.max() if op == dist.ReduceOp.MAX else stacked.sum()
    else:
        total = torch.zeros((), device=_device_of_nothing() if stages is not None else None)
    if stages is None:
        return total
    # In one dtype on all stages, though one may hold float64 parameters and another one none at all.
    wide = total.to(_widest(total.device))
    dist.all_reduce(wide, op=op, group=stages)
    return wide.to(total.dtype)


def _power_sum(group: NormGroup, norm_type: float, windows: Windows | None) -> torch.Tensor:
    """Return the sum of the p-th powers (the maximum for p = infinity) over this rank's slices.

    They are added in the order of the parameters, for any windows: the sum is the same bits.
    """
    norm_of: dict[int, torch.Tensor] = {}  # by the id of the parameter
    for window in (group.params,) if windows is None else windows(group.params):
        held = [param for param in window if param.grad is not None]
        grads = local_grads(held)
        if any(grad.is_sparse or grad.is_complex() for grad in grads):
            grads = [_magnitudes(_entries(grad), norm_type) for grad in grads]
        filled = [number for number, grad in enumerate(grads) if grad.numel() > 0]
        if filled:
            norms = torch._foreach_norm([grads[number] for number in filled], norm_type, dtype=group.dtype)
            norm_of.update(zip((id(held[number]) for number in filled), norms, strict=True))
    if not norm_of:
        return torch.zeros((), dtype=group.dtype, device=local_slice(group.params[0]).device)
    in_order = (norm_of[id(param)] for param in group.params if id(param) in norm_of)
    stacked = torch.stack([norm.to(group.dtype) for norm in in_order])
    return stacked.max() if norm_type == float("inf") else stacked.pow(norm_type).sum()


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
