"""The linear layer, once, over a scheme."""

import math

import torch
from torch import nn

from colossalai.context import Mesh
from colossalai.nn.layer._base import Initializer, ParallelModule, empty_parameter
from colossalai.nn.layer._product import product
from colossalai.nn.layer._scheme import LinearScheme
from colossalai.tensor import cut_dims, spec_of


class ParallelLinear(ParallelModule):
    """y = x W + b, with x, W, b and y cut along a scheme.

    Weights start from the values that `torch.nn.Linear` starts from under the same random state: every rank
    draws the whole weight and keeps its slice.

    Bytes that a rank sends, forward and backward, for slices of |x|, |w|, |y| bytes over p ranks (q along an
    edge): 1d column 2 (p-1)/p |x|; 1d row 2 (p-1)/p |y|; 2d 3 (q-1) (|x| + |w|); 2.5d the same and 2 (d-1)/d
    |w|; 3d 2 (q-1) (|x| + |w| + |y|); and for the gradient of a bias what its all-reduce over the batch
    takes.

    Args:
        in_features: Global size of the input features.
        out_features: Global size of the output features.
        bias: Whether to add a bias.
        dtype: Type of the parameters.
        scheme: How it is computed; its weight is stored (out, in) as torch does where `weight_is_transposed`.
        mesh: The ranks; default: those of the launched job.
        weight_is_transposed: Whether the weight is stored (out, in).
        in_panels: See `product`.
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
        dims: tuple[tuple[str, ...], ...] = (scheme.w_out, scheme.w_in)
        if not weight_is_transposed:
            dims = dims[::-1]
        if weight is None:
            whole = empty_parameter(out_features, in_features, dtype=dtype)
            (weight_initializer or _torch_initializer)(whole, in_features, out_features)
            stored, order = (whole, None) if weight_is_transposed else (whole.t(), (1, 0))
            self.weight = self.cut_parameter("weight", stored, dims, stored_as=order)
        else:
            self._check_shared(weight, dims)
            self.weight = weight
        self.bias: nn.Parameter | None = None
        if bias:
            whole = empty_parameter(out_features, dtype=dtype)
            (bias_initializer or _torch_bias_initializer)(whole, in_features, out_features)
            self.bias = self.cut_parameter("bias", whole, (scheme.y.features,))

    def extra_repr(self) -> str:
        """Return what `print(model)` shows: the global sizes and this rank's slice."""
        return f"{self.in_features} -> {self.out_features}, weight {tuple(self.weight.shape)}"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's slice of the output.

        Raises:
            ValueError: The last dimension is not this rank's share of the input features.
        """
        self.check_share(x, self.in_features, self.scheme.x.features, what="features")
        weight = self.weight.t() if self.weight_is_transposed else self.weight
        bias = None if self.bias is None else self.shared_over(self.scheme.y.batch, self.bias)
        return product(x, weight, self.scheme, self.mesh, bias=bias, in_panels=self.in_panels)

    def _check_shared(self, weight: nn.Parameter, dims: tuple[tuple[str, ...], ...]) -> None:
        shape = (self.out_features, self.in_features)
        wanted = cut_dims(shape if self.weight_is_transposed else shape[::-1], dims, self.mesh)
        spec = spec_of(weight)
        found = (tuple(weight.shape), ((),) * weight.dim()) if spec is None else (spec.shape, spec.dims)
        if found != (wanted.shape, wanted.dims):
            raise ValueError(
                f"{type(self).__name__} cannot share a weight of global shape {found[0]} cut as {found[1]}: "
                f"it needs {wanted.shape} cut as {wanted.dims}"
            )


def _torch_initializer(whole: torch.Tensor, fan_in: int, fan_out: int) -> None:
    nn.init.kaiming_uniform_(whole, a=math.sqrt(5))


def _torch_bias_initializer(whole: torch.Tensor, fan_in: int, fan_out: int) -> None:
    bound = 1 / math.sqrt(fan_in) if fan_in > 0 else 0.0
    nn.init.uniform_(whole, -bound, bound)
