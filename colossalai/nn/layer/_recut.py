"""Back to the cut that a model began with, where what follows needs it."""

import torch
from torch import nn

from colossalai.communication import (
    gather_forward_scatter_backward,
    gather_forward_split_backward,
    slice_of,
)
from colossalai.context import global_context
from colossalai.nn.layer._flow import current_cut, restart
from colossalai.nn.layer._scheme import Axes


class BackToFirstCut(nn.Module):
    """Brings an activation from the cut that the layer built before leaves to that of a model's input.

    An odd number of linear layers leaves another cut than the first in modes "1d" and "3d", and a head that
    shares the embedding's weight needs the first. Over the axes that move, the activation is gathered and cut
    again: for a slice |x| and p ranks along them together (p-1) |x| bytes, and as much in the backward of 3d.

    Shape:
        Input (batch, ..., features) and output: slices as the two cuts say.
    """

    def __init__(self) -> None:
        super().__init__()
        mode = global_context.tensor_mode
        self.source = current_cut(mode)
        self.target = restart(mode)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's slice of the same activation."""
        x = self._gather(x, _not_shared(self.source.features, self.target.features), -1)
        x = self._gather(x, _not_shared(self.source.batch, self.target.batch), 0)
        for name in _not_shared(self.target.batch, self.source.batch):
            x = slice_of(x, global_context.mesh.axis(name), 0)
        for name in _not_shared(self.target.features, self.source.features):
            x = slice_of(x, global_context.mesh.axis(name), -1)
        return x

    def _gather(self, x: torch.Tensor, axes: Axes, dim: int) -> torch.Tensor:
        kept = (*self.target.batch, *self.target.features)
        for name in reversed(axes):
            # An axis that cuts the result elsewhere uses the gathered tensor differently on every rank.
            gather = gather_forward_scatter_backward if name in kept else gather_forward_split_backward
            x = gather(x, global_context.mesh.axis(name), dim)
        return x


def _not_shared(axes: Axes, other: Axes) -> Axes:
    """Return the axes after the coarsest ones that both cuts have in common."""
    shared = 0
    while axes[: shared + 1] == other[: shared + 1] and shared < min(len(axes), len(other)):
        shared += 1
    return axes[shared:]
