"""Linear layers whose weight is in codes, computed plainly, and what any linear layer computes with.

A model whose layers are these is the definition of what a quantized model computes: it is saved and loaded,
checked like any other, and each faster part is compared with it.
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
    """What a linear layer computes with, quantized or not, cut or not.

    Attributes:
        weight: (out, in), this rank's slice.
        bias: (out,), this rank's slice, or the whole where outputs are summed; None for none.
        dtype: Of inputs and outputs.
        summed_over: The ranks over which products are summed, before the bias is added; None for none.
        gathered_over: The ranks over which outputs are gathered; None for none.
        num_outputs: Outputs that are left of those then.
    """

    weight: Tensor | QuantizedWeight
    bias: Tensor | None
    dtype: torch.dtype
    summed_over: Axis | None = None
    gathered_over: Axis | None = None
    num_outputs: int = 0

    @property
    def out_features(self) -> int:
        """Outputs of the product on this rank."""
        weight = self.weight
        return weight.out_features if isinstance(weight, QuantizedWeight) else len(weight)

    def product(self, *, has_bias: bool = True) -> Product:
        """Return the fastest product for them.

        Args:
            has_bias: Whether it adds the bias.
        """
        return make_product(self.weight, self.bias if has_bias else None, self.dtype)


class QuantizedLinear(nn.Module):
    """A linear layer with a weight in codes.

    Args:
        weight: The weight; its tensors become buffers, under the names that they have there.
        bias: (out,), this rank's slice, or the whole where outputs are summed; None for none.
        dtype: Of inputs and outputs.
        summed_over: The ranks over which products are summed; None for none.
        gathered_over: The ranks over which outputs are gathered; None for none.
        num_outputs: Outputs that are left of those then.
        source: The layer that it was made of, without memory: new values come by the names of that one.
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
        object.__setattr__(self, "source", source)  # no part of the model: it has no values
        self.way = weight.way
        self.rounds_rows = weight.way.rounds_rows
        self.dtype = dtype
        self.summed_over, self.gathered_over, self.num_outputs = summed_over, gathered_over, num_outputs
        self.register_buffer("codes", weight.codes)
        self.register_buffer("scales", weight.scales)
        self.register_buffer("zeros", weight.zeros)
        self.register_buffer("bias", bias)

    def load(self, weight: QuantizedWeight, bias: Tensor | None) -> None:
        """Take other values of the same shapes."""
        self.codes.copy_(weight.codes)
        self.scales.copy_(weight.scales)
        if self.zeros is not None and weight.zeros is not None:
            self.zeros.copy_(weight.zeros)
        if self.bias is not None and bias is not None:
            self.bias.copy_(bias)

    @property
    def weight(self) -> QuantizedWeight:
        """The weight of this rank."""
        return QuantizedWeight(self.way, self.codes, self.scales, self.zeros)

    def forward(self, x: Tensor) -> Tensor:
        """Return the product; (..., in) to (..., out)."""
        rows = rounded_rows(x) if self.rounds_rows else x
        bias = None if self.summed_over is not None else self.bias
        made = functional.linear(rows, self.weight.dequantized(x.dtype), bias)
        if self.summed_over is not None:
            made = all_reduce_in_place(made.contiguous(), self.summed_over)
            made = made if self.bias is None else made.add_(self.bias)
        if self.gathered_over is not None:
            made = gather_forward_split_backward(made, self.gathered_over, -1)[..., : self.num_outputs]
        return made

    def _apply(self, fn: Any, recurse: bool = True) -> "QuantizedLinear":
        """Move, without giving scales another type with `model.to(dtype)`: they belong to the codes."""
        kept = {name: tensor.dtype for name, tensor in self.named_buffers() if name != "bias"}
        super()._apply(fn, recurse)
        for name, dtype in kept.items():
            self._buffers[name] = getattr(self, name).to(dtype)
        return self

    def extra_repr(self) -> str:
        """Return what `print(model)` shows."""
        return f"{self.weight.in_features}, {self.weight.out_features}, {self.way.name}"


@contextmanager
def without_rounded_rows(model: nn.Module) -> Iterator[None]:
    """Let quantized layers take activations as they are within the block, so that small errors stay small.

    A value between two codes goes to one or the other by a last bit, which other products before it change.
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
    """Return what a linear layer, quantized or not, computes with; None for anything else."""
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
    """Return layers with the same inputs as one, their outputs one behind the other.

    Raises:
        ValueError: `parts` are not all of linear layers of one kind, or ranks complete them together.
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
    """Return the fastest product for a weight, where it is.

    Args:
        weight: (out, in), of the type of its inputs, or in codes.
        bias: (out,), None for none.
        dtype: Of its inputs.
    """
    if isinstance(weight, QuantizedWeight):
        return make_quantized_product(weight, bias, dtype)
    return PackedProduct(weight, bias) if is_packed(weight.device, dtype) else PlainProduct(weight, bias)


def is_packed(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the fastest product there packs its weight, and so keeps nothing of the given one."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:  # processors without AVX-512 have no packed products of this type
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32
