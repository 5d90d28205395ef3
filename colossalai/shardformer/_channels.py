"""Convolutions and norms of channels over tensor-parallel ranks: columns and rows along the channels.

A convolution of one group is a linear layer over channels, at every place of an image. So its output channels
are cut as the features of a column layer are, its input channels as those of a row layer, and between the two
a norm that treats each channel by itself needs to know of its own channels only.

Layers keep their identity and their classes, with a class of this file put before their own: padding, strides
and dtypes are handled by their own forward. `in_channels`, `out_channels`, `num_features` and `num_channels`
keep the numbers of the whole layer.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from colossalai.communication import (
    copy_forward_reduce_backward,
    gather_forward_split_backward,
    reduce_forward_copy_backward,
    split_forward_gather_backward,
)
from colossalai.context import Mesh
from colossalai.shardformer._layers import AXIS, cut_param, keep_specs
from colossalai.tensor import SpecKeeper, set_spec, spec_of

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class ConvolutionShard(SpecKeeper):
    """Put before the class of a convolution of which a rank has a part of the channels.

    Shape:
        Input (batch, in, ...), or without the batch, output the same with out. The output of
        `ColumnConvolution` and the input of `RowConvolution` are cut.
    """

    kernel_size: tuple[int, ...]

    @property
    def channel_dim(self) -> int:
        """The dimension of the channels, counted from the end: the batch may be missing."""
        return -1 - len(self.kernel_size)


class ColumnConvolution(ConvolutionShard):
    """A convolution whose output channels are cut; the gradient of its input is summed over the ranks."""

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's channels of the output."""
        y: Tensor = super().forward(copy_forward_reduce_backward(x, self.mesh.axis(AXIS)))
        return y


class HeadConvolution(ColumnConvolution):
    """A column convolution whose output is gathered, and taken by all ranks alike; padding is left out."""

    out_channels: int

    def forward(self, x: Tensor) -> Tensor:
        """Return all channels of the output."""
        whole = gather_forward_split_backward(super().forward(x), self.mesh.axis(AXIS), self.channel_dim)
        return whole.narrow(self.channel_dim, 0, self.out_channels)


class RowConvolution(ConvolutionShard):
    """A convolution whose input channels are cut; the ranks' products are summed, then the bias is added."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    _conv_forward: Callable[[Tensor, Tensor, Tensor | None], Tensor]  # of torch's convolutions

    def forward(self, x: Tensor) -> Tensor:
        """Return the whole output."""
        y = reduce_forward_copy_backward(
            self._conv_forward(x, self.weight, None), self.mesh.axis(AXIS)
        )  # (batch, out, ...)
        if self.bias is None:
            return y
        return y + self.bias.to(y.dtype).view(-1, *[1] * len(self.kernel_size))


class SplitRowConvolution(RowConvolution):
    """A row convolution that is given all channels, by ranks that computed them alike: each takes its own."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the whole output."""
        return super().forward(split_forward_gather_backward(x, self.mesh.axis(AXIS), self.channel_dim))


KINDS: Mapping[str, type[ConvolutionShard]] = {
    "columns": ColumnConvolution,
    "rows": RowConvolution,
    "heads": HeadConvolution,
    "splits": SplitRowConvolution,
}
"""The class of a convolution by the field of a `Rule` that names it."""


class ChannelNormShard(SpecKeeper):
    """Put before the class of a norm of channels: it keeps the specs of its buffers, too.

    The running statistics are slices, as weight and bias are, and a checkpoint has the whole of them by their
    specs. Updates in place leave a buffer the same tensor; where torch makes a new one (`.to`,
    `load_state_dict(assign=True)`), it gets its spec as a parameter does.
    """

    def _give_specs(self) -> None:
        super()._give_specs()
        for name, spec in self._specs.items():
            buffer = self._buffers.get(name)
            if buffer is not None and spec_of(buffer) is None:
                set_spec(buffer, spec)

    def keep_buffers(self) -> None:
        """Keep the specs that buffers carry."""
        self._specs.update({name: spec for name, each in self._buffers.items() if (spec := _spec(each))})


def cut_convolution(layer: nn.Module, field: str, mesh: Mesh, *, num_parts: int) -> None:
    """Let a convolution keep this rank's channels, in place.

    Args:
        layer: The convolution.
        field: The field of a `Rule` that names it, a key of `KINDS`.
        mesh: The ranks.
        num_parts: Of how many equal parts the channels that are cut consist.
    """
    weight = layer.get_parameter("weight")  # (out, in, *kernel)
    cuts_outputs = issubclass(KINDS[field], ColumnConvolution)
    place = 0 if cuts_outputs else 1
    dims = tuple((AXIS,) if dim == place else () for dim in range(weight.dim()))
    parts = tuple(num_parts if dim == place else 1 for dim in range(weight.dim()))
    cut_param(weight, dims, mesh, parts=parts)
    if cuts_outputs and layer.bias is not None:
        cut_param(layer.get_parameter("bias"), ((AXIS,),), mesh, parts=(num_parts,))
    keep_specs(layer, mesh, KINDS[field])


def cut_channel_norm(norm: Any, mesh: Mesh, *, num_parts: int) -> None:
    """Reduce a norm to this rank's channels, in place; `num_parts` as in `cut_convolution`."""
    for tensor in (*norm.parameters(recurse=False), *norm.buffers(recurse=False)):
        if tensor.dim() == 1:  # not the number of batches
            cut_param(tensor, ((AXIS,),), mesh, parts=(num_parts,))
    if isinstance(norm, nn.GroupNorm):
        norm.num_groups //= mesh.axis_size(AXIS)
    keep_specs(norm, mesh, ChannelNormShard)
    norm.keep_buffers()


def reason_against_convolution(layer: nn.Module) -> str:
    """Return why a convolution cannot be cut; empty where it can."""
    own = next(kind for kind in CONVOLUTIONS if isinstance(layer, kind))
    if isinstance(layer, SpecKeeper):
        return "has been cut already"
    if type(layer).forward is not own.forward or layer._parameters.get("weight") is None:
        return f"is a {type(layer).__qualname__} with a forward or a weight of its own making"
    if layer.groups != 1:
        return f"has groups={layer.groups}, whose channels do not see one another: only groups=1 can be cut"
    return ""


def reason_against_norm(norm: nn.Module) -> str:
    """Return the reason why a norm of channels cannot be cut, or is not one; empty if it can be cut."""
    if isinstance(norm, SpecKeeper):
        return "has been cut already"
    if not isinstance(norm, (*BATCH_NORMS, nn.GroupNorm)):
        return (
            f"is a {type(norm).__module__}.{type(norm).__qualname__}, and only torch.nn.BatchNorm1d to "
            "BatchNorm3d and GroupNorm can be cut by channels"
        )
    return ""


def extents_of_norm(norm: Any) -> dict[str, int]:
    """Return the extents of a norm of channels that the ranks have to divide, by their names."""
    if isinstance(norm, nn.GroupNorm):
        return {"channels": norm.num_channels, "groups": norm.num_groups}
    return {"channels": norm.num_features}


def _spec(tensor: Tensor | None) -> Any:
    return None if tensor is None else spec_of(tensor)
