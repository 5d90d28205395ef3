"""Forwards on the whole batch by ranks that each compute a part of it: slices in, whole outputs out.

[Note: gradients of a whole batch]
Every rank computes the same loss of the whole outputs. Of the gradient of an output a rank keeps the part of
its own samples, so the gradients of parameters have to be *summed* over the n replicas, but the data method
averages them: therefore the gradient of a rank's outputs is multiplied by n. A loss returned by the model
itself is a mean or a sum over samples, see [Note: outputs of parts]. For a mean, the gradient with respect to
the mean of each of n equal parts is 1/n; times n it is 1, as in data parallelism. A value that is the same on
all ranks has the same gradient on all of them, which is also their mean.
"""

import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_leaves, tree_map_only

from colossalai.auto_parallel.tensor_shard._outputs import WholeOutputs
from colossalai.communication import (
    all_reduce,
    gather_forward_split_backward,
    reduce_forward_copy_backward,
    slice_of,
)
from colossalai.context import Axis


class WholeBatch:
    """Hooks of a module that takes the whole batch and computes this rank's part of it.

    Args:
        model: The model, whose forward defines the names of arguments.
        replicas: The ranks that share the batch.
        names: The arguments with the batch in dimension 0.
        outputs: Kinds of the outputs, from which the whole ones follow.
    """

    def __init__(
        self, model: nn.Module, replicas: Axis, names: Collection[str], outputs: WholeOutputs
    ) -> None:
        self._signature = inspect.signature(model.forward)
        kinds = {each.kind: name for name, each in self._signature.parameters.items()}
        self._rest = kinds.get(inspect.Parameter.VAR_POSITIONAL, "")
        self._more = kinds.get(inspect.Parameter.VAR_KEYWORD, "")
        self._replicas, self._names, self._outputs = replicas, frozenset(names), outputs
        self._extent = 0  # samples of this rank's part in the current forward
        self._uneven = ""  # reason why the mean over the parts differs from the mean over the whole batch

    def attach(self, module: nn.Module) -> None:
        """Register the hooks on a module."""
        module.register_forward_pre_hook(self._take_part, with_kwargs=True)
        module.register_forward_hook(self._make_whole)

    def _take_part(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with this rank's part of the batch.

        Raises:
            ValueError: `args` or `kwargs` has unplanned tensors, tensors in a list or a dict, several batch
                sizes, or a batch size that the ranks do not divide.
        """
        bound = self._signature.bind(*args, **kwargs)
        given = bound.arguments
        more = {**given.pop(self._more, {})}  # arguments in `**kwargs`, which have names, too
        values = {name: value for name, value in (given | more).items() if name != self._rest}
        values |= {f"argument {place}": value for place, value in enumerate(given.get(self._rest, ()))}
        batches: dict[str, int] = {}
        for name, value in values.items():
            if isinstance(value, Tensor) and value.dim() > 0:
                if name not in self._names:
                    raise ValueError(
                        f"{name} was not in meta_args, so that it is unknown whether its dimension 0 "
                        f"counts samples: make the plan with it (it has {', '.join(sorted(self._names))})"
                    )
                batches[name] = value.shape[0]
            elif any(isinstance(each, Tensor) and each.dim() > 0 for each in tree_leaves(value)):
                raise ValueError(
                    f"{name} is a {type(value).__name__} with tensors, and it is unknown whether "
                    "their dimension 0 counts samples: let the forward take them as separate arguments, "
                    "or take dataloader_option='distributed'"
                )
        if len(set(batches.values())) != 1:
            raise ValueError(f"dimension 0 of the arguments is the batch, and it is {batches or 'missing'}")
        batch, num_parts = next(iter(batches.values())), self._replicas.size
        if batch % num_parts:
            raise ValueError(
                f"a batch of {batch} cannot be shared by {num_parts} data-parallel ranks: give a multiple of "
                f"{num_parts}, or drop the last batch of the data"
            )
        self._extent = batch // num_parts
        labels = {name: values[name] for name in self._outputs.ignored if name in batches}
        self._uneven = _uneven_labels(labels, self._outputs.ignored, num_parts)
        for name in batches:
            holder = given if name in given else more
            holder[name] = slice_of(holder[name], self._replicas, 0)
        return bound.args, {**bound.kwargs, **more}

    def _make_whole(self, _: nn.Module, __: tuple[Any, ...], output: Any) -> Any:
        is_number = [each.dim() == 0 for each in tree_leaves(output) if isinstance(each, Tensor)]
        kinds = self._kinds(is_number)
        return tree_map_only(Tensor, lambda part: self._whole(part, next(kinds)), output)

    def _kinds(self, is_number: Sequence[bool]) -> Iterator[str]:
        """Return the kinds of the tensors returned by a forward.

        Raises:
            ValueError: `is_number` has another number of scalars than the trace.
        """
        planned = self._outputs
        if len(is_number) == len(planned.kinds):
            return iter(planned.kinds)
        # Without labels, or with a cache, a model returns fewer or more tensors.
        numbers = [kind for kind, known in zip(planned.kinds, planned.is_number, strict=True) if known]
        if sum(is_number) not in (0, len(numbers)):
            raise ValueError(
                f"the model returns {sum(is_number)} numbers, and with meta_args it returned {len(numbers)}: "
                "make the plan with the arguments that the module is called with"
            )
        of_numbers = iter(numbers)
        return iter([next(of_numbers) if each else "samples" for each in is_number])

    def _whole(self, part: Tensor, kind: str) -> Tensor:
        """Return the tensor of the whole batch, of which a rank has a part.

        Raises:
            ValueError: `part` does not have samples in dimension 0, or is a mean over another number of terms
                than on another rank.
        """
        # See [Note: gradients of a whole batch]. All replicas join each collective with their part.
        num_parts = self._replicas.size
        if kind == "same":
            return part
        given = _Multiplied.apply(part, num_parts) if part.requires_grad else part
        if kind == "mean":
            if self._uneven:
                raise ValueError(
                    f"{self._uneven}: the mean of the parts is not the mean of the whole. Let it return "
                    "its logits and compute the loss from them, or take dataloader_option='distributed'"
                )
            return reduce_forward_copy_backward(given, self._replicas) / num_parts
        if kind == "sum":
            return reduce_forward_copy_backward(given, self._replicas)
        if part.shape[0] % self._extent:
            raise ValueError(
                f"an output of shape {tuple(part.shape)} has no samples in dimension 0, of which this rank "
                f"has {self._extent}: take dataloader_option='distributed', by which outputs stay as they are"
            )
        return gather_forward_split_backward(given, self._replicas, 0)


def _uneven_labels(labels: Mapping[str, Tensor], ignored: Mapping[str, int], num_parts: int) -> str:
    """Return the reason why a mean over labels is not the mean over parts; empty if it is.

    Args:
        labels: Labels by the name of an argument.
        ignored: The ignored label, by the same names.
        num_parts: Number of ranks that share them.
    """
    for name, tensor in labels.items():
        counted = tensor != ignored[name]
        if bool(counted.all()):
            continue
        counted = counted.flatten(1) if tensor.dim() > 1 else counted[:, None]
        # Causal models skip the first label of each sample.
        for each in (counted, counted[:, 1:]):
            if len({int(part.sum()) for part in each.chunk(num_parts)}) > 1:
                return f"{name} has labels of {ignored[name]}, in other numbers on each of {num_parts} ranks"
    return ""


class _Multiplied(torch.autograd.Function):
    """Identity with a multiplied gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, factor: int) -> Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


class CutGradient(Tensor):
    """A gradient of a slice of a parameter, with the norm of the whole parameter's gradient.

    This makes `torch.nn.utils.clip_grad_norm_` correct. The norm is collective: all ranks that share the
    parameter compute it in the same order. All other functions see this rank's slice.
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
        ValueError: `args` or `kwargs` has dimensions: norms along dimensions of a slice would be different.
    """
    if len(args) > 2 or kwargs.get("dim") is not None:
        raise ValueError(
            "a norm along dimensions of the gradient of a slice of a parameter differs from the norm of the "
            "whole gradient: take the norm of all of it, or gradient.as_subclass(torch.Tensor) for the slice "
            "alone"
        )
    order = args[1] if len(args) > 1 else kwargs.get("ord", kwargs.get("p", 2))
    return 2.0 if order is None or order == "fro" else float(order)


def _norm_of_all(norm: Tensor, order: float, axis: Axis) -> Tensor:
    norm = norm.as_subclass(Tensor)
    if order == float("inf"):
        return all_reduce(norm, axis, dist.ReduceOp.MAX)
    return all_reduce(norm**order, axis) ** (1 / order)


def follow_cuts(model: nn.Module, axis: Axis, names: Collection[str]) -> None:
    """Make the gradients of some parameters `CutGradient`s, if each rank of an axis has a slice of them.

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
