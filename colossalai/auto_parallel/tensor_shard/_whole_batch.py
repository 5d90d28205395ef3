"""Forwards on the whole batch by ranks that each compute a part of it: slices in, whole outputs out.

[Note: gradients of a whole batch]
Every rank computes the same loss of the whole outputs. Of the gradient of an output a rank keeps that of its
own samples, so that the gradients of parameters are to be *added up* over the n replicas, and the data method
takes their mean: what goes back into a rank's outputs is therefore multiplied by n. A loss that the model
itself returns is a mean over samples: of n equal parts the mean of their losses, whose gradient with respect
to each is 1/n; times n it is 1, as in data parallelism.
"""

import inspect
from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_map_only

from colossalai.communication import (
    all_reduce,
    gather_forward_split_backward,
    reduce_forward_copy_backward,
    slice_of,
)
from colossalai.context import Axis

_IGNORED = -100  # what losses of torch leave out of their mean


class WholeBatch:
    """Hooks of a module that takes the whole batch, of which it computes this rank's part.

    Args:
        model: The model, whose forward names the arguments.
        replicas: The ranks that share the batch.
        names: The arguments that have the batch in dimension 0.
    """

    def __init__(self, model: nn.Module, replicas: Axis, names: Collection[str]) -> None:
        self._signature = inspect.signature(model.forward)
        self._replicas, self._names = replicas, frozenset(names)
        self._extent = 0  # of this rank's part, in the forward under way
        self._uneven = ""  # why the mean of the parts would not be that of the whole

    def attach(self, module: nn.Module) -> None:
        """Let a module do it."""
        module.register_forward_pre_hook(self._take_part, with_kwargs=True)
        module.register_forward_hook(self._make_whole)

    def _take_part(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with this rank's part of the batch.

        Raises:
            ValueError: `args` or `kwargs` have tensors that were not planned for, of several batches, or of
                one that the ranks do not divide.
        """
        bound = self._signature.bind(*args, **kwargs)
        batches: dict[str, int] = {}
        for name, value in bound.arguments.items():
            if isinstance(value, Tensor) and value.dim() > 0:
                if name not in self._names:
                    raise ValueError(
                        f"{name} was not in meta_args, so that it is not known whether its dimension 0 "
                        f"counts samples: make the plan with it (it knows {', '.join(sorted(self._names))})"
                    )
                batches[name] = value.shape[0]
        if len(set(batches.values())) != 1:
            raise ValueError(f"dimension 0 of the arguments is the batch, and it is {batches or 'missing'}")
        batch, num_parts = next(iter(batches.values())), self._replicas.size
        if batch % num_parts:
            raise ValueError(
                f"a batch of {batch} cannot be shared by {num_parts} data-parallel ranks: give a multiple of "
                f"{num_parts}, or drop the last batch of the data"
            )
        self._extent = batch // num_parts
        self._uneven = _uneven_labels({name: bound.arguments[name] for name in batches}, num_parts)
        for name in batches:
            bound.arguments[name] = slice_of(bound.arguments[name], self._replicas, 0)
        return bound.args, bound.kwargs

    def _make_whole(self, _: nn.Module, __: tuple[Any, ...], output: Any) -> Any:
        return tree_map_only(Tensor, self._whole, output)

    def _whole(self, part: Tensor) -> Tensor:
        """Return the tensor of the whole batch that a rank has a part of.

        Raises:
            ValueError: `part` does not have samples in dimension 0, or is a mean over other numbers of terms
                than that of another rank.
        """
        # See [Note: gradients of a whole batch].
        num_parts = self._replicas.size
        given = _Multiplied.apply(part, num_parts) if part.requires_grad else part
        if part.dim() == 0:
            if self._uneven:
                raise ValueError(
                    f"{self._uneven}: the mean of the parts is not that of the whole. Let the model return "
                    "its logits and compute the loss from them, or take dataloader_option='distributed'"
                )
            if not part.is_floating_point():
                raise ValueError(
                    f"the model returns a number of type {part.dtype}, of which it is not known how those of "
                    "the ranks belong together: take dataloader_option='distributed'"
                )
            return reduce_forward_copy_backward(given, self._replicas) / num_parts
        if part.shape[0] % self._extent:
            raise ValueError(
                f"an output of shape {tuple(part.shape)} has no samples in dimension 0, of which this rank "
                f"has {self._extent}: take dataloader_option='distributed', by which outputs stay as they are"
            )
        return gather_forward_split_backward(given, self._replicas, 0)


def _uneven_labels(given: Mapping[str, Tensor], num_parts: int) -> str:
    """Return why a mean over labels is no mean of the means of parts; empty where it is one."""
    for name, tensor in given.items():
        if tensor.is_floating_point() or tensor.dtype == torch.bool or not bool((tensor == _IGNORED).any()):
            continue
        counted = (tensor != _IGNORED).flatten(1) if tensor.dim() > 1 else (tensor != _IGNORED)[:, None]
        # Causal models leave out the first label of each sample.
        for each in (counted, counted[:, 1:]):
            if len({int(part.sum()) for part in each.chunk(num_parts)}) > 1:
                return f"{name} has labels of {_IGNORED}, in other numbers on each of {num_parts} ranks"
    return ""


class _Multiplied(torch.autograd.Function):
    """The tensor itself, whose gradient is multiplied."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, factor: int) -> Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


class CutGradient(Tensor):
    """A gradient of a slice of a parameter, whose norm is that of the whole parameter's gradient.

    So `torch.nn.utils.clip_grad_norm_` is right, which knows nothing of ranks. All ranks that share the
    parameter ask for it in the same order. Everything else is that of this rank's slice.
    """

    axis: Axis

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **(kwargs or {}))
        if func in _NORMS:
            bound = _norm_arguments(args, kwargs or {})
            assert isinstance(args[0], CutGradient), "it has called this"
            return _norm_of_all(found, bound, args[0].axis)
        if func is torch._foreach_norm:
            order = args[1] if len(args) > 1 else (kwargs or {}).get("ord", 2)
            return tuple(
                _norm_of_all(norm, order, each.axis) if isinstance(each, CutGradient) else norm
                for each, norm in zip(args[0], found, strict=True)
            )
        return found


_NORMS = (torch.linalg.vector_norm, torch.norm, Tensor.norm)


def _norm_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> float:
    """Return the order of the norm of all elements.

    Raises:
        ValueError: `args` or `kwargs` ask for norms along dimensions: of slices, they would be others.
    """
    if len(args) > 2 or kwargs.get("dim") is not None:
        raise ValueError(
            "a norm along dimensions of the gradient of a slice of a parameter is not that of the whole "
            "gradient: take the norm of all of it, or gradient.as_subclass(torch.Tensor) for the slice alone"
        )
    order = args[1] if len(args) > 1 else kwargs.get("ord", kwargs.get("p", 2))
    return 2.0 if order is None or order == "fro" else float(order)


def _norm_of_all(norm: Tensor, order: float, axis: Axis) -> Tensor:
    norm = norm.as_subclass(Tensor)
    if order == float("inf"):
        return all_reduce(norm, axis, dist.ReduceOp.MAX)
    return all_reduce(norm**order, axis) ** (1 / order)


def follow_cuts(model: nn.Module, axis: Axis, names: Collection[str]) -> None:
    """Let the gradients of some parameters, of which each rank of an axis has a slice, know it.

    Args:
        model: The model.
        axis: The ranks.
        names: Full names of the parameters.
    """

    def mark(param: Tensor) -> None:
        if param.grad is not None and not isinstance(param.grad, CutGradient):
            gradient = param.grad.as_subclass(CutGradient)
            gradient.axis = axis
            param.grad = gradient

    for name, param in model.named_parameters():
        if name in names and param.requires_grad:
            param.register_post_accumulate_grad_hook(mark)
