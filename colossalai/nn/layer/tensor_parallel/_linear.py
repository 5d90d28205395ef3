"""The linear layer and its product, once, over a scheme.

[Note: memory kept for the backward]
For slices of |x| and |w| bytes: |x| + |w| where nothing is gathered, and with panels, which are fetched
again; q (|x| + |w|) where operands are gathered whole, as in 3D and with `in_panels=False`. To fetch those
again would take (q-1) (|x| + |w|) more bytes, up to half of the bytes of 3D in forward and backward. If
memory is short, recomputation of the block (`recompute=True`) keeps none of it.
"""

import math
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from colossalai.communication import (
    all_reduce,
    all_reduce_in_place,
    copy_forward_reduce_backward,
    gather_forward_scatter_backward,
    gather_forward_split_backward,
    outside_graphs,
    reduce_forward_copy_backward,
    scatter_forward_gather_backward,
    start_all_reduce,
)
from colossalai.context import Axis, Mesh
from colossalai.nn.layer.tensor_parallel._base import Initializer, ParallelModule, empty_parameter
from colossalai.nn.layer.tensor_parallel._panels import Panels, TransposedPanels
from colossalai.nn.layer.tensor_parallel._record import RecordedTensor
from colossalai.nn.layer.tensor_parallel._scheme import LinearScheme
from colossalai.tensor import cut_dims, padded_size, spec_of


class _Product(torch.autograd.Function):
    """x w + bias where nothing is gathered: the sum of dx travels while dw is computed.

    `copy_x` is the axis along which `x` is the same, so its gradient is summed over it; `copy_w` the same for
    `w`; over `reduce_y` the product is summed.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None,
        copy_x: Axis,
        copy_w: Axis,
        reduce_y: Axis,
        num_chunks: int,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        ctx.copy_x, ctx.copy_w = copy_x, copy_w
        if reduce_y.size == 1:
            return functional.linear(x, w.t(), bias)
        if num_chunks > 1:
            y = _summed_in_chunks(x, w, reduce_y, num_chunks)
        else:
            # All ranks along `reduce_y` add their terms of y; the bias is added once, to the sum.
            y = all_reduce_in_place(functional.linear(x, w.t()), reduce_y)
        return y if bias is None else y.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, w = ctx.saved_tensors
        needs_dx, needs_dw, needs_db, *_ = ctx.needs_input_grad
        dx = dw = db = None
        flat = dy.reshape(-1, dy.shape[-1])
        wait = None
        if needs_dx:
            dx = (flat @ w.t()).view_as(x)
            if ctx.copy_x.size > 1:
                wait = start_all_reduce(dx, ctx.copy_x)  # in flight while dw is computed
        if needs_dw:
            rows = x.reshape(-1, x.shape[-1])
            # In memory as `w` is: a weight that is stored transposed gets its gradient without a copy.
            dw = rows.t() @ flat if w.is_contiguous() else (flat.t() @ rows).t()
            if ctx.copy_w.size > 1:  # the ranks that hold the same weight, for other parts of the batch
                dw = all_reduce(dw, ctx.copy_w)
        if needs_db:
            db = flat.sum(0)
        if wait is not None:
            wait()  # dx is complete here
        return dx, dw, db, None, None, None, None


def _summed_in_chunks(x: torch.Tensor, w: torch.Tensor, axis: Axis, num_chunks: int) -> torch.Tensor:
    """Return x w summed over the ranks; each part of the columns is sent while the next is multiplied."""
    parts, waits = [], []
    for columns in w.chunk(num_chunks, dim=1):
        parts.append(functional.linear(x, columns.t()))
        # In flight while the next columns are multiplied.
        waits.append(start_all_reduce(parts[-1], axis))
    for wait in waits:  # in the order in which all ranks have begun them
        wait()
    return torch.cat(parts, dim=-1)


class ParallelMatmul:
    """The product of an activation and a weight along a scheme, with the axes of the scheme found once.

    Memory kept for the backward: see [Note: memory kept for the backward].

    Args:
        scheme: Cuts of x, w and y, and the collectives.
        mesh: The ranks.
    """

    def __init__(self, scheme: LinearScheme, mesh: Mesh) -> None:
        self.scheme = scheme
        self._moves = bool(scheme.gather_x or scheme.gather_w or scheme.scatter_y)
        if not self._moves:
            taken = (scheme.copy_x, scheme.copy_w, scheme.reduce_y)
            self._copy_x, self._copy_w, self._reduce_y = map(mesh.axis, taken)
            self._is_local = self._copy_x.size == self._copy_w.size == self._reduce_y.size == 1
        names = (*scheme.copy_x, *scheme.copy_w, *scheme.gather_x, *scheme.gather_w)
        if scheme.contracts_in_panels or scheme.yields_in_panels:
            self._panel_axes = tuple(map(mesh.axis, (scheme.gather_x or scheme.scatter_y, scheme.gather_w)))
        self._axes = {name: mesh.axis(name) for name in (*names, *scheme.reduce_y, *scheme.scatter_y)}

    def __call__(
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        in_panels: bool = True,
        num_chunks: int = 1,
    ) -> torch.Tensor:
        """Return this rank's slice of x w, or of x w + bias.

        Args:
            x: Slice of the input, (batch, ..., in).
            w: Slice of the weight, (in, out); a transposed view costs nothing.
            bias: Slice of the bias, whose gradient is this rank's.
            in_panels: If both operands would be gathered along `in`, fetch one panel of each at a time
                instead (see [Note: panels]): less memory, more messages.
            num_chunks: Number of parts of the output features in which a product is computed that is summed
                over ranks, if nothing is gathered: one part is summed while the next is computed.
        """
        if torch.is_autocast_enabled(x.device.type):
            x, w, bias = as_autocast(x), as_autocast(w), None if bias is None else as_autocast(bias)
        if self._moves:
            y = self._moving_product(x, w, in_panels=in_panels)
            return y if bias is None else y + bias
        if self._is_local:
            return functional.linear(x, w.t(), bias)
        axes = (self._copy_x, self._copy_w, self._reduce_y)
        product = outside_graphs(_Product.apply) if torch.compiler.is_compiling() else _Product.apply
        result: torch.Tensor = product(x, w, bias, *axes, num_chunks)
        return result

    def _moving_product(self, x: torch.Tensor, w: torch.Tensor, *, in_panels: bool) -> torch.Tensor:
        """Return the product where slices of an operand or of the result move between the ranks."""
        scheme, axes = self.scheme, self._axes
        for name in scheme.copy_x:
            x = copy_forward_reduce_backward(x, axes[name])
        for name in scheme.copy_w:
            w = copy_forward_reduce_backward(w, axes[name])
        if scheme.contracts_in_panels and in_panels:
            product: torch.Tensor = Panels.apply(x, w, *self._panel_axes)
            return product
        if scheme.yields_in_panels and in_panels:
            transposed: torch.Tensor = TransposedPanels.apply(x, w.t(), *self._panel_axes)
            return transposed
        for name in scheme.gather_x:
            x = gather_forward_scatter_backward(x, axes[name], 0 if name in scheme.x.batch else -1)
        for name in scheme.gather_w:
            w = gather_forward_scatter_backward(w, axes[name], 0 if name in scheme.w_in else 1)
        y = x @ w
        for name in scheme.reduce_y:
            y = reduce_forward_copy_backward(y, axes[name])
        for name in scheme.scatter_y:
            y = scatter_forward_gather_backward(y, axes[name], 0 if name in scheme.y.batch else -1)
        return y


def product(
    x: torch.Tensor,
    w: torch.Tensor,
    scheme: LinearScheme,
    mesh: Mesh,
    *,
    bias: torch.Tensor | None = None,
    in_panels: bool = True,
    num_chunks: int = 1,
) -> torch.Tensor:
    """Return this rank's slice of a product that is computed once; see `ParallelMatmul`."""
    return ParallelMatmul(scheme, mesh)(x, w, bias=bias, in_panels=in_panels, num_chunks=num_chunks)


def as_autocast(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in the type of autocast where it is on: it does not see into our autograd functions."""
    device_type = tensor.device.type
    if not torch.is_autocast_enabled(device_type) or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(device_type))


class ParallelLinear(ParallelModule):
    """y = x W + b, with x, W, b and y cut along a scheme.

    Weights start from the values that `torch.nn.Linear` starts from under the same random state: every rank
    draws the whole weight and keeps its slice.

    Bytes that a rank sends, forward and backward, for slices of |x|, |w|, |y| bytes over p ranks (q along an
    edge): 1d column 2 (p-1)/p |x|; 1d row 2 (p-1)/p |y|; 2d 3 (q-1) (|x| + |w|); 2.5d the same and 2 (d-1)/d
    |w|; 3d 2 (q-1) (|x| + |w| + |y|); and for the gradient of a bias its all-reduce over the batch. Bytes
    that it keeps for the backward: |x| + |w|, in 3d q (|x| + |w|), which are gathered.

    Args:
        in_features: Global size of the input features.
        out_features: Global size of the output features.
        bias: Whether to add a bias.
        dtype: Type of the parameters.
        scheme: Cuts and collectives; its weight is stored (out, in) as in torch if `weight_is_transposed`.
        mesh: The ranks; default: those of the launched job.
        weight_is_transposed: Whether the weight is stored (out, in).
        in_panels: See `ParallelMatmul`.
        padded: Whether output features that the ranks do not divide are padded, see `PaddedSpec`; the output
            for the padding is minus infinity, which a softmax ignores.
        weight_initializer: Fills the whole weight, (out, in); default: as torch.
        bias_initializer: Fills the whole bias; default: as torch.
        weight: The weight of another layer to be shared, such as an embedding's; cut as this layer needs it.

    Shape:
        Input (batch, ..., in), output (batch, ..., out): slices by `scheme.x` and `scheme.y`.

    Raises:
        ValueError: The axes do not divide the features.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        *,
        scheme: LinearScheme,
        mesh: Mesh | None = None,
        weight_is_transposed: bool = False,
        in_panels: bool = True,
        padded: bool = False,
        weight_initializer: Initializer | None = None,
        bias_initializer: Initializer | None = None,
        weight: nn.Parameter | None = None,
    ) -> None:
        super().__init__(mesh)
        self.in_features = in_features
        self.out_features = out_features
        self.scheme = scheme
        self.weight_is_transposed = weight_is_transposed
        self.in_panels = in_panels
        self.num_chunks = 1  # see `ParallelMatmul`
        self.gather_output = False  # whether every rank gets all output features
        self.skip_bias_add = False  # whether `forward` returns the output and the bias
        self._output_rank = self.mesh.axis_rank_in_order(scheme.y.features)
        self._output_axes = tuple(map(self.mesh.axis, scheme.y.features))  # the coarsest cut first
        self._matmul = ParallelMatmul(scheme, self.mesh)
        self._num_inputs = in_features // self.mesh.axis_size(scheme.x.features)  # of this rank
        self.padded_out = out_features
        if padded:
            num_ranks = (self.mesh.axis_size(axes) for axes in (scheme.w_out, scheme.y.features))
            self.padded_out = padded_size(out_features, *num_ranks)
        shape = (self.padded_out, in_features)
        dims: tuple[tuple[str, ...], ...] = (scheme.w_out, scheme.w_in)
        if not weight_is_transposed:
            shape, dims = shape[::-1], dims[::-1]
        if weight is None:
            whole = empty_parameter(out_features, in_features, dtype=dtype)
            (weight_initializer or _torch_initializer)(whole, in_features, out_features)
            stored, order = (whole, None) if weight_is_transposed else (whole.t(), (1, 0))
            self.weight = self.cut_parameter("weight", stored, dims, stored_as=order, padded_shape=shape)
        else:
            self._check_shared(weight, shape, dims)
            self.weight = weight
        self.bias: nn.Parameter | None = None
        if bias:
            whole = empty_parameter(out_features, dtype=dtype)
            (bias_initializer or _torch_bias_initializer)(whole, in_features, out_features)
            cut = (scheme.y.features,)
            self.bias = self.cut_parameter("bias", whole, cut, padded_shape=(self.padded_out,))

    def extra_repr(self) -> str:
        """Return the text for `print(model)`: the global sizes and this rank's slice."""
        return f"{self.in_features} -> {self.out_features}, weight {tuple(self.weight.shape)}"

    def forward(self, x: torch.Tensor) -> Any:
        """Return this rank's slice of the output; with `skip_bias_add` the output and the bias.

        Raises:
            ValueError: The last dimension is not this rank's share of the input features, or the layer was
                built for an input that is cut otherwise.
        """
        passage = self.passage
        if passage is not None and (passage.compares or isinstance(x, RecordedTensor)):
            x = passage.enter(x)
        if x.shape[-1] != self._num_inputs:
            self.check_share(x, self.in_features, self.scheme.x.features, what="features")  # raises
        weight = self.weight.t() if self.weight_is_transposed else self.weight
        bias: torch.Tensor | None = self.bias
        if bias is not None and self.scheme.y.batch:
            bias = self.shared_over(self.scheme.y.batch, bias)
        added = None if self.skip_bias_add else bias
        y = self._matmul(x, weight, bias=added, in_panels=self.in_panels, num_chunks=self.num_chunks)
        if self.padded_out != self.out_features:
            y = self._without_padding(y)
        if self.gather_output:
            y = self._gather(y)
        if passage is not None:
            y = passage.leave(y)
        if not self.skip_bias_add:
            return y
        return y, self._gather(bias) if self.gather_output and bias is not None else bias

    def _gather(self, y: torch.Tensor) -> torch.Tensor:
        """Return all output features, without the padding at their end."""
        for axis in reversed(self._output_axes):
            y = gather_forward_split_backward(y, axis, -1)  # all ranks along it use the result alike
        return y if self.padded_out == self.out_features else y[..., : self.out_features]

    def _without_padding(self, y: torch.Tensor) -> torch.Tensor:
        """Return the output with minus infinity where there is no feature."""
        first = self._output_rank * y.shape[-1]
        features = torch.arange(first, first + y.shape[-1], device=y.device)
        return y.masked_fill(features >= self.out_features, float("-inf"))

    def _check_shared(
        self, weight: nn.Parameter, shape: tuple[int, ...], dims: tuple[tuple[str, ...], ...]
    ) -> None:
        wanted = cut_dims(shape, dims, self.mesh)
        spec = spec_of(weight)
        found = (tuple(weight.shape), ((),) * weight.dim()) if spec is None else (spec.shape, spec.dims)
        features = (self.out_features, self.in_features)
        if found != (wanted.shape, wanted.dims) or (spec is not None and spec.whole_shape != features):
            raise ValueError(
                f"{type(self).__name__} cannot share a weight of global shape "
                f"{found[0] if spec is None else spec.whole_shape} cut as {found[1]}: it needs {features} "
                f"cut as {wanted.dims}"
            )


def _torch_initializer(whole: torch.Tensor, fan_in: int, fan_out: int) -> None:
    nn.init.kaiming_uniform_(whole, a=math.sqrt(5))


def _torch_bias_initializer(whole: torch.Tensor, fan_in: int, fan_out: int) -> None:
    bound = 1 / math.sqrt(fan_in) if fan_in > 0 else 0.0
    nn.init.uniform_(whole, -bound, bound)
