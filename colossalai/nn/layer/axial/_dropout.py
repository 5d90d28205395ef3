"""Dropout whose mask is shared along an axis."""

import torch.nn.functional as F
from torch import Tensor

from colossalai.communication import slice_of
from colossalai.nn.layer.axial._dap import AxialModule


class SharedDropout(AxialModule):
    """Dropout with one mask for all positions along an axis (supplement 1.11.6 of AlphaFold 2).

    Args:
        p: Probability of an element to be zeroed.
        dim: Dimension along which the mask is the same: with 1 all rows have the same mask, with 2 all
            columns. None: each element has its own.
        cut_dim: Dimension of the inputs that is cut under DAP. Masks are slices of those of one process, for
            sizes that need no padding. Default: `dim`.

    Raises:
        ValueError: `p` is not a probability, or both `dim` and `cut_dim` are None.
    """

    def __init__(self, p: float, dim: int | None, *, cut_dim: int | None = None) -> None:
        super().__init__()
        if not 0 <= p <= 1:
            raise ValueError(f"p is {p}; it must be a probability, from 0 to 1")
        cut_dim = dim if cut_dim is None else cut_dim
        if cut_dim is None:
            raise ValueError("dim is None; cut_dim must then be the dimension that is cut under DAP")
        self.p, self.dim, self.cut_dim = p, dim, cut_dim

    def forward(self, x: Tensor) -> Tensor:
        """Return the elements that are kept, divided by the probability of that, in training; else `x`."""
        if not self.training or self.p == 0:
            return x
        shape = list(x.shape)
        shape[self.cut_dim] *= self.group.size  # the state in force is that of all ranks
        if self.dim is not None:
            shape[self.dim] = 1
        factors = F.dropout(x.new_ones(shape), self.p)
        if self.cut_dim != self.dim and self.group.size > 1:
            factors = slice_of(factors, self.group.axis, self.cut_dim)
        return x * factors

    def extra_repr(self) -> str:
        """Return the arguments in one line."""
        return f"p={self.p}, dim={self.dim}"
