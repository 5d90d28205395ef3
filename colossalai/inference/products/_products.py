"""Products of activations with weights that stay as they are, and are packed once for it.

A product may apply an activation function to its result, add a residual to it, or multiply it by a gate: what
a step writes and reads again is as much of its time as the arithmetic where there are few tokens.

[Note: a kernel for each number of rows]
oneDNN compiles a kernel for each number of rows, 0.5 MiB and half a millisecond, and keeps 1,024 of them.
Steps have any number of tokens, so a server would grow by 600 MiB in its first hours. So the number of rows
is rounded up to one of 8 between two powers of two: by an eighth at most, and up to 16 rows not at all.

[Note: one row may take longer than four]
A product with one or two rows does nothing but read the weight, and on some processors oneDNN's kernel for
four rows reads it faster (`benchmarks/packed_rows.py`). So it is measured, once for a type: packed weights
that no cache holds are multiplied by one row and by four. Where a product has a row table, one row goes there
([Note: one row as a sum of rows]).
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import cache
from typing import Literal, Self

import torch
from torch import Tensor
from torch.nn import functional

from colossalai.inference.products._row_tables import FloatRowTable, RowTable

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]

_FUNCTIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
}
# Names of oneDNN, and of the way in which it computes them.
_ONEDNN_NAMES = {
    None: ("none", ""),
    "silu": ("swish", ""),
    "gelu": ("gelu", "none"),
    "gelu_tanh": ("gelu", "tanh"),
    "relu": ("relu", ""),
}
# Rows for which oneDNN lays weights out. With this one it is as fast for one row, or for 512, as with others.
_ROWS_HINT = 16
_NUM_SIZES_BITS = 3  # of the numbers of rows between two powers of two


# See [Note: one row may take longer than four].
_MANY_ROWS = 4
_MEASURED_SIZE = (1024, 2048)  # features of outputs and of inputs
_MEASURED_BYTES = 1 << 26
_MEASURED_ROUNDS = 7
_WORTHWHILE = 0.95  # of the time of one row


@cache
@torch.inference_mode()
def fewest_rows(dtype: torch.dtype) -> int:
    """Return to how many rows a product of one or two is filled up here: 1, none, or 4."""
    if not torch.backends.mkldnn.is_available():
        return 1
    plain = torch.ones(_MEASURED_SIZE, dtype=dtype)
    weights = [
        torch.ops.mkldnn._reorder_linear_weight(plain, _ROWS_HINT)
        for _ in range(_MEASURED_BYTES // plain.nbytes)
    ]
    seconds: dict[int, list[float]] = {1: [], _MANY_ROWS: []}
    for number in range(_MEASURED_ROUNDS + 1):  # the first one compiles kernels
        for num_rows, found in seconds.items():
            x = torch.ones(num_rows, plain.shape[1], dtype=dtype)
            began = time.thread_time()
            for weight in weights:
                torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
            if number:
                found.append(time.thread_time() - began)
    one, many = (min(found) for found in seconds.values())  # what disturbs only adds
    return _MANY_ROWS if many < _WORTHWHILE * one else 1


class Product(ABC):
    """y = x W^T + b, and what is done with y before it is written.

    Attributes:
        out_features: Features of y.
        in_features: Features of x.
        row_table: What a single row is multiplied with; None for the same as other rows.
    """

    row_table: RowTable | None

    def __init__(self, out_features: int, in_features: int) -> None:
        self.out_features = out_features
        self.in_features = in_features
        self.row_table = None

    @abstractmethod
    def __call__(
        self,
        x: Tensor,
        *,
        act: Activation | None = None,
        add: Tensor | None = None,
        mul: Tensor | None = None,
    ) -> Tensor:
        """Return the product; at most one of the three is given.

        Args:
            x: (tokens, in_features).
            act: Is applied to it.
            add: (tokens, out_features), is added to it.
            mul: The same shape, multiplies it.
        """

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Bytes of the weight and what belongs to it, without a row table."""

    @property
    @abstractmethod
    def input_dtype(self) -> torch.dtype:
        """Type of x."""

    @property
    def table_dtype(self) -> torch.dtype | None:
        """Type of a row table of the weight, int8 for codes; None where there can be none."""
        return None

    def make_row_table(self) -> RowTable:
        """Return a row table of the weight; only where `table_dtype` is not None."""
        raise NotImplementedError

    def in_place_of(self, old: "Product") -> Self:
        """Return this product, with a row table if the one that it replaces has one; that one loses it."""
        had_table, old.row_table = old.row_table is not None, None  # two of them are never there at once
        self.row_table = self.make_row_table() if had_table else None
        return self


class PlainProduct(Product):
    """The product of torch, on any device and in any type.

    Args:
        weight: (out_features, in_features).
        bias: (out_features,), None for none.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(*weight.shape)
        self.weight = weight.detach()
        self.bias = None if bias is None else bias.detach()

    def __call__(
        self,
        x: Tensor,
        *,
        act: Activation | None = None,
        add: Tensor | None = None,
        mul: Tensor | None = None,
    ) -> Tensor:
        """Return the product; see `Product`."""
        return finish(functional.linear(x, self.weight, self.bias), act, add, mul)

    @property
    def input_dtype(self) -> torch.dtype:
        """Type of x."""
        return self.weight.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of the weight and the bias."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


class PackedProduct(Product):
    """The product of oneDNN on CPU, with a weight in the layout that it reads fastest.

    Args:
        weight: (out_features, in_features), float32 or bfloat16; its memory is not kept.
        bias: (out_features,), None for none.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(*weight.shape)
        self.bias = None if bias is None else bias.detach()
        self._num_bytes = weight.nbytes
        self._dtype = weight.dtype
        self._fewest_rows = fewest_rows(weight.dtype)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), _ROWS_HINT)
        self._multiply = torch.ops.mkldnn._linear_pointwise.default
        self._multiply_and = torch.ops.mkldnn._linear_pointwise.binary

    def __call__(
        self,
        x: Tensor,
        *,
        act: Activation | None = None,
        add: Tensor | None = None,
        mul: Tensor | None = None,
    ) -> Tensor:
        """Return the product; see `Product`."""
        made: Tensor
        if self.row_table is not None and x.shape[0] == 1:
            made = self.row_table.multiply(x)
            return finish(made if self.bias is None else made.add_(self.bias), act, add, mul)
        num_rows, fewest = x.shape[0], self._fewest_rows
        x = with_rounded_rows(x, fewest)
        if add is not None:
            made = self._multiply_and(x, with_rounded_rows(add, fewest), self._packed, self.bias, "add")
        elif mul is not None:
            made = self._multiply_and(x, with_rounded_rows(mul, fewest), self._packed, self.bias, "mul")
        else:
            name, way = _ONEDNN_NAMES[act]
            made = self._multiply(x, self._packed, self.bias, name, [], way)
        return made if num_rows == made.shape[0] else made[:num_rows]

    @property
    def input_dtype(self) -> torch.dtype:
        """Type of x."""
        return self._dtype

    @property
    def table_dtype(self) -> torch.dtype | None:
        """Type of a row table of the weight."""
        return self._dtype

    def make_row_table(self) -> RowTable:
        """Return a row table of the weight, which is unpacked for it."""
        return FloatRowTable(self._packed.to_dense())

    @property
    def num_bytes(self) -> int:
        """Bytes of the weight and the bias."""
        return self._num_bytes + (0 if self.bias is None else self.bias.nbytes)


# See [Note: a kernel for each number of rows].
def with_rounded_rows(x: Tensor, fewest: int = 1) -> Tensor:
    """Return x with further rows below it, up to one of few numbers of rows.

    Args:
        x: (rows, features).
        fewest: Least number of rows.
    """
    num_rows = x.shape[0]  # len(x) goes through Python, in every product of every step
    if 0 < num_rows < fewest:
        # What stands in the further rows does not matter; a copy of x is a third of the cost of zeros.
        return torch.cat((x,) * -(-fewest // num_rows))[:fewest]
    missing = -num_rows % (1 << max(0, (num_rows - 1).bit_length() - _NUM_SIZES_BITS - 1))
    return functional.pad(x, (0, 0, 0, missing)) if missing else x


def finish(made: Tensor, act: Activation | None, add: Tensor | None, mul: Tensor | None) -> Tensor:
    """Apply to a product what `Product` says."""
    if act is not None:
        activated: Tensor = _FUNCTIONS[act](made)
        return activated
    if add is not None:
        return made.add_(add)
    return made if mul is None else made.mul_(mul)


class GatedPair:
    """act(x G^T) * (x U^T), of two products, or of one that has the outputs of both.

    Args:
        products: G and U, or both of them as one, G first.
        activation: What is applied to the first.
    """

    def __init__(self, products: tuple[Product, ...], activation: Activation) -> None:
        self.products = products
        self.activation: Activation = activation

    def __call__(self, x: Tensor) -> Tensor:
        """Return (tokens, inner); x is (tokens, features)."""
        first, *second = self.products
        if second:
            return second[0](x, mul=first(x, act=self.activation))
        return self.joined(*self.apart(x))

    def apart(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return x G^T and x U^T."""
        first, *second = self.products
        if second:
            return first(x), second[0](x)
        gate, up = first(x).chunk(2, -1)
        return gate, up

    def in_place_of(self, old: "GatedPair") -> Self:
        """Return this pair, with row tables where the one that it replaces has some."""
        for new_product, old_product in zip(self.products, old.products, strict=True):
            new_product.in_place_of(old_product)
        return self

    def joined(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return act(gate) * up."""
        return _FUNCTIONS[self.activation](gate).mul_(up)
