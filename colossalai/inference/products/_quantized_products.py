"""Products with weights in 8 or 4 bits.

[Note: digits of a row]
A row of activations is divided by its largest absolute value and rounded to codes of 8 bits, its first
digits; the remainder, times 254, is rounded to its second digits. Integer products with codes of weights are
exact, so the result of a row depends on that row only. With one digit (`int8`) the error of a row is up to
1/254 of its largest value; with two digits (`int8-weights` in float32) 1/64,516 of it, no more than the
difference between two libraries in float32, by one integer product with twice the rows: on a CPU with integer
instructions this is faster than the product in float32, from the first row on.

[Note: saturation of integer products]
x86 processors without VNNI add two products of 8 bits each in 16 bits, which hold 32,767: 255 * 127 * 2 does
not fit, and the sum saturates silently (a row of ones gave 5 instead of 640). On these processors a code u of
a row is split into two terms, u // 2 and the rest, neither above 128, and 128 * 127 * 2 fits: the same
numbers at twice the rows. One product detects saturation.
"""

import functools
from abc import abstractmethod

import torch
from torch import Tensor
from torch.nn import functional

from colossalai.inference.products._products import Activation, Product, finish, with_rounded_rows
from colossalai.inference.products._quantized_weight import QuantizedWeight
from colossalai.inference.products._row_tables import CodesRowTable, RowTable

_STEPS = 127
_OFFSET = 128  # codes of rows are unsigned for the integer product: 0 is stored as 128
_SECOND = 2 * _STEPS
_LEAST = 1e-30
_ROWS_HINT = 16
# Up to so many rows are multiplied with codes directly. For more, weights are first cast to bfloat16
# (measured).
_CODE_ROWS = 16


def first_digits(x: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows as codes 1..255 around 128, and the same before rounding, around 0.

    Args:
        x: (rows, features).
        largest: (rows, 1) largest absolute value of each row.
    """
    scaled = x * (_STEPS / largest)
    return (scaled + (_OFFSET + 0.5)).to(torch.uint8), scaled


def first_codes(x: Tensor, largest: Tensor) -> Tensor:
    """Return the codes of `first_digits` as float32, for the same arguments."""
    return (x * (_STEPS / largest)).add_(_OFFSET + 0.5).floor_()


# See [Note: saturation of integer products].
@functools.cache
def integer_products_saturate() -> bool:
    """Return whether the integer product of this processor is wrong for large codes."""
    weight = torch.full((_ROWS_HINT, 64), _STEPS, dtype=torch.int8)
    rows = torch.full((_ROWS_HINT, 64), 2 * _OFFSET - 1, dtype=torch.uint8)
    made = multiply_codes(rows, 0, *pack_codes(weight, torch.ones(_ROWS_HINT)), scale=1.0)
    return bool((made != float(64 * (2 * _OFFSET - 1) * _STEPS)).any())


def pack_codes(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return a weight in the form of oneDNN's integer product: codes, scales, zero points.

    Args:
        codes: (out, in) int8.
        scales: (out,) float32.
    """
    packed = torch.ops.onednn.qlinear_prepack(codes.contiguous(), [_ROWS_HINT, codes.shape[1]])
    return packed, scales, torch.zeros(len(codes), dtype=torch.int64)


def multiply_codes(
    rows: Tensor, offset: int, packed: Tensor, scales: Tensor, zeros: Tensor, *, scale: float
) -> Tensor:
    """Return scale * (rows - offset) W^T in float32; rows are uint8, the weight is from `pack_codes`."""
    made: Tensor = torch.ops.onednn.qlinear_pointwise.default(
        rows, scale, offset, packed, scales, zeros, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return made


def largest_of_rows(x: Tensor) -> Tensor:
    """Return (rows, 1): the largest absolute value of each row, but not 0."""
    return x.abs().amax(-1, keepdim=True).clamp_(min=_LEAST)


def rounded_rows(x: Tensor) -> Tensor:
    """Return rows rounded to the first digits of `int8`: the reference implementation."""
    given = x.float()
    largest = largest_of_rows(given)
    codes, _ = first_digits(given, largest)
    return ((codes.float() - _OFFSET) * (largest / _STEPS)).to(x.dtype)


class QuantizedProduct(Product):
    """Abstract: a product with a quantized weight.

    Args:
        weight: The weight.
        bias: (out_features,), None for none.
        dtype: Dtype of its inputs.
    """

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__(weight.out_features, weight.in_features)
        self._dtype = dtype
        self.bias = None if bias is None else bias.detach()
        self._num_bytes = weight.num_bytes

    def __call__(
        self,
        x: Tensor,
        *,
        act: Activation | None = None,
        add: Tensor | None = None,
        mul: Tensor | None = None,
    ) -> Tensor:
        """Return the product; see `Product`."""
        made = self.multiply(x)
        if self.bias is not None:
            made = made.add_(self.bias)
        return finish(made, act, add, mul)

    @abstractmethod
    def multiply(self, x: Tensor) -> Tensor:
        """Return x W^T in new memory; x is (rows, in_features)."""

    @property
    def input_dtype(self) -> torch.dtype:
        """Dtype of x."""
        return self._dtype

    @property
    def num_bytes(self) -> int:
        """Size of the weight and the bias in bytes."""
        return self._num_bytes + (0 if self.bias is None else self.bias.nbytes)


class DequantizingProduct(QuantizedProduct):
    """Product that dequantizes the weight in each call, for any device and dtype."""

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__(weight, bias, dtype)
        self.weight = weight

    def multiply(self, x: Tensor) -> Tensor:
        """Return x W^T."""
        rows = rounded_rows(x) if self.weight.way.rounds_rows else x
        return functional.linear(rows, self.weight.dequantized(x.dtype))


class DigitsProduct(QuantizedProduct):
    """Integer product by oneDNN on CPU, with rows as codes. See [Note: digits of a row].

    Args:
        weight: The weight, in 8 bits.
        bias: (out_features,), None for none.
        dtype: Dtype of its inputs.
        num_digits: 1 or 2.
    """

    def __init__(
        self, weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype, *, num_digits: int
    ) -> None:
        super().__init__(weight, bias, dtype)
        self.num_digits = num_digits
        # One scale, so one rounding: with two, kernels for few and many rows multiply in different orders.
        self._weight = pack_codes(weight.codes, weight.scales / _STEPS)
        self._is_halved = integer_products_saturate()

    def multiply(self, x: Tensor) -> Tensor:
        """Return x W^T."""
        given = x.float()
        largest = largest_of_rows(given)
        if self.row_table is not None and x.shape[0] == 1:
            whole = first_codes(given, largest).sub_(_OFFSET)
            return self.row_table.multiply(whole).mul_(self._weight[1]).mul_(largest).to(x.dtype)
        codes, scaled = first_digits(given, largest)
        if self.num_digits == 1:
            made = self._of_codes(codes).mul_(largest)
        else:
            rest = scaled.sub_(codes).add_(_OFFSET).mul_(_SECOND).add_(_OFFSET + 0.5)
            both = self._of_codes(torch.cat((codes, rest.to(torch.uint8))))
            first, second = both[: x.shape[0]], both[x.shape[0] :]
            # Each operation rounds once, so the result of a row does not depend on its position in vectors.
            made = second.mul_(1 / _SECOND).add_(first).mul_(largest)
        return made.to(x.dtype)

    @property
    def table_dtype(self) -> torch.dtype | None:
        """Dtype of a row table of the weight; None with two digits, which need two rows."""
        return torch.int8 if self.num_digits == 1 else None

    def make_row_table(self) -> RowTable:
        """Build a row table from the unpacked codes."""
        return CodesRowTable(self._weight[0].to_dense().t())

    def _of_codes(self, codes: Tensor) -> Tensor:
        num_rows = codes.shape[0]
        if not self._is_halved:
            made = multiply_codes(with_rounded_rows(codes), _OFFSET, *self._weight, scale=1.0)
            return made if made.shape[0] == num_rows else made[:num_rows]
        # See [Note: saturation of integer products].
        first = codes.bitwise_right_shift(1)
        both = with_rounded_rows(torch.cat((first, codes - first)))
        made = multiply_codes(both, _OFFSET // 2, *self._weight, scale=1.0)
        return made[:num_rows].add_(made[num_rows : 2 * num_rows])


class CodesProduct(QuantizedProduct):
    """Product by torch for bfloat16 with weights in 8 bits."""

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__(weight, bias, dtype)
        self._codes = weight.codes.contiguous()
        self._scales = weight.scales.bfloat16()

    def multiply(self, x: Tensor) -> Tensor:
        """Return x W^T."""
        if x.shape[0] <= _CODE_ROWS:
            return torch._weight_int8pack_mm(x.contiguous(), self._codes, self._scales)
        return functional.linear(x, self._codes.bfloat16()).mul_(self._scales)


class HalfBytesProduct(QuantizedProduct):
    """Product by torch on CPU with packed weights in 4 bits, which multiplies in bfloat16.

    Its error, 0.4 % of a result, is small compared to that of 4 bits. In float32 the same operator takes 30
    times as long as a plain product, so rows of any dtype are rounded to bfloat16.
    """

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__(weight, bias, dtype)
        assert weight.zeros is not None, "4 bits have zero points"
        self._group = weight.way.group
        self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(weight.unpacked().int(), 1)
        pairs = torch.stack((weight.scales, weight.zeros), -1)  # (out, groups, 2)
        self._scales_and_zeros = pairs.transpose(0, 1).contiguous()

    def multiply(self, x: Tensor) -> Tensor:
        """Return x W^T."""
        given = x.to(torch.bfloat16).contiguous()
        made: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
            given, self._packed, self._group, self._scales_and_zeros
        )
        return made.to(x.dtype)


def make_quantized_product(weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> Product:
    """Return the fastest product for a quantized weight on its device.

    Args:
        weight: The weight.
        bias: (out_features,), None for none.
        dtype: Dtype of its inputs.
    """
    is_here = weight.codes.device.type == "cpu" and dtype in (torch.float32, torch.bfloat16)
    has_integers = is_here and torch.backends.mkldnn.is_available()
    if weight.way.bits == 4:
        is_packable = is_here and weight.out_features % 16 == 0
        return (
            HalfBytesProduct(weight, bias, dtype) if is_packable else DequantizingProduct(weight, bias, dtype)
        )
    if weight.way.rounds_rows and has_integers:
        return DigitsProduct(weight, bias, dtype, num_digits=1)
    if not weight.way.rounds_rows and is_here and dtype == torch.bfloat16:
        return CodesProduct(weight, bias, dtype)
    if not weight.way.rounds_rows and has_integers:
        return DigitsProduct(weight, bias, dtype, num_digits=2)
    return DequantizingProduct(weight, bias, dtype)
