"""Reference implementation of quantized linear layers, and the parts of any linear layer.

A model with these layers defines the results of a quantized model: it is saved and loaded, checked like any
other, and each faster part is compared with it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from colossalai.communication import all_reduce_in_place, gather_forward_split_backward
from colossalai.context import Axis
from colossalai.inference.products._products import PackedProduct, PlainProduct, Product
from colossalai.inference.products._quantized_products import make_quantized_product, rounded_rows
from colossalai.inference.products._quantized_weight import QuantizedWeight, merged
from colossalai.shardformer import linear_parts


@dataclass(frozen=True)
class ProductParts:
    """Weight, bias and sharding of a linear layer, quantized or not.

    Attributes:
        weight: (out, in), this rank's slice.
        bias: (out,), this rank's slice, or the whole if outputs are summed; None for none.
        dtype: Dtype of inputs and outputs.
        summed_over: Axis of the all-reduce of products, before the bias is added; None for none.
        gathered_over: Axis of the all-gather of outputs; None for none.
        num_outputs: Number of outputs to keep after the all-gather.
    """

    weight: Tensor | QuantizedWeight
    bias: Tensor | None
    dtype: torch.dtype
    summed_over: Axis | None = None
    gathered_over: Axis | None = None
    num_outputs: int = 0

    @property
    def out_features(self) -> int:
        """Number of outputs of the product on this rank."""
        weight = self.weight
        return weight.out_features if isinstance(weight, QuantizedWeight) else len(weight)

    def product(self, *, has_bias: bool = True) -> Product:
        """Return the fastest product for these parts.

        Args:
            has_bias: Whether the product adds the bias.
        """
        return make_product(self.weight, self.bias if has_bias else None, self.dtype)


class QuantizedLinear(nn.Module):
    """A linear layer with a quantized weight.

    Args:
        weight: The weight; its tensors become buffers of the same names.
        bias: (out,), this rank's slice, or the whole if outputs are summed; None for none.
        dtype: Dtype of inputs and outputs.
        summed_over: Axis of the all-reduce of products; None for none.
        gathered_over: Axis of the all-gather of outputs; None for none.
        num_outputs: Number of outputs to keep after the all-gather.
        source: The original layer without memory, whose names are those of new values.
    """

    source: nn.Module | None
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    bias: Tensor | None

    def __init__(
        self,
        weight: QuantizedWeight,
        bias: Tensor | None,
        *,
        dtype: torch.dtype,
        summed_over: Axis | None = None,
        gathered_over: Axis | None = None,
        num_outputs: int = 0,
        source: nn.Module | None = None,
    ) -> None:
        super().__init__()
        object.__setattr__(self, "source", source)  # not a submodule: it has no values
        self.way = weight.way
        self.rounds_rows = weight.way.rounds_rows
        self.dtype = dtype
        self.summed_over, self.gathered_over, self.num_outputs = summed_over, gathered_over, num_outputs
        self.register_buffer("codes", weight.codes)
        self.register_buffer("scales", weight.scales)
        self.register_buffer("zeros", weight.zeros)
        self.register_buffer("bias", bias)

    def load(self, weight: QuantizedWeight, bias: Tensor | None) -> None:
        """Copy other values of the same shapes."""
        self.codes.copy_(weight.codes)
        self.scales.copy_(weight.scales)
        if self.zeros is not None and weight.zeros is not None:
            self.zeros.copy_(weight.zeros)
        if self.bias is not None and bias is not None:
            self.bias.copy_(bias)

    @property
    def weight(self) -> QuantizedWeight:
        """The quantized weight of this rank."""
        return QuantizedWeight(self.way, self.codes, self.scales, self.zeros)

    def forward(self, x: Tensor) -> Tensor:
        """Return the product; (..., in) to (..., out)."""
        rows = rounded_rows(x) if self.rounds_rows else x
        bias = None if self.summed_over is not None else self.bias
        made = functional.linear(rows, self.weight.dequantized(x.dtype), bias)
        if self.summed_over is not None:
            # Sum of the partial products of the tensor-parallel ranks.
            made = all_reduce_in_place(made.contiguous(), self.summed_over)
            made = made if self.bias is None else made.add_(self.bias)
        if self.gathered_over is not None:
            made = gather_forward_split_backward(made, self.gathered_over, -1)[..., : self.num_outputs]
        return made

    def _apply(self, fn: Any, recurse: bool = True) -> "QuantizedLinear":
        """Move to a device; scales keep their dtype under `model.to(dtype)`, as part of the codes."""
        kept = {name: tensor.dtype for name, tensor in self.named_buffers() if name != "bias"}
        super()._apply(fn, recurse)
        for name, dtype in kept.items():
            self._buffers[name] = getattr(self, name).to(dtype)
        return self

    def extra_repr(self) -> str:
        """Return the description for `print(model)`."""
        return f"{self.weight.in_features}, {self.weight.out_features}, {self.way.name}"


@contextmanager
def without_rounded_rows(model: nn.Module) -> Iterator[None]:
    """Disable the rounding of activations in quantized layers, so that small errors stay small.

    With rounding, a change in the last bit can move a value between two codes to the other one.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, QuantizedLinear)]
    for layer in layers:
        layer.rounds_rows = False
    try:
        yield
    finally:
        for layer in layers:
            layer.rounds_rows = layer.way.rounds_rows


def product_parts(layer: nn.Module) -> ProductParts | None:
    """Return the parts of a linear layer, quantized or not; None for another module."""
    if isinstance(layer, QuantizedLinear):
        return ProductParts(
            layer.weight, layer.bias, layer.dtype, layer.summed_over, layer.gathered_over, layer.num_outputs
        )
    parts = linear_parts(layer)
    if parts is None:
        return None
    dtype = parts.weight.dtype
    return ProductParts(
        parts.weight, parts.bias, dtype, parts.summed_over, parts.gathered_over, parts.num_outputs
    )


def merge_parts(parts: "list[ProductParts | None]") -> ProductParts:
    """Merge layers with the same inputs by concatenating their outputs.

    Raises:
        ValueError: `parts` include other modules, differ in kind, or need a collective over ranks.
    """
    each = [part for part in parts if part is not None]
    if len(each) < len(parts) or any(part.summed_over or part.gathered_over for part in each):
        raise ValueError("these are not all linear layers, or ranks complete them together")
    biases = [part.bias for part in each if part.bias is not None]
    if biases and len(biases) < len(each):
        raise ValueError("some of them have a bias")
    bias = torch.cat(biases) if biases else None
    quantized = [part.weight for part in each if isinstance(part.weight, QuantizedWeight)]
    plain = [part.weight for part in each if isinstance(part.weight, Tensor)]
    if quantized and plain:
        raise ValueError("some of them are quantized")
    weight = merged(quantized) if quantized else torch.cat(plain)
    return ProductParts(weight, bias, each[0].dtype)


def make_product(weight: Tensor | QuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> Product:
    """Return the fastest product for a weight on its device.

    Args:
        weight: (out, in), in the dtype of its inputs, or quantized.
        bias: (out,), None for none.
        dtype: Dtype of its inputs.
    """
    if isinstance(weight, QuantizedWeight):
        return make_quantized_product(weight, bias, dtype)
    return PackedProduct(weight, bias) if is_packed(weight.device, dtype) else PlainProduct(weight, bias)


def is_packed(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the fastest product packs a copy of its weight."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:  # processors without AVX-512 have no packed products of this type
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32
