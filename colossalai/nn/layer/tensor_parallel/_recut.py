"""Return to the cut of a model's input, for layers that need it."""

import torch
from torch import nn

from colossalai.communication import (
    gather_forward_scatter_backward,
    gather_forward_split_backward,
    slice_of,
)
from colossalai.nn.layer.tensor_parallel._flow import entry_of, numbered, restart
from colossalai.nn.layer.tensor_parallel._launched import launched_job
from colossalai.nn.layer.tensor_parallel._record import Passage
from colossalai.nn.layer.tensor_parallel._scheme import Axes, Cut


class BackToFirstCut(nn.Module):
    """Recuts an activation from the output cut of the layer built before to the cut of a model's input.

    An odd number of linear layers leaves another cut than the first in modes "1d" and "3d", and a head that
    shares the embedding's weight needs the first. Over the axes that move, the activation is gathered and cut
    again: for a slice |x| and p ranks along them together (p-1) |x| bytes, and as much in the backward of 3d.

    Args:
        input_cut: Cut of the input; default: the output cut of the layer built before.
        after: The layer whose output it takes, instead of `input_cut`.

    Shape:
        Input (batch, ..., features) and output: slices by the two cuts.
    """

    def __init__(self, *, input_cut: Cut | None = None, after: nn.Module | None = None) -> None:
        super().__init__()
        job = launched_job()
        self.mesh, mode = job.mesh, job.mode
        layer = numbered(type(self).__name__)
        entry = entry_of(mode, layer, input_cut=input_cut, after=after)
        self.source = entry.cut
        self.target = restart(mode)
        self.passage = Passage(mode=mode, layer=layer, entry=entry, output_cut=self.target)

    @property
    def output_cut(self) -> Cut:
        """Cut of the output."""
        return self.target

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's slice of the same activation.

        Raises:
            ValueError: The input is not cut as the layer was built for.
        """
        x = self.passage.enter(x)
        return self.passage.leave(self._recut(x.view_as(x)))  # a record needs a node of its own

    def _recut(self, x: torch.Tensor) -> torch.Tensor:
        x = self._gather(x, _not_shared(self.source.features, self.target.features), -1)
        x = self._gather(x, _not_shared(self.source.batch, self.target.batch), 0)
        for name in _not_shared(self.target.batch, self.source.batch):
            x = slice_of(x, self.mesh.axis(name), 0)
        for name in _not_shared(self.target.features, self.source.features):
            x = slice_of(x, self.mesh.axis(name), -1)
        return x

    def _gather(self, x: torch.Tensor, axes: Axes, dim: int) -> torch.Tensor:
        kept = (*self.target.batch, *self.target.features)
        for name in reversed(axes):
            # Along an axis that cuts the result, each rank uses the gathered tensor differently.
            gather = gather_forward_scatter_backward if name in kept else gather_forward_split_backward
            x = gather(x, self.mesh.axis(name), dim)
        return x


def _not_shared(axes: Axes, other: Axes) -> Axes:
    """Return the axes after the coarsest ones that both cuts share."""
    shared = 0
    while axes[: shared + 1] == other[: shared + 1] and shared < min(len(axes), len(other)):
        shared += 1
    return axes[shared:]
