"""Checks of the shapes of arguments, and values of masks."""

from collections.abc import Sequence

import torch
from torch import Tensor


def check_pairs(name: str, pair: Tensor, dim: int, num_ranks: int, *, cut: int) -> None:
    """Raise an error unless an argument has pairs of residues, or a rank's slice of them.

    Args:
        name: Name of the argument.
        pair: The argument, (batch, residues, residues, dim).
        dim: Width of the pairs.
        num_ranks: Number of ranks that share the pairs.
        cut: The dimension that is cut, 1 or 2.

    Raises:
        ValueError: `pair` has another shape.
    """
    if num_ranks == 1:
        check_shape(name, pair, ("batch", "residues", pair.shape[1], dim))
        return
    if pair.dim() != 4 or pair.shape[cut] * num_ranks != pair.shape[3 - cut] or pair.shape[3] != dim:
        raise ValueError(
            f"{name} has the shape {tuple(pair.shape)}; in tensor mode 'dap' it must be a slice along dim "
            f"{cut} of (batch, residues, residues, {dim}) over {num_ranks} ranks (DapGroup.scatter)"
        )


def existing(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 1 for positions that exist and 0 for others, padding (-1) among them."""
    return mask.to(dtype) if mask.dtype == torch.bool else mask.to(dtype).clamp(min=0)


def check_shape(name: str, tensor: Tensor | None, shape: Sequence[int | str]) -> None:
    """Raise an error if an argument has another shape.

    Args:
        name: Name of the argument.
        tensor: The argument; None is not checked.
        shape: A size for each dimension, or the name of one of any size.

    Raises:
        ValueError: `tensor` has another number of dimensions or another size.
    """
    if tensor is None:
        return
    if tensor.dim() != len(shape) or any(
        isinstance(size, int) and size != found for size, found in zip(shape, tensor.shape, strict=True)
    ):
        wanted = ", ".join(map(str, shape))
        raise ValueError(f"{name} has the shape {tuple(tensor.shape)}; it must be ({wanted})")
