"""Dropout of an activation that is cut, or held whole, by the ranks of a tensor-parallel group."""

from collections.abc import Hashable
from contextlib import nullcontext

import torch
from torch import nn

from colossalai.context import Mesh, ParallelMode, add_seed, get_seeds, seed
from colossalai.nn.layer.tensor_parallel._flow import current_cut
from colossalai.nn.layer.tensor_parallel._launched import launched_job
from colossalai.nn.layer.tensor_parallel._record import recorded_cut
from colossalai.nn.layer.tensor_parallel._scheme import Axes, Cut


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
        job = launched_job()
        self.mesh, self.tensor_axes = job.mesh, job.tensor_axes
        self._mode(cut)  # makes its state, which a checkpoint that is loaded may set before the first draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input with elements zeroed and the others scaled up."""
        is_drawing = self.training and self.p > 0.0
        mode = self._mode(recorded_cut(x) or self.cut) if is_drawing else None
        with nullcontext() if mode is None else seed(mode):
            return super().forward(x)

    def _mode(self, cut: Cut) -> Hashable | None:
        return random_mode(cut, self.mesh, self.tensor_axes)


def random_mode(cut: Cut, mesh: Mesh, tensor_axes: Axes, *, by_token: bool = True) -> Hashable | None:
    """Return the mode whose random state differs along the axes of a cut alone; None: the one in force.

    The mode is made where nobody has drawn along these axes before.

    Args:
        cut: How what is dropped is cut.
        mesh: The ranks.
        tensor_axes: All tensor axes of the mesh: what differs along them all is the mode TENSOR.
        by_token: Whether tokens are dropped, and not samples: ranks that share a sequence have other tokens.
    """
    axes = (*cut.batch, *cut.features)
    if not axes or ParallelMode.DATA not in get_seeds():  # not launched: this process is alone
        return None
    if set(axes) == set(tensor_axes):
        return ParallelMode.TENSOR
    if by_token and "sp" in mesh.batch_axes:
        axes = ("sp", *axes)
    mode = f"slices along {' x '.join(axes)}"
    if mode not in get_seeds():  # the seed of DATA is a hash: those that follow it are nobody's
        add_seed(mode, get_seeds()[ParallelMode.DATA] + 1 + mesh.axis_rank(axes))
    return mode


class DropPath(nn.Module):
    """Zeroes whole samples of a residual branch and scales the others up (1603.09382).

    Ranks that hold parts of the same sample agree on it.

    Args:
        p: Probability that a sample is zeroed.
        cut: How an activation without a record is cut; default: as the layer built before leaves it.

    Shape:
        Input (batch, ..., features), a slice; output the same.

    Raises:
        ValueError: `p` is not from 0 to below 1.
    """

    def __init__(self, p: float, *, cut: Cut | None = None) -> None:
        super().__init__()
        if not 0.0 <= p < 1.0:
            raise ValueError(f"drop_path={p}: a probability from 0 up to, not including, 1 is needed")
        self.p = p
        job = launched_job()
        self.mesh, self.tensor_axes = job.mesh, job.tensor_axes
        self.cut = Cut(batch=(cut or current_cut(job.mode)).batch)
        self._mode()  # makes its random state, as dropout does

    def extra_repr(self) -> str:
        """Return what `print(model)` shows."""
        return f"p={self.p}"

    def forward(self, branch: torch.Tensor) -> torch.Tensor:
        """Return the branch with samples zeroed, the branch itself in evaluation."""
        if not self.training or self.p == 0.0:
            return branch
        mode = self._mode(recorded_cut(branch))
        with nullcontext() if mode is None else seed(mode):
            kept = branch.new_empty(len(branch), *[1] * (branch.dim() - 1)).bernoulli_(1.0 - self.p)
        return branch * kept.div_(1.0 - self.p)

    def _mode(self, recorded: Cut | None = None) -> object | None:
        """Return the mode that draws alike on the ranks that hold parts of the same samples."""
        shared = ParallelMode.DATA if ParallelMode.DATA in get_seeds() else None
        cut = self.cut if recorded is None else Cut(batch=recorded.batch)
        if not cut.batch:
            return shared
        return random_mode(cut, self.mesh, self.tensor_axes, by_token=False) or shared
