"""The linear layer, once, over a scheme."""

import math

import torch
from torch import nn

from colossalai.context import Mesh
from colossalai.nn.layer.tensor_parallel._base import Initializer, ParallelModule, empty_parameter
from colossalai.nn.layer.tensor_parallel._matmul import ParallelMatmul
from colossalai.nn.layer.tensor_parallel._scheme import LinearScheme
from colossalai.tensor import cut_dims, padded_size, spec_of


class ParallelLinear(ParallelModule):
    """y = x W + b, with x, W, b and y cut along a scheme.

    Weights start from the values that `torch.nn.Linear` starts from under the same random state: every rank
    draws the whole weight and keeps its slice.

    Bytes that a rank sends, forward and backward, for slices of |x|, |w|, |y| bytes over p ranks (q along an
    edge): 1d column 2 (p-1)/p |x|; 1d row 2 (p-1)/p |y|; 2d 3 (q-1) (|x| + |w|); 2.5d the same and 2 (d-1)/d
    |w|; 3d 2 (q-1) (|x| + |w| + |y|); and for the gradient of a bias what its all-reduce over the batch
    takes. Bytes that it keeps for the backward: |x| + |w|, in 3d q (|x| + |w|), which are gathered.

    Args:
        in_features: Global size of the input features.
        out_features: Global size of the output features.
        bias: Whether to add a bias.
        dtype: Type of the parameters.
        scheme: How it is computed; its weight is stored (out, in) as torch does where `weight_is_transposed`.
        mesh: The ranks; default: those of the launched job.
        weight_is_transposed: Whether the weight is stored (out, in).
        in_panels: See `ParallelMatmul`.
        padded: Whether output features that the ranks do not divide are padded, see `PaddedSpec`; what the
            padding would give is minus infinity, which no softmax sees.
        weight_initializer: Fills the whole weight, (out, in); default: as torch.
        bias_initializer: Fills the whole bias; default: as torch.
        weight: The weight of another layer to be shared, such as an embedding's; cut as this layer needs it.

    Shape:
        Input (batch, ..., in), output (batch, ..., out): slices as `scheme.x` and `scheme.y` say.

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
        """Return what `print(model)` shows: the global sizes and this rank's slice."""
        return f"{self.in_features} -> {self.out_features}, weight {tuple(self.weight.shape)}"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's slice of the output.

        Raises:
            ValueError: The last dimension is not this rank's share of the input features.
        """
        y = self._product(x, self._own_bias())
        return y if self.padded_out == self.out_features else self._without_padding(y)

    def forward_apart(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return this rank's slices of the output without the bias, and of the bias, to be added to it."""
        return self._product(x, None), self._own_bias()

    def _own_bias(self) -> torch.Tensor | None:
        axes = self.scheme.y.batch
        return self.shared_over(axes, self.bias) if axes and self.bias is not None else self.bias

    def _product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if x.shape[-1] != self._num_inputs:
            self.check_share(x, self.in_features, self.scheme.x.features, what="features")  # raises
        weight = self.weight.t() if self.weight_is_transposed else self.weight
        return self._matmul(x, weight, bias=bias, in_panels=self.in_panels, num_chunks=self.num_chunks)

    def _without_padding(self, y: torch.Tensor) -> torch.Tensor:
        """Return the output with minus infinity where there is no feature."""
        first = self.mesh.axis_rank_in_order(self.scheme.y.features) * y.shape[-1]
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
