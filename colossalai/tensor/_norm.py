"""Norms over all parameters of a model, wherever their slices are.

A parameter that is cut over some ranks adds the p-th powers of its slices over those ranks; a replicated one
is counted once. Which is which is read off the parameter itself.
"""

import sys
from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist

from colossalai.tensor._spec import spec_of

Groups = tuple[dist.ProcessGroup, ...]


def local_slice(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a tensor: the local part of a DTensor, any other tensor itself."""
    if _is_dtensor(tensor):
        return tensor.to_local()  # type: ignore[attr-defined]
    return tensor


def sharding_groups(tensor: torch.Tensor) -> Groups:
    """Return the process groups over which a tensor is cut; none for a replicated one.

    A DTensor that carries a spec is cut by both: a tensor-parallel slice that FSDP has cut further.
    """
    spec = spec_of(tensor)
    groups = () if spec is None else tuple(spec.mesh.group(axis) for axis in spec.axes)
    if not _is_dtensor(tensor):
        return groups
    mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
    shards = tuple(mesh.get_group(dim) for dim, placement in enumerate(placements) if placement.is_shard())
    return groups + shards


def local_grads(params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return this rank's slices of the gradients of `params`, those without a gradient left out."""
    return [local_slice(param.grad) for param in params if param.grad is not None]


def global_grad_norm(params: Iterable[torch.Tensor], norm_type: float = 2.0) -> torch.Tensor:
    """Return the norm of the gradients of `params` taken as one vector; the same value on every rank.

    One all-reduce of one scalar per group that a parameter is cut over; none if all are replicated. The
    parameters must be the same on all ranks; whether they have a gradient may differ.

    Args:
        params: Parameters, whole or sharded.
        norm_type: The p of the p-norm, at least 1; infinity for the largest absolute value.

    Returns:
        A scalar in float32 (float64 for float64 gradients).

    Raises:
        ValueError: `norm_type` is below 1.
    """
    if norm_type < 1:
        raise ValueError(f"norm_type is {norm_type}; it must be at least 1 (float('inf') for the maximum)")
    by_groups: dict[Groups, list[torch.Tensor]] = defaultdict(list)
    for param in params:
        by_groups[sharding_groups(param)].append(param)
    if not by_groups:
        return torch.zeros(())
    parts = [_power_sum(members, norm_type, groups) for groups, members in by_groups.items()]
    total = torch.stack(parts)
    return total.max() if norm_type == float("inf") else total.sum().pow(1.0 / norm_type)


def scale_grads(params: Iterable[torch.Tensor], factor: float | torch.Tensor) -> None:
    """Multiply the gradients of `params` by `factor`, in place."""
    grads = local_grads(params)
    if grads:
        torch._foreach_mul_(grads, factor)


def _power_sum(params: list[torch.Tensor], norm_type: float, groups: Groups) -> torch.Tensor:
    """Return the sum of the p-th powers (the maximum for p = infinity) over all slices of `params`."""
    maximum = norm_type == float("inf")
    grads = [grad for grad in local_grads(params) if grad.numel() > 0]
    dtype = torch.float64 if any(param.dtype == torch.float64 for param in params) else torch.float32
    if grads:
        norms = torch.stack([norm.to(dtype) for norm in torch._foreach_norm(grads, norm_type, dtype=dtype)])
        result = norms.max() if maximum else norms.pow(norm_type).sum()
    else:
        result = torch.zeros((), dtype=dtype, device=local_slice(params[0]).device)
    for group in groups:
        dist.all_reduce(result, op=dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM, group=group)
    return result


def _is_dtensor(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a DTensor; while nobody has imported the module (0.3 s) there is none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)
