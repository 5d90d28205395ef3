"""Stochastic depth: a residual branch that some samples do without."""

from contextlib import nullcontext

import torch
from torch import nn

from colossalai.context import ParallelMode, get_seeds, global_context, seed
from colossalai.nn.layer._dropout import random_mode
from colossalai.nn.layer._flow import current_cut
from colossalai.nn.layer._record import recorded_cut
from colossalai.nn.layer._scheme import Cut


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
        self.cut = Cut(batch=(cut or current_cut(global_context.tensor_mode)).batch)
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
        return (random_mode(cut) if cut.batch else None) or shared
