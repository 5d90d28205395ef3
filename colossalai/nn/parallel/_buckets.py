"""Flat buckets: the gradients of several parameters in one piece of memory, so that one collective takes all.

The layout only, without the collectives on a full bucket (an all-reduce, a reduce-scatter).
"""

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge

from colossalai.communication import empty_to_send
from colossalai.context import Axis
from colossalai.tensor import GradientSync, gradient_sync

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


class GradHook(partial[None]):
    """A hook of `call_on_grad`: a function with the arguments that it has at its parameter."""


def call_on_grad(param: torch.Tensor, hook: Callable[..., None], owner: object, *args: object) -> None:
    """Let autograd call `hook(find_owner, *args, param)` when it has added to the gradient of a parameter.

    `find_owner()` returns the owner, or None once that has gone. For torch keeps such hooks where the garbage
    collector does not look: an owner that holds the parameter, as reducers do, would stay for ever, and the
    model with it. So `args` must not lead to the parameter either; numbers do.

    A parameter has one owner: a later call takes the earlier owner's hook away.
    """
    remove_owners([param])
    param.register_post_accumulate_grad_hook(GradHook(hook, weakref.ref(owner), *args))


def remove_owners(params: Iterable[torch.Tensor]) -> None:
    """Take the hooks of `call_on_grad` away from parameters.

    The owners of a model that is boosted again can be garbage on one rank and still be there on another one,
    and owners communicate.
    """
    for param in params:
        for hooks in hooks_of_grad(param):
            for number in [number for number, hook in hooks.items() if isinstance(hook, GradHook)]:
                del hooks[number]


def hooks_of_grad(param: torch.Tensor) -> list[dict[int, Callable[..., Any]]]:
    """Return torch's containers of the hooks of a parameter: those before and after its gradient is added."""
    return [hooks for hooks in (param._backward_hooks, param._post_accumulate_grad_hooks) if hooks]


def has_users_hooks(param: torch.Tensor) -> bool:
    """Return whether a hook of the gradient of a parameter is not one of `call_on_grad`."""
    return any(not isinstance(hook, GradHook) for hooks in hooks_of_grad(param) for hook in hooks.values())


def sparse_gradient(param: torch.Tensor) -> ValueError:
    """Return the error of a gradient that is not dense, as a view of a bucket has to be."""
    assert param.grad is not None
    return ValueError(
        f"a parameter of shape {tuple(param.shape)} has a {param.grad.layout} gradient; buckets take "
        "dense ones: build the embedding with sparse=False"
    )


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


@final
class EarlierMeans:
    """Keeps the means of earlier backwards where a sum over ranks is divided by more than their number.

    A parameter that is cut over a part of the replicas (an expert) is held by `axis.size` ranks, and the sum
    of its gradients is divided by `divisor`, which is larger. A mean of an earlier backward is in that sum
    `axis.size` times. So it is multiplied by `divisor / axis.size` before a backward adds to it, or before it
    is averaged once more without one.

    Args:
        params: The parameters; those that need nothing are left out.
        replicas: The ranks that see different parts of the batch.

    Attributes:
        factors: Factor for each parameter that needs one; if it is empty, `scale` and `note` have no effect.
    """

    def __init__(self, params: Iterable[nn.Parameter], replicas: Axis) -> None:
        self._replicas = replicas
        self.factors: dict[torch.Tensor, float] = {}
        self._nodes: list[Node] = []  # a parameter alone does not keep its own
        self._means: dict[torch.Tensor, weakref.ref[torch.Tensor] | None] = {}  # None: whatever is there
        self.track(params)

    def track(self, params: Iterable[nn.Parameter]) -> None:
        """Take parameters that are trainable now."""
        find = weakref.ref(self)  # as in `call_on_grad`

        def call(param: torch.Tensor, *_: object) -> None:
            if (living := find()) is not None:
                living.scale(param, param.grad)

        for param in params:
            sync = gradient_sync(param, self._replicas)
            if param.requires_grad and sync.axis.size != sync.divisor and param not in self.factors:
                self.factors[param] = sync.divisor / sync.axis.size
                node = get_gradient_edge(param).node
                # Of the node that accumulates: hooks of the parameter run in `torch.autograd.grad`, too.
                node.register_prehook(partial(call, param))
                self._nodes.append(node)

    @torch.no_grad()
    def scale(self, param: torch.Tensor, grad: torch.Tensor | None) -> None:
        """Scale a gradient that is about to be averaged again, if it is a mean.

        Args:
            param: The parameter.
            grad: Its gradient, or a copy of it.
        """
        if param not in self._means:
            return
        mean = self._means.pop(param)  # also if it was dropped: the next gradient is not a mean
        if grad is not None and param.grad is not None and (mean is None or mean() is param.grad):
            grad *= self.factors[param]

    def note(self, param: torch.Tensor) -> None:
        """Note that the gradient of a parameter is, or is about to be, a mean."""
        if param in self.factors:
            self._means[param] = None if param.grad is None else weakref.ref(param.grad)
