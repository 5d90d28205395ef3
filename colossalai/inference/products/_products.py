"""Products of activations with constant weights, which are packed once.

A product can fuse an activation function, the addition of a residual, or the multiplication by a gate: with
few tokens, writing and reading intermediate results takes as much time as the arithmetic.

[Note: a kernel for each number of rows]
oneDNN compiles a kernel for each number of rows, 0.5 MiB and half a millisecond, and caches 1,024 of them.
Steps have any number of tokens, so a server would grow by 600 MiB in its first hours. So the number of rows
is rounded up to one of 8 values between two powers of two: by an eighth at most, and up to 16 rows not at
all.

[Note: time of one row]
A product with one or two rows is bound by reading the weight, and on some processors oneDNN's kernel for four
rows reads it faster (`benchmarks/packed_rows.py`). So this is measured once for each dtype: packed weights
larger than the caches are multiplied by one row and by four. A product with a row table uses it for one row
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
# Names of oneDNN, with its algorithm.
_ONEDNN_NAMES = {
    None: ("none", ""),
    "silu": ("swish", ""),
    "gelu": ("gelu", "none"),
    "gelu_tanh": ("gelu", "tanh"),
    "relu": ("relu", ""),
}
# Number of rows of oneDNN's weight layout. This one is as fast as others, both for one row and for 512.
_ROWS_HINT = 16
_NUM_SIZES_BITS = 3  # log2 of the allowed numbers of rows between two powers of two


# See [Note: time of one row].
_MANY_ROWS = 4
_MEASURED_SIZE = (1024, 2048)  # features of outputs and of inputs
_MEASURED_BYTES = 1 << 26
_MEASURED_ROUNDS = 7
_WORTHWHILE = 0.95  # of the time of one row


@cache
@torch.inference_mode()
def fewest_rows(dtype: torch.dtype) -> int:
    """Return the number of rows that a product of one or two is padded to on this machine: 1 (none) or 4."""
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
    one, many = (min(found) for found in seconds.values())  # disturbances only add time
    return _MANY_ROWS if many < _WORTHWHILE * one else 1


class Product(ABC):
    """Abstract: y = x W^T + b, with an optional fused operation on y.

    Attributes:
        out_features: Number of features of y.
        in_features: Number of features of x.
        row_table: Row table for single rows; None to treat them like other rows.
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
        """Return the product; at most one of `act`, `add` and `mul` may be given.

        Args:
            x: (tokens, in_features).
            act: Activation of the product.
            add: (tokens, out_features), added to the product.
            mul: The same shape, multiplied with the product.
        """

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Size of the weight with its bias and scales in bytes, without a row table."""

    @property
    @abstractmethod
    def input_dtype(self) -> torch.dtype:
        """Dtype of x."""

    @property
    def table_dtype(self) -> torch.dtype | None:
        """Dtype of a row table of the weight, int8 for codes; None if not supported."""
        return None

    def make_row_table(self) -> RowTable:
        """Build a row table of the weight; requires a `table_dtype`."""
        raise NotImplementedError

    def in_place_of(self, old: "Product") -> Self:
        """Take over the role of `old`, including its use of a row table, which `old` loses."""
        had_table, old.row_table = old.row_table is not None, None  # frees the old table before a new one
        self.row_table = self.make_row_table() if had_table else None
        return self


class PlainProduct(Product):
    """Product by torch, for any device and dtype.

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
        """Dtype of x."""
        return self.weight.dtype

    @property
    def num_bytes(self) -> int:
        """Size of the weight and the bias in bytes."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


class PackedProduct(Product):
    """Product by oneDNN on CPU, with a packed weight.

    Args:
        weight: (out_features, in_features), float32 or bfloat16; the packed weight is a copy.
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
        """Dtype of x."""
        return self._dtype

    @property
    def table_dtype(self) -> torch.dtype | None:
        """Dtype of a row table of the weight."""
        return self._dtype

    def make_row_table(self) -> RowTable:
        """Build a row table from the unpacked weight."""
        return FloatRowTable(self._packed.to_dense())

    @property
    def num_bytes(self) -> int:
        """Size of the weight and the bias in bytes."""
        return self._num_bytes + (0 if self.bias is None else self.bias.nbytes)


# See [Note: a kernel for each number of rows].
def with_rounded_rows(x: Tensor, fewest: int = 1) -> Tensor:
    """Pad x with rows, up to an allowed number of rows.

    Args:
        x: (rows, features).
        fewest: Minimum number of rows.
    """
    num_rows = x.shape[0]  # len(x) goes through Python, in every product of every step
    if 0 < num_rows < fewest:
        # The values of padding rows do not matter; a copy of x takes a third of the time of zeros.
        return torch.cat((x,) * -(-fewest // num_rows))[:fewest]
    missing = -num_rows % (1 << max(0, (num_rows - 1).bit_length() - _NUM_SIZES_BITS - 1))
    return functional.pad(x, (0, 0, 0, missing)) if missing else x


def finish(made: Tensor, act: Activation | None, add: Tensor | None, mul: Tensor | None) -> Tensor:
    """Apply the optional operation of a `Product` to its result, in place if possible."""
    if act is not None:
        activated: Tensor = _FUNCTIONS[act](made)
        return activated
    if add is not None:
        return made.add_(add)
    return made if mul is None else made.mul_(mul)


class GatedPair:
    """act(x G^T) * (x U^T), by two products, or by one with the outputs of both.

    Args:
        products: G and U, or both as one, G first.
        activation: Activation of the first.
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
        """Take over the role of `old`, including the use of row tables."""
        for new_product, old_product in zip(self.products, old.products, strict=True):
            new_product.in_place_of(old_product)
        return self

    def joined(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return act(gate) * up."""
        return _FUNCTIONS[self.activation](gate).mul_(up)
