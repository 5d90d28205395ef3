"""Dropout of an activation that is cut, or held whole, by the ranks of a tensor-parallel group."""

from collections.abc import Hashable
from contextlib import nullcontext

import torch
from torch import nn

from colossalai.context import ParallelMode, add_seed, get_seeds, global_context, seed
from colossalai.nn.layer._record import recorded_cut
from colossalai.nn.layer._scheme import Cut


class ParallelDropout(nn.Dropout):
    """Draws masks that differ where the ranks hold different slices and agree where they hold the same.

    An activation that has a record of how it is cut is believed, so that one dropout can be applied at
    several points of a model.

    Args:
        p: Probability of a zero.
        inplace: Whether to change the input.
        cut: How an activation without a record is cut; whole where it is not cut at all.
    """

    def __init__(self, p: float = 0.5, inplace: bool = False, *, cut: Cut) -> None:
        super().__init__(p, inplace)
        self.cut = cut
        random_mode(cut)  # makes its state, which a checkpoint that is loaded may set before the first draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input with elements zeroed and the others scaled up."""
        is_drawing = self.training and self.p > 0.0
        mode = random_mode(recorded_cut(x) or self.cut) if is_drawing else None
        with nullcontext() if mode is None else seed(mode):
            return super().forward(x)


def random_mode(cut: Cut) -> Hashable | None:
    """Return the mode whose random state differs along the axes of a cut alone; None: the one in force.

    The mode is made where nobody has drawn along these axes before.
    """
    axes = (*cut.batch, *cut.features)
    if not axes or ParallelMode.DATA not in get_seeds():  # not launched: this process is alone
        return None
    if set(axes) == set(global_context.tensor_axes):
        return ParallelMode.TENSOR
    mode = f"slices along {' x '.join(axes)}"
    if mode not in get_seeds():  # the seed of DATA is a hash: those that follow it are nobody's
        add_seed(mode, get_seeds()[ParallelMode.DATA] + 1 + global_context.mesh.axis_rank(axes))
    return mode
