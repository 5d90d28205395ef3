"""Layer normalization, once, over a cut."""

import torch
from torch import nn

from colossalai.communication import copy_forward_reduce_backward, reduce_forward_copy_backward
from colossalai.context import Mesh
from colossalai.nn.layer.tensor_parallel._base import ParallelModule, empty_parameter
from colossalai.nn.layer.tensor_parallel._record import RecordedTensor
from colossalai.nn.layer.tensor_parallel._scheme import Cut


class ParallelLayerNorm(ParallelModule):
    """Normalizes the last dimension (1607.06450) of an activation that may be cut along it.

    If it is cut, mean and variance are two all-reduces over the feature axes of one number for each
    position, and two more in the backward. Statistics are in float32 or better.

    Args:
        normalized_shape: Global size of the last dimension.
        eps: Added to the variance.
        bias: Whether to add a bias.
        dtype: Type of the parameters.
        cut: Cut of the activation.
        mesh: The ranks; default: those of the launched job.

    Shape:
        Input and output (batch, ..., features): slices by `cut`.
    """

    def __init__(
        self,
        normalized_shape: int,
        eps: float = 1e-5,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        *,
        cut: Cut,
        mesh: Mesh | None = None,
    ) -> None:
        super().__init__(mesh)
        self.normalized_shape = normalized_shape
        self.eps = eps
        self.cut = cut
        self._num_features = normalized_shape // self.mesh.axis_size(cut.features)  # of this rank
        self._feature_axes = tuple(map(self.mesh.axis, cut.features))
        ones = nn.init.ones_(empty_parameter(normalized_shape, dtype=dtype))
        self.weight = self.cut_parameter("weight", ones, (cut.features,))
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = self.cut_parameter("bias", torch.zeros_like(ones), (cut.features,))

    def extra_repr(self) -> str:
        """Return the arguments for `print(model)`."""
        return f"{self.normalized_shape}, eps={self.eps}"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's slice of the normalized activation.

        Raises:
            ValueError: The last dimension is not this rank's share of the features, or the layer was built
                for an input that is cut otherwise.
        """
        passage = self.passage
        if passage is not None and (passage.compares or isinstance(x, RecordedTensor)):
            x = passage.enter(x)
        if x.shape[-1] != self._num_features:
            self.check_share(x, self.normalized_shape, self.cut.features, what="features")  # raises
        weight: torch.Tensor = self.weight
        bias: torch.Tensor | None = self.bias
        if self.cut.batch:
            weight = self.shared_over(self.cut.batch, weight)
            bias = None if bias is None else self.shared_over(self.cut.batch, bias)
        if self._num_features == self.normalized_shape:
            y = nn.functional.layer_norm(x, (self.normalized_shape,), weight, bias, self.eps)
        else:
            wide = x.to(torch.promote_types(x.dtype, torch.float32))
            centered = wide - self._mean(wide)
            normal = (centered * torch.rsqrt(self._mean(centered.square()) + self.eps)).to(x.dtype)
            y = normal * weight if bias is None else normal * weight + bias
        return y if passage is None else passage.leave(y)

    def _mean(self, x: torch.Tensor) -> torch.Tensor:
        """Return the mean over all features; every rank uses it for its own features."""
        total = x.sum(-1, keepdim=True)
        for (
            axis
        ) in self._feature_axes:  # one number for each position: summed here, and again in the backward
            total = copy_forward_reduce_backward(reduce_forward_copy_backward(total, axis), axis)
        return total / self.normalized_shape
