"""Rules for elementwise functions, and functions that only use this rank's memory: the sharding is kept.

For several operands the sharded dimension is counted from the end, as in torch's broadcasting. A full operand
with this dimension is sliced; without it, or with one element, each rank uses the operand with its slice. If
operands are sharded along different dimensions, the rule does not apply, and all are gathered.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from colossalai.tensor.colo._cut import Sliced, TensorCut, cut_of, sliced, tensors_in, used_apart, whole

Rule = Callable[[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]], Any]

_ALONE = """
    abs absolute neg negative positive sign sgn square reciprocal exp exp2 expm1 log log2 log10 log1p sqrt
    rsqrt sin cos tan asin acos atan arcsin arccos arctan sinh cosh tanh asinh acosh atanh arcsinh arccosh
    arctanh sigmoid logit erf erfc erfinv lgamma digamma ceil floor round trunc fix frac nan_to_num isnan
    isinf isfinite isposinf isneginf logical_not bitwise_not clamp clip clamp_min clamp_max pow
    float_power add sub subtract mul multiply div divide true_divide floor_divide remainder fmod maximum
    minimum fmax fmin atan2 arctan2 hypot copysign logaddexp logaddexp2 xlogy eq ne lt le gt ge not_equal
    less less_equal greater greater_equal logical_and logical_or logical_xor bitwise_and bitwise_or
    bitwise_xor where lerp addcmul addcdiv masked_fill rsub relu relu6 elu selu celu gelu silu mish
    leaky_relu hardtanh hardsigmoid hardswish softplus softsign logsigmoid tanhshrink hardshrink
    softshrink threshold sinc deg2rad rad2deg signbit heaviside ldexp nextafter __add__ __radd__ __sub__
    __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __div__ __rdiv__ __floordiv__ __rfloordiv__ __mod__
    __rmod__ __pow__ __rpow__ __neg__ __pos__ __abs__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __and__
    __or__ __xor__ __rand__ __ror__ __rxor__ __invert__
"""
_IN_PLACE = """
    __iadd__ __isub__ __imul__ __itruediv__ __idiv__ __ifloordiv__ __imod__ __ipow__ __iand__ __ior__
    __ixor__ zero_ fill_ copy_
"""
_AS_IT_IS = """
    detach clone contiguous to type float double half bfloat16 int long bool cpu alias zeros_like
    ones_like full_like empty_like conj resolve_conj resolve_neg type_as
"""
_HOMES = (torch, torch.Tensor, F, torch._C._nn, torch.special)


def elementwise(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Compute with slices; if the operands have different shardings, gather all of them."""
    tensors = list(tensors_in(args, kwargs.values()))
    found = {
        (cut.dim - each.dim(), each.shape[cut.dim], cut.group)
        for each in tensors
        if (cut := cut_of(each)) is not None
    }
    if len(found) != 1 or kwargs.get("out") is not None:
        return NotImplemented
    [(dim, size, group)] = found
    aligned = _aligner(TensorCut(dim, group), size)
    args = tuple(map(aligned, args))
    result = func(*args, **{name: aligned(value) for name, value in kwargs.items()})
    if not isinstance(result, torch.Tensor) or result.dim() != max(each.dim() for each in tensors):
        return NotImplemented  # `torch.where(condition)` gives positions
    return Sliced(result, TensorCut(result.dim() + dim, group))


def in_place(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Write into this rank's slice, or into a full tensor."""
    own = cut_of(args[0])
    if own is None:
        func(args[0], *map(_whole, args[1:]), **{name: _whole(value) for name, value in kwargs.items()})
        return args[0]
    aligned = _aligner(TensorCut(own.dim - args[0].dim(), own.group), args[0].shape[own.dim])
    func(args[0], *map(aligned, args[1:]), **{name: aligned(value) for name, value in kwargs.items()})
    return args[0]


def as_it_is(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return a result of the same shape and sharding."""
    cut = cut_of(args[0]) if args else None
    if cut is None or kwargs.get("out") is not None:
        return NotImplemented
    result = func(args[0], *map(_whole, args[1:]), **kwargs)
    if not isinstance(result, torch.Tensor) or result.shape != args[0].shape:
        return NotImplemented
    return Sliced(result, cut)


def on_lists(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Compute with lists of slices, as optimizers do without gradients."""
    if torch.is_grad_enabled():
        return NotImplemented
    result = func(*args, **kwargs)
    if not isinstance(result, list | tuple):
        return result
    cuts = [cut_of(tensor) for tensor in args[0]]
    if any(each.shape != given.shape for each, given in zip(result, args[0], strict=True)):
        return NotImplemented  # a norm, which slices do not have
    return [each if cut is None else Sliced(each, cut) for each, cut in zip(result, cuts, strict=True)]


def rules() -> Iterator[tuple[Any, Rule]]:
    """Yield each function with its rule."""
    for name in _ALONE.split():
        yield from ((func, elementwise) for func in _called(name))
        if not name.startswith("__"):
            yield from ((func, in_place) for func in _called(f"{name}_"))
    for name in _IN_PLACE.split():
        yield from ((func, in_place) for func in _called(name))
    for name in _AS_IT_IS.split():
        yield from ((func, as_it_is) for func in _called(name))
    for name in dir(torch):
        if name.startswith(("_foreach_", "_fused_")):
            yield getattr(torch, name), on_lists


def _called(name: str) -> list[Any]:
    found = (getattr(home, name, None) for home in _HOMES)
    return [func for func in found if callable(func)]


def _aligner(cut: TensorCut, size: int) -> Callable[[Any], Any]:
    """Return a function that aligns an operand with a slice.

    Args:
        cut: Sharding of the results; the dimension is counted from the end.
        size: Extent of a slice along it.
    """

    def aligned(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        dim, own = value.dim() + cut.dim, cut_of(value)
        if own is not None:
            return value if own.dim == dim else sliced(value, TensorCut(dim, cut.group))
        if dim < 0 or value.shape[dim] == 1:
            return used_apart(value, cut)
        if value.shape[dim] == size:
            if torch.is_grad_enabled():
                raise ValueError(
                    f"a tensor of shape {tuple(value.shape)} has the extent {size} of a slice where the "
                    f"whole has {size * cut.axis.size}: declare its cut by "
                    "ColoTensor.from_torch_tensor(tensor, spec), or pass the whole"
                )
            return value
        return sliced(value, TensorCut(dim, cut.group))

    return aligned


def _whole(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(map(_whole, value))
    return whole(value)
