"""Rules for products, lookups, normalization, dropout and the loss, by the sharding of their operands.

    product of              is                              sends
    x, w cut along out      slices of the output            nothing; the backward sums dx
    x, w cut along in       terms of the output: summed     the output
    a cut along rows, b     slices of the rows              nothing; the backward sums db
    both along a batch      slices of the batch             nothing

A full operand is sliced if a rule needs a slice, and an operand with another sharding is gathered first
(1909.08053 for the pairs of column and row products). The compute spec of the weight determines whether a
sliced output is gathered (`ComputeSpec.output_replicate`). See [Note: gradients of cut values].
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from colossalai.communication import all_reduce, reduce_forward_copy_backward
from colossalai.context import drawing_apart
from colossalai.tensor.colo._cut import COMPUTE_SPEC, Sliced, TensorCut, cut_of, sliced, used_apart, whole
from colossalai.tensor.colo._elementwise import Rule

Func = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]

_REDUCTIONS = ("none", "mean", "sum")


def _product(a: torch.Tensor, b: torch.Tensor, cut_a: TensorCut | None, cut_b: TensorCut | None) -> Any:
    """Return `a @ b` of two tensors with two or more dimensions, at least one of them sharded."""
    cut = cut_a or cut_b
    assert cut is not None, "one operand is cut"
    group, last_a, row_b = cut.group, a.dim() - 1, b.dim() - 2
    num_dims = max(a.dim(), b.dim())
    if cut_b == TensorCut(row_b, group) or (
        cut_b is None and cut_a == TensorCut(last_a, group)
    ):  # the contracted one
        terms = torch.matmul(
            sliced(a, TensorCut(last_a, group), cut_a), sliced(b, TensorCut(row_b, group), cut_b)
        )
        return reduce_forward_copy_backward(terms, cut.axis)
    if cut_b == TensorCut(row_b + 1, group):
        return Sliced(torch.matmul(used_apart(a, cut, cut_a), b), TensorCut(num_dims - 1, group))
    if cut_a is not None and cut_b is None and (b.dim() == 2 or cut_a.dim == last_a - 1):
        return Sliced(torch.matmul(a, used_apart(b, cut)), TensorCut(num_dims - a.dim() + cut_a.dim, group))
    if cut_a == cut_b and a.dim() == b.dim() and a.shape[cut.dim] == b.shape[cut.dim]:
        return Sliced(torch.matmul(a, b), cut)  # along a batch
    return NotImplemented


def _matmul(func: Func, args: Args, kwargs: Kwargs) -> Any:
    if len(args) != 2 or kwargs or min(args[0].dim(), args[1].dim()) < 2:
        return NotImplemented
    a, b = args
    return _as_asked(_product(a, b, cut_of(a), cut_of(b)), a, b)


def _linear(func: Func, args: Args, kwargs: Kwargs) -> Any:
    named = dict(zip(("input", "weight", "bias"), args, strict=False)) | dict(kwargs)
    x, weight, bias = named["input"], named["weight"], named.get("bias")
    if weight.dim() != 2 or x.dim() < 2:
        return NotImplemented
    cut_x, cut_weight = cut_of(x), cut_of(weight)
    if cut_x is None and cut_weight is None:
        return NotImplemented  # the bias alone
    of_transposed = None if cut_weight is None else TensorCut(1 - cut_weight.dim, cut_weight.group)
    return _as_asked(_plus(_product(x, weight.t(), cut_x, of_transposed), bias), weight, bias)


def _addmm(func: Func, args: Args, kwargs: Kwargs) -> Any:
    if len(args) != 3 or kwargs:
        return NotImplemented
    bias, a, b = args
    cut_a, cut_b = cut_of(a), cut_of(b)
    if cut_a is None and cut_b is None:
        return NotImplemented
    return _as_asked(_plus(_product(a, b, cut_a, cut_b), bias), a, b)


def _plus(product: Any, bias: torch.Tensor | None) -> Any:
    """Return the sum of a full or sliced product and a bias that is broadcast to its shape."""
    if product is NotImplemented or bias is None:
        return product
    if isinstance(product, torch.Tensor):
        return product + whole(bias)
    cut = product.cut
    dim = cut.dim - product.value.dim() + bias.dim()
    own = cut_of(bias)
    if dim < 0 or (own is None and bias.shape[dim] == 1):
        return Sliced(product.value + used_apart(bias, cut), cut)
    return Sliced(product.value + sliced(bias, TensorCut(dim, cut.group)), cut)


def _as_asked(result: Any, *weights: Any) -> Any:
    """Gather a sliced result, unless the compute spec of a weight keeps it sliced.

    Without parameters among the operands, a sliced result is not gathered.
    """
    specs = [vars(weight).get(COMPUTE_SPEC) for weight in weights if isinstance(weight, torch.Tensor)]
    asked = [spec.output_replicate for spec in specs if spec is not None]
    if isinstance(result, Sliced) and asked and all(asked):
        return whole(result.value, result.cut)
    return result


def _embedding(func: Func, args: Args, kwargs: Kwargs) -> Any:
    names = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
    named = dict(zip(names, args, strict=False)) | dict(kwargs)
    ids, weight = named["input"], named["weight"]
    cut = cut_of(weight)
    is_plain = named.get("max_norm") is None and not any(map(named.get, ("scale_grad_by_freq", "sparse")))
    if cut is None or cut_of(ids) is not None or not is_plain:
        return NotImplemented
    padding = named.get("padding_idx")
    if cut.dim == 1:
        found = F.embedding(ids, weight, padding)
        return _as_asked(Sliced(found, TensorCut(found.dim() - 1, cut.group)), weight)
    num_rows = weight.shape[0] * cut.axis.size
    if padding is not None:
        if not -num_rows <= padding < num_rows:
            return NotImplemented  # for torch to refuse
        padding %= num_rows
    places, is_here = _in_slice(ids, weight.shape[0], cut, "ids", "rows")
    counts = is_here if padding is None else is_here & (ids != padding)
    rows = F.embedding(places, weight)
    rows = torch.where(counts[..., None], rows, rows.detach())  # only the counted rows have a gradient
    return reduce_forward_copy_backward(rows * is_here[..., None], cut.axis)


def _in_slice(
    numbers: torch.Tensor, size: int, cut: TensorCut, what: str, of: str, ignored: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return local indices of rows or classes in this rank's slice, and the mask of those in the slice.

    Local indices of rows on other ranks are arbitrary but valid. On a CPU all indices are checked. On an
    accelerator a check would synchronize with the host, so an index that is out of range on all ranks is
    not replaced, and the kernel asserts as in one process. The ranks have the same indices, so all of them
    raise or none, before any communication.

    Args:
        numbers: Global indices of the rows or classes.
        size: Number of rows or classes in the slice.
        cut: Sharding of the full tensor.
        what: Name of the indices in the message.
        of: Name of the rows or classes in the message.
        ignored: Index that is ignored and not checked.

    Raises:
        IndexError: A number is negative, or too large, as in torch.
    """
    places, num = numbers - cut.axis.rank * size, size * cut.axis.size
    is_here = (places >= 0) & (places < size)
    counted = numbers if ignored is None else numbers.masked_fill(numbers == ignored, 0)
    if numbers.device.type != "cpu":
        return places.masked_fill(~is_here & (counted >= 0) & (counted < num), 0), is_here
    if numbers.numel():
        low, high = (int(bound) for bound in counted.aminmax())
        if low < 0 or high >= num:
            raise IndexError(f"{what} out of range: they are from {low} to {high}, of {num} {of}, from 0")
    return places.clamp_(0, size - 1), is_here


def _layer_norm(func: Func, args: Args, kwargs: Kwargs) -> Any:
    names = ("input", "normalized_shape", "weight", "bias", "eps")
    named = dict(zip(names, args, strict=False)) | dict(kwargs)
    x = named["input"]
    cut = cut_of(x)
    if cut is None or cut.dim >= x.dim() - len(named["normalized_shape"]):
        return NotImplemented
    for name in ("weight", "bias"):
        named[name] = None if named.get(name) is None else used_apart(named[name], cut)
    return Sliced(F.layer_norm(**named), cut)


def _dropout(func: Func, args: Args, kwargs: Kwargs) -> Any:
    cut = cut_of(args[0]) if args else None
    if cut is None:
        return NotImplemented
    named = dict(zip(("input", "p", "training"), args, strict=False)) | dict(kwargs)
    # Slices differ between the ranks, so the ranks must draw different random numbers.
    with drawing_apart(only_if_drawn=True) if named.get("training", True) else nullcontext():
        return Sliced(func(*args, **kwargs), cut)


def _cross_entropy(func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Return the loss over sharded classes with class indices (N, ...) as targets, as mean or sum.

    With x_k the logits and t the target: log sum_k exp(x_k) - x_t, in which both sums are over all slices.
    """
    names = (
        "input",
        "target",
        "weight",
        "size_average",
        "ignore_index",
        "reduce",
        "reduction",
        "label_smoothing",
    )
    named: dict[str, Any] = {"ignore_index": -100, "reduction": "mean"}
    named |= dict(zip(names, args, strict=False)) | dict(kwargs)
    logits, target = named["input"], named["target"]
    cut = cut_of(logits)
    rare = any(named.get(name) is not None for name in ("weight", "size_average", "reduce"))
    if cut is None or rare or named.get("label_smoothing") or named["reduction"] not in _REDUCTIONS:
        return NotImplemented
    if cut_of(target) is not None or cut.dim != min(1, logits.dim() - 1):
        return NotImplemented
    logits, size = logits.movedim(cut.dim, -1), logits.shape[cut.dim]  # (..., classes / ranks)
    if target.dtype is not torch.int64 or target.shape != logits.shape[:-1]:
        return NotImplemented  # probabilities, or for torch to refuse
    places, is_here = _in_slice(target, size, cut, "labels", "classes", named["ignore_index"])
    largest = all_reduce(logits.detach().amax(-1), cut.axis, dist.ReduceOp.MAX)
    shifted = logits - largest[..., None]
    total = reduce_forward_copy_backward(shifted.exp().sum(-1), cut.axis)
    picked = shifted.gather(-1, places[..., None])[..., 0]
    chosen = reduce_forward_copy_backward(picked * is_here, cut.axis)
    counts = target != named["ignore_index"]
    losses = torch.where(counts, total.log() - chosen, 0.0)
    if named["reduction"] == "none":
        return losses
    return losses.sum() if named["reduction"] == "sum" else losses.sum() / counts.sum()


def rules() -> Iterator[tuple[Any, Rule]]:
    """Yield each function with its rule."""
    yield F.linear, _linear
    yield F.embedding, _embedding
    yield F.layer_norm, _layer_norm
    yield F.cross_entropy, _cross_entropy
    yield F.dropout, _dropout
    for home in (torch, torch.Tensor):
        for name in ("matmul", "mm", "bmm"):
            yield getattr(home, name), _matmul
        yield home.addmm, _addmm
    yield torch.Tensor.__matmul__, _matmul
