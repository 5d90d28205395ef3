"""Flat buckets: the gradients of several parameters in one piece of memory, so that one collective takes all.

The layout only. What is done with a full bucket (an all-reduce, a reduce-scatter) is the business of others.
"""

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import nn

from colossalai.communication import empty_to_send
from colossalai.context import Axis
from colossalai.tensor import GradientSync, gradient_sync

Owner = TypeVar("Owner")
Kind = tuple[torch.dtype, torch.device, GradientSync]


@dataclass(frozen=True, eq=False)
class Bucket:
    """The gradients of some parameters, one after the other.

    Attributes:
        params: The parameters.
        flat: The memory: the gradients, then one element for each parameter.
        views: For each parameter its part of `flat`, in its shape.
        marks: The elements behind the gradients, one for each parameter.
        sync: Over which ranks they are summed, and by how much divided.
    """

    params: tuple[nn.Parameter, ...]
    flat: torch.Tensor
    views: tuple[torch.Tensor, ...]
    marks: torch.Tensor
    sync: GradientSync


def make_buckets(params: Iterable[nn.Parameter], replicas: Axis, *, cap_bytes: int) -> list[Bucket]:
    """Lay parameters out in buckets, those of one dtype, device and kind of sum together, in the order given.

    Buckets are in the order in which they become full, if gradients come in the order given.

    Args:
        params: The parameters; each once.
        replicas: The ranks that see different parts of the batch.
        cap_bytes: A bucket is closed before it grows beyond; a larger parameter has one of its own.
    """
    groups: list[list[nn.Parameter]] = []
    is_open: dict[Kind, list[nn.Parameter]] = {}
    num_bytes: dict[Kind, int] = {}
    for param in params:
        kind = _kind_of(param, replicas)
        needed = param.numel() * kind[0].itemsize
        if kind in is_open and num_bytes[kind] + needed > cap_bytes:
            groups.append(is_open.pop(kind))
        num_bytes[kind] = needed + (num_bytes[kind] if kind in is_open else 0)
        is_open.setdefault(kind, []).append(param)
    return [_make_bucket(group, replicas) for group in (*groups, *is_open.values())]


def call_on_grad(param: torch.Tensor, owner: Owner, method: Callable[[Owner, torch.Tensor], object]) -> None:
    """Let autograd call a method of `owner` with a parameter when it has added to its gradient.

    The owner is held weakly, and what is registered does nothing once it has gone. For torch keeps such
    hooks where the garbage collector does not look: an owner that holds the parameter, as reducers do, would
    stay for ever, and the model with it.
    """
    find_owner = weakref.ref(owner)

    def call(param: torch.Tensor) -> None:
        living = find_owner()
        if living is not None:
            method(living, param)

    param.register_post_accumulate_grad_hook(call)


def scale_new_grads(params: Iterable[torch.Tensor], replicas: Axis, owner: object) -> None:
    """Scale the new gradients of parameters that are cut over a part of the replicas.

    The mean over the ranks that hold the same slice is then the gradient of the mean loss over all replicas.
    A gradient is scaled before autograd accumulates it, so `param.grad` can hold earlier means: the mean over
    equal values keeps them. The hooks do nothing after `owner` is gone.

    Args:
        params: Trainable parameters; the others are left alone.
        replicas: The ranks that see different parts of the batch.
        owner: What averages the gradients; referenced weakly, see `call_on_grad`.
    """
    find_owner = weakref.ref(owner)

    def scale(factor: float, grad: torch.Tensor) -> torch.Tensor | None:
        return None if find_owner() is None else grad * factor  # autograd can still read `grad` itself

    for param in params:
        sync = gradient_sync(param, replicas)
        if param.requires_grad and sync.axis.size != sync.divisor:
            param.register_hook(partial(scale, sync.axis.size / sync.divisor))


def adopt_grad(param: nn.Parameter, view: torch.Tensor) -> None:
    """Let the gradient of a parameter be its view of a bucket; a copy where it is not yet.

    Raises:
        ValueError: The gradient is sparse.
    """
    if param.grad is view:
        return
    assert param.grad is not None
    if param.grad.layout is not torch.strided:
        raise ValueError(
            f"a parameter of shape {tuple(param.shape)} has a {param.grad.layout} gradient; buckets take "
            "dense ones: build the embedding with sparse=False"
        )
    view.copy_(param.grad)
    param.grad = view


def _make_bucket(params: list[nn.Parameter], replicas: Axis) -> Bucket:
    dtype, device, sync = _kind_of(params[0], replicas)
    sizes = [param.numel() for param in params]
    numel = sum(sizes) + len(params)
    flat = empty_to_send(numel, dtype=dtype, device=device, parallel_mode=sync.axis).zero_()
    *parts, marks = flat.split([*sizes, len(params)])
    views = tuple(part.view(param.shape) for part, param in zip(parts, params, strict=True))
    return Bucket(tuple(params), flat, views, marks, sync)


def _kind_of(param: nn.Parameter, replicas: Axis) -> Kind:
    dtype = getattr(param, "grad_dtype", None) or param.dtype
    return dtype, param.device, gradient_sync(param, replicas)
