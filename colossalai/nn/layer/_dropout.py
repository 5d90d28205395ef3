"""Dropout of an activation that is cut, or held whole, by the ranks of a tensor-parallel group."""

from contextlib import nullcontext

import torch
from torch import nn

from colossalai.context import ParallelMode, get_seeds, seed
from colossalai.nn.layer._scheme import Cut


class ParallelDropout(nn.Dropout):
    """Draws masks that differ where the ranks hold different slices and agree where they hold the same.

    Args:
        p: Probability of a zero.
        inplace: Whether to change the input.
        cut: How the activation is cut; whole where it is not cut at all.
    """

    def __init__(self, p: float = 0.5, inplace: bool = False, *, cut: Cut) -> None:
        super().__init__(p, inplace)
        self.cut = cut

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input with elements zeroed and the others scaled up."""
        is_cut = bool(self.cut.batch or self.cut.features)
        with seed(ParallelMode.TENSOR) if is_cut and ParallelMode.TENSOR in get_seeds() else nullcontext():
            return super().forward(x)
