"""Rules for views that keep the sharded dimension: other dimensions are moved, merged or split.

A caller can pass the extent of the sharded dimension of the slice or of the full tensor: models compute it
from a tensor's shape, which is the shape of the slice, or from their config.

[Note: views with two meanings]
Of a slice (2, 3, 2) of a whole (2, 3, 4), `x.view(-1, 2)` is (6, 2) if 2 is the slice's extent, and (12, 2)
as in one process. With a -1 both always fit. A model with `x.view(-1, x.size(-1))` means the first, so the
extent of the sharded dimension is read as a marked int (`SliceExtent`). An unmarked extent is refused.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from colossalai.tensor.colo._cut import Sliced, TensorCut, cut_of
from colossalai.tensor.colo._elementwise import Rule


class SliceExtent(int):
    """Extent of the sharded dimension of a slice; see [Note: views with two meanings]."""

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)


def marked_extents(extents: Any, cut: TensorCut, dim: int | None) -> Any:
    """Return the shape of a slice, or one extent of it, with the sharded dimension marked.

    Args:
        extents: The shape, or the extent.
        cut: Sharding of the tensor.
        dim: Dimension of a single extent, not negative.
    """
    if isinstance(extents, torch.Size):
        return torch.Size(
            SliceExtent(size) if place == cut.dim else size for place, size in enumerate(extents)
        )
    return SliceExtent(extents) if dim == cut.dim else extents


def local_extents(
    shape: Sequence[int], cut: TensorCut, wanted: Sequence[int]
) -> tuple[list[int], int] | None:
    """Return the extents of a slice after a view, and the sharded dimension; None if the view splits it.

    Args:
        shape: Shape of the slice.
        cut: Sharding of the tensor.
        wanted: Requested extents, one of which can be -1.

    Raises:
        ValueError: `wanted` has two meanings; see [Note: views with two meanings].
    """
    num_before, own = math.prod(shape[: cut.dim]), shape[cut.dim]
    num_behind = math.prod(shape[cut.dim + 1 :])
    fits: list[tuple[list[int], int]] = []
    for dim, size in enumerate(wanted):
        if size not in (own, own * cut.axis.size, -1):
            continue
        before, behind = list(wanted[:dim]), list(wanted[dim + 1 :])
        if _fill(before, num_before) and _fill(behind, num_behind):
            fits.append(([*before, own, *behind], dim))
    read = [fit for fit in fits if isinstance(wanted[fit[1]], SliceExtent)]
    whole = [size * cut.axis.size if dim == cut.dim else size for dim, size in enumerate(shape)]
    if not read and -1 in wanted and any(wanted[dim] == own for _, dim in fits):
        raise ValueError(
            f"a view as {tuple(wanted)} fits the slice, of shape {tuple(shape)}, and the whole, "
            f"{tuple(whole)}: name all extents instead of -1, or read the slice's (x.shape[{cut.dim}])"
        )
    found = read or fits
    if len(found) > 1:
        raise ValueError(
            f"a view of {tuple(shape)}, a slice of {tuple(whole)}, as {tuple(wanted)} may cut more than one "
            f"dimension: read the extent of the cut one from the slice (x.shape[{cut.dim}])"
        )
    return found[0] if found else None


def _fill(extents: list[int], numel: int) -> bool:
    """Replace a -1 such that extents have a number of elements; return whether they do."""
    known = math.prod(size for size in extents if size != -1)
    if -1 in extents and known > 0 and numel % known == 0:
        extents[extents.index(-1)] = numel // known
        known = numel
    return known == numel


def _view(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    tensor, *given = args
    cut = cut_of(tensor)
    wanted = _sizes(given, kwargs)
    if cut is None or wanted is None:
        return NotImplemented
    found = local_extents(tensor.shape, cut, wanted)
    if found is None:
        return NotImplemented
    extents, dim = found
    return Sliced(func(tensor, extents), TensorCut(dim, cut.group))


def _expand(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    tensor, *given = args
    cut = cut_of(tensor)
    wanted = _sizes(given, kwargs)
    if cut is None or wanted is None:
        return NotImplemented
    dim = len(wanted) - tensor.dim() + cut.dim
    own = tensor.shape[cut.dim]
    if wanted[dim] not in (-1, own, own * cut.axis.size):
        return NotImplemented
    return Sliced(func(tensor, [*wanted[:dim], own, *wanted[dim + 1 :]]), TensorCut(dim, cut.group))


def _sizes(given: Sequence[Any], kwargs: Mapping[str, Any]) -> list[int] | None:
    """Return the extents from any of the call forms of torch."""
    if kwargs:
        given = [kwargs.get("shape", kwargs.get("size"))]
    if len(given) == 1 and isinstance(given[0], list | tuple):
        given = given[0]
    return list(given) if given and all(isinstance(size, int) for size in given) else None


def _permuted(order: Callable[..., list[int]]) -> Rule:
    """Return the rule of a function that permutes dimensions.

    Args:
        order: Function from the number of dimensions and the arguments to the old position of each dimension.
    """

    def rule(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        tensor, *given = args
        cut = cut_of(tensor)
        if cut is None:
            return NotImplemented
        moved = [dim % tensor.dim() for dim in order(tensor.dim(), *given, **kwargs)]
        return Sliced(func(*args, **kwargs), TensorCut(moved.index(cut.dim), cut.group))

    return rule


def _swapped(num_dims: int, dim0: int, dim1: int) -> list[int]:
    order = list(range(num_dims))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return order


def _last_swapped(num_dims: int) -> list[int]:
    return _swapped(num_dims, -2, -1) if num_dims > 1 else [0]


def _reversed(num_dims: int) -> list[int]:
    return list(range(num_dims))[::-1]


def _given(num_dims: int, *dims: Any, **kwargs: Any) -> list[int]:
    given = kwargs.get("dims", dims)
    return list(given[0] if len(given) == 1 and isinstance(given[0], list | tuple) else given)


def _unsqueeze(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    cut = cut_of(args[0])
    if cut is None:
        return NotImplemented
    dim = (kwargs["dim"] if "dim" in kwargs else args[1]) % (args[0].dim() + 1)
    return Sliced(func(*args, **kwargs), TensorCut(cut.dim + (dim <= cut.dim), cut.group))


def _squeeze(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    cut = cut_of(args[0])
    given = kwargs.get("dim", args[1] if len(args) > 1 else None)
    if cut is None or not isinstance(given, int):
        return NotImplemented
    dim = given % args[0].dim()
    if dim == cut.dim:
        return NotImplemented
    goes = dim < cut.dim and args[0].shape[dim] == 1
    return Sliced(func(*args, **kwargs), TensorCut(cut.dim - goes, cut.group))


def _parts(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    tensor, *given = args
    cut = cut_of(tensor)
    dim = kwargs.get("dim", given[1] if len(given) > 1 else 0)
    if cut is None or not isinstance(dim, int) or dim % tensor.dim() == cut.dim:
        return NotImplemented
    return [Sliced(part, cut) for part in func(*args, **kwargs)]


def rules() -> Iterator[tuple[Any, Rule]]:
    """Yield each function with its rule."""
    by_name: dict[str, Rule] = {
        "view": _view,
        "reshape": _view,
        "expand": _expand,
        "transpose": _permuted(_swapped),
        "swapaxes": _permuted(_swapped),
        "swapdims": _permuted(_swapped),
        "permute": _permuted(_given),
        "t": _permuted(_reversed),
        "unsqueeze": _unsqueeze,
        "squeeze": _squeeze,
        "split": _parts,
        "chunk": _parts,
        "tensor_split": _parts,
    }
    for name, rule in by_name.items():
        for home in (torch, torch.Tensor):
            if (func := getattr(home, name, None)) is not None:
                yield func, rule
    for name, order in (("T", _reversed), ("mT", _last_swapped)):
        yield getattr(torch.Tensor, name).__get__, _permuted(order)
