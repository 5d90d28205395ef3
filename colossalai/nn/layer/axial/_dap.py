"""Dynamic axial parallelism (DAP, 2203.00854): ranks share the activations of axial layers.

Every rank has all parameters, and 1/p of an activation (batch, rows, columns, dim): a slice of its rows, for
layers that compute along each row, or of its columns. An all-to-all changes one into the other.

[Note: gradients under DAP]
Parameters are averaged over the p ranks, by the data method. Outside of the shared part all ranks compute the
same, so the mean of their gradients is the gradient. Within it each rank has the gradient from its slice, and
the sum over the ranks is the gradient: it is the mean if each rank has p times that. So the gradient of an
activation is multiplied by p where it enters the shared part from behind (`gather`), and divided by p where
it leaves that part (`scatter`, `replicate`). In float16 this takes log2(p) bits of the range of a loss scale.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from colossalai.communication import (
    TensorInFlight,
    all_to_all_forward_all_to_all_backward,
    all_to_all_forward_all_to_all_backward_async,
    copy_forward_reduce_backward,
    gather_forward_scatter_backward_async,
    gather_forward_split_backward,
    slice_of,
    split_forward_gather_backward,
)
from colossalai.context import Axis
from colossalai.nn.layer.tensor_parallel import launched_job
from colossalai.tensor import set_built_for


class DapGroup:
    """The ranks that share the activations of axial layers, and their exchanges.

    With one rank, each method returns its argument. For p ranks and slices of n bytes, an exchange sends
    (p - 1)/p n bytes in each direction, and `gather` (p - 1) n in the forward; `scatter` sends as much in the
    backward, and `replicate` of n bytes 2 (p - 1)/p n.

    Args:
        axis: The ranks. None: this rank has whole activations.

    Attributes:
        size: Number of ranks.
    """

    def __init__(self, axis: Axis | None = None) -> None:
        self._axis = axis
        self.size = 1 if axis is None else axis.size

    def __deepcopy__(self, memo: dict[int, Any]) -> "DapGroup":
        """Return the group itself: nothing of it changes."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the group of the current job where a module that was saved whole is loaded."""
        return dap_group, ()

    @property
    def axis(self) -> Axis:
        """The ranks; there are several."""
        assert self._axis is not None, "with one rank, nothing is communicated"
        return self._axis

    def scatter(self, x: Tensor, dim: int) -> Tensor:
        """Return this rank's slice of a tensor that is equal on all ranks.

        Args:
            x: The tensor; its size along `dim` is a multiple of the number of ranks (see `pad`).
            dim: The dimension to cut.

        Raises:
            ValueError: The size is not such a multiple.
        """
        if self.size == 1:
            return x
        self._check_divides(x, dim)
        scaled: Tensor = _WithScaledGradient.apply(x, 1 / self.size)
        # A copy: in a batch of one, a slice of rows is a view, which would keep the memory of the whole.
        return split_forward_gather_backward(scaled, self.axis, dim).clone()

    def replicate(self, x: Tensor) -> Tensor:
        """Return a tensor that is equal on all ranks, for layers of slices; its gradients are summed."""
        if self.size == 1:
            return x
        scaled: Tensor = _WithScaledGradient.apply(x, 1 / self.size)
        return copy_forward_reduce_backward(scaled, self.axis)

    def gather(self, x: Tensor, dim: int) -> Tensor:
        """Return the whole tensor, equal on all ranks, from slices along `dim`; all ranks go on alike."""
        if self.size == 1:
            return x
        whole: Tensor = _WithScaledGradient.apply(x, self.size)
        return gather_forward_split_backward(whole, self.axis, dim)

    def part(self, whole: Tensor | None, dim: int) -> Tensor | None:
        """Return this rank's slice of a tensor without a gradient, such as a mask; None for None."""
        if whole is None or self.size == 1:
            return whole
        self._check_divides(whole, dim)
        return slice_of(whole, self.axis, dim)

    def to_columns(self, x: Tensor) -> Tensor:
        """Return slices of columns, (batch, rows, columns/p, ...), for slices of rows."""
        return self._exchange(x, split_dim=2, gather_dim=1)

    def to_rows(self, x: Tensor) -> Tensor:
        """Return slices of rows, (batch, rows/p, columns, ...), for slices of columns."""
        return self._exchange(x, split_dim=1, gather_dim=2)

    def to_rows_async(self, x: Tensor) -> TensorInFlight:
        """Start `to_rows`; its `wait` returns the result, and the exchange overlaps with work before that."""
        if self.size == 1:
            return TensorInFlight(x, None)
        self._check_divides(x, 1)
        return all_to_all_forward_all_to_all_backward_async(x, self.axis, split_dim=1, gather_dim=2)

    def whole_async(self, x: Tensor, dim: int) -> TensorInFlight:
        """Start to gather slices that each rank uses in another way; gradients are summed to their slices."""
        if self.size == 1:
            return TensorInFlight(x, None)
        return gather_forward_scatter_backward_async(x, self.axis, dim)

    def pad(self, x: Tensor, dims: tuple[int, ...], value: float = 0) -> Tensor:
        """Return a tensor with more elements along dimensions whose sizes the ranks do not divide.

        Args:
            x: The tensor.
            dims: The dimensions to pad at their ends.
            value: The further elements; -1 for a mask, which layers distinguish from 0.
        """
        missing = [0] * (2 * x.dim())
        for dim in dims:
            missing[2 * (x.dim() - 1 - dim % x.dim()) + 1] = -x.shape[dim] % self.size
        return F.pad(x, missing, value=value) if any(missing) else x

    def _exchange(self, x: Tensor, *, split_dim: int, gather_dim: int) -> Tensor:
        if self.size == 1:
            return x
        self._check_divides(x, split_dim)
        return all_to_all_forward_all_to_all_backward(
            x, self.axis, split_dim=split_dim, gather_dim=gather_dim
        )

    def _check_divides(self, x: Tensor, dim: int) -> None:
        if x.shape[dim] % self.size:
            raise ValueError(
                f"dim {dim} of a tensor of shape {tuple(x.shape)} cannot be cut over {self.size} ranks: pad "
                "it to a multiple, by DapGroup.pad, and mask the padding"
            )


def dap_group() -> DapGroup:
    """Return the ranks that share activations in the launched job; for constructors of modules."""
    job = launched_job()
    return DapGroup(job.mesh.axis("dap") if job.layout.dap > 1 else None)


class AxialModule(nn.Module):
    """A module that works on slices of activations where ranks share them.

    Attributes:
        group: These ranks, of the job in which the module was built.
    """

    def __init__(self) -> None:
        super().__init__()
        self.group = dap_group()
        set_built_for(self, dap=self.group.size)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a module that was saved whole; it belongs to the current job."""
        super().__setstate__(state)
        set_built_for(self, dap=self.group.size)


class _WithScaledGradient(torch.autograd.Function):
    """A view of a tensor, whose gradient is multiplied. See [Note: gradients under DAP]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None
