"""Dropout of an activation that is cut, or held whole, by the ranks of a tensor-parallel group."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from colossalai.communication import broadcast
from colossalai.context import Mesh, drawing_apart, drawing_by_batch, get_current_mode
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
        cut: Cut of an activation without a record; `Cut()` if it is whole.
    """

    def __init__(self, p: float = 0.5, inplace: bool = False, *, cut: Cut) -> None:
        super().__init__(p, inplace)
        self.cut = cut
        job = launched_job()
        self.mesh, self.tensor_axes = job.mesh, job.tensor_axes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input with elements zeroed and the others scaled up."""
        if not self.training or self.p == 0.0:
            return super().forward(x)
        cut = recorded_cut(x) or self.cut
        if not cut.batch and not cut.features:  # whole on every rank: all draw from the state in force
            return super().forward(x)
        with drawing_by_cut(cut, self.mesh, self.tensor_axes):
            return super().forward(x)


def drawing_by_cut(cut: Cut, mesh: Mesh, tensor_axes: Axes) -> AbstractContextManager[None]:
    """Draw numbers that differ along the axes of a cut, and along other tensor axes agree.

    The state in force agrees along all tensor axes. See [Note: forks of the state in force].

    Args:
        cut: Cut of the activation.
        mesh: The ranks.
        tensor_axes: All tensor axes of the mesh.
    """
    axes = (*cut.batch, *cut.features)
    if not axes or get_current_mode() is None:  # not launched: this process is alone
        return nullcontext()
    if set(axes) == set(tensor_axes):
        return drawing_apart()
    batch_axes = [name for name in ("sp", "pp", "dp") if name in mesh.axes]
    return drawing_apart(*(mesh.axis_rank(name) for name in (*batch_axes, *axes)))


class DropPath(nn.Module):
    """Zeroes whole samples of a residual branch and scales the others up (1603.09382).

    Ranks that hold parts of the same sample agree on it.

    Args:
        p: Probability that a sample is zeroed.
        cut: Cut of an activation without a record; default: the output cut of the layer built before.

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

    def extra_repr(self) -> str:
        """Return the arguments for `print(model)`."""
        return f"p={self.p}"

    def forward(self, branch: torch.Tensor) -> torch.Tensor:
        """Return the branch with samples zeroed, the branch itself in evaluation."""
        if not self.training or self.p == 0.0:
            return branch
        recorded = recorded_cut(branch)
        cut = self.cut if recorded is None else Cut(batch=recorded.batch)
        with drawing_by_cut(cut, self.mesh, self.tensor_axes) if cut.batch else drawing_by_batch():
            kept = branch.new_empty(len(branch), *[1] * (branch.dim() - 1)).bernoulli_(1.0 - self.p)
        if "sp" in self.mesh.batch_axes:
            axis = self.mesh.axis("sp")  # its ranks hold parts of the same samples, and draw apart
            kept = broadcast(kept, axis.ranks[0], axis)
        return branch * kept.div_(1.0 - self.p)
