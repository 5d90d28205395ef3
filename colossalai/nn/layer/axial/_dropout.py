"""Dropout whose mask is shared along an axis."""

import torch.nn.functional as F
from torch import Tensor, nn


class SharedDropout(nn.Module):
    """Dropout with one mask for all positions along an axis (supplement 1.11.6 of AlphaFold 2).

    Args:
        p: Probability of an element to be zeroed.
        dim: Dimension along which the mask is the same: with 1 all rows have the same mask, with 2 all
            columns.

    Raises:
        ValueError: `p` is not a probability.
    """

    def __init__(self, p: float, dim: int) -> None:
        super().__init__()
        if not 0 <= p <= 1:
            raise ValueError(f"p is {p}; it must be a probability, from 0 to 1")
        self.p, self.dim = p, dim

    def forward(self, x: Tensor) -> Tensor:
        """Return the elements that are kept, divided by the probability of that, in training; else `x`."""
        if not self.training or self.p == 0:
            return x
        shape = list(x.shape)
        shape[self.dim] = 1
        return x * F.dropout(x.new_ones(shape), self.p)

    def extra_repr(self) -> str:
        """Return the arguments in one line."""
        return f"p={self.p}, dim={self.dim}"
