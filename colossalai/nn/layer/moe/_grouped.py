"""Products of the rows of each expert by its matrix."""

from collections.abc import Sequence

import torch
from torch import Tensor


def grouped_linear(
    rows: Tensor,
    weight: Tensor,
    sizes: Sequence[int],
    *,
    bias: Tensor | None = None,
    transposed: bool = False,
) -> Tensor:
    """Return the rows of each expert times its matrix."""
    parts = []
    biases = bias.unbind(0) if bias is not None else [None] * len(weight)
    for part, matrix, add in zip(rows.split(list(sizes)), weight.unbind(0), biases, strict=True):
        parts.append(torch.nn.functional.linear(part, matrix.t() if transposed else matrix, add))
    return torch.cat(parts)
