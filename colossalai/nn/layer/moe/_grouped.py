"""A linear layer for each group of rows: the products of a rank's experts.

Rows x (R, in) come sorted by expert, n_e of them for expert e, whose matrix is W_e:

    y_e = x_e W_e^T + b_e        dx_e = dy_e W_e        dW_e = dy_e^T x_e        db_e = sum of rows of dy_e

[Note: products of groups]
Many groups go to `torch.nn.functional.grouped_mm` in one call, which on CPU multiplies one after the other,
without a call from Python for each: with 256 small experts that is a third of the time. It requires rows at
multiples of 16 bytes, does not support float64, and takes time for groups without rows. So if it does not
apply, or on CPU up to 16 groups have rows, each of those is multiplied by a call of its own, into
its part of the result. On CPU, half-precision operands are multiplied in float32 where that is faster: all of
float16, and bfloat16 where products are small. The sums are then the same, and rounded at the end.
`docs/design/moe.md` has the figures.

[Note: groups of few sizes]
For each number of rows that it has not met, oneDNN makes a kernel of bfloat16, which takes longer than many a
product, and routing brings ever new numbers. So each group is multiplied as one of the next larger of few
sizes, eight for each power of two. Rows of the result beyond its end belong to later groups, which write them
after it; where rows are summed over, it is copied and zeros are put behind it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from colossalai.nn.layer.tensor_parallel import as_autocast

_ALIGNMENT = 16  # bytes, of rows in memory
_GROUPED = (torch.float32, torch.bfloat16, torch.float16)
_FEW = 16  # groups with rows, up to which calls from Python cost no more than groups without rows
# On CPU a product in bfloat16 takes at least 20 us, and more for a number of rows not met before, for which
# oneDNN makes a kernel. Up to so many multiplications in the mean group, float32 is the faster one.
_SMALL = 1 << 19


def grouped_linear(
    rows: Tensor,
    weight: Tensor,
    sizes: Sequence[int],
    *,
    bias: Tensor | None = None,
    transposed: bool = False,
) -> Tensor:
    """Apply the matrix of each expert to its rows.

    Differentiable once in `rows`, `weight` and `bias`; a second derivative raises torch's own error. The
    gradient of the weight is one tensor, with zeros for an expert without rows, also if no expert has any.
    Under autocast operands are cast as by `torch.nn.functional.linear`.

    Args:
        rows: (R, in), sorted by expert.
        weight: (experts, out, in).
        sizes: Number of rows of each expert; their sum is R.
        bias: (experts, out), or None.
        transposed: Whether `weight` is (experts, in, out).

    Returns:
        (R, out), of the type of the operands.

    Raises:
        ValueError: `sizes` do not fit `rows` or `weight`, shapes do not fit each other, or types differ.
    """
    rows, weight = as_autocast(rows), as_autocast(weight)
    bias = None if bias is None else as_autocast(bias)
    _require_fitting(rows, weight, sizes, bias, transposed=transposed)
    result: Tensor = _GroupedLinear.apply(rows, weight, bias, _Groups.of(sizes, rows, weight), transposed)
    return result


def _require_fitting(
    rows: Tensor, weight: Tensor, sizes: Sequence[int], bias: Tensor | None, *, transposed: bool
) -> None:
    names = "(experts, in, out)" if transposed else "(experts, out, in)"
    if rows.dim() != 2 or weight.dim() != 3 or rows.shape[1] != weight.shape[1 if transposed else 2]:
        raise ValueError(
            f"rows of shape {tuple(rows.shape)} and a weight of shape {tuple(weight.shape)} do not fit: they "
            f"must be (rows, in) and {names}"
        )
    if len(sizes) != len(weight) or sum(sizes) != len(rows) or min(sizes, default=0) < 0:
        raise ValueError(
            f"{len(sizes)} sizes with the sum {sum(sizes)} for {len(weight)} experts and {len(rows)} rows: "
            "give each expert the number of its rows, which add up to all of them"
        )
    num_out = weight.shape[2 if transposed else 1]
    if bias is not None and bias.shape != (len(weight), num_out):
        raise ValueError(
            f"a bias of shape {tuple(bias.shape)}; with this weight it must be {(len(weight), num_out)}"
        )
    for operand, name in ((weight, "weight"), (bias, "bias")):
        if operand is not None and operand.dtype != rows.dtype:
            raise ValueError(
                f"rows of type {rows.dtype} and a {name} of type {operand.dtype}: cast one of them, or "
                "compute under autocast"
            )


@dataclass(frozen=True)
class _Groups:
    """Offsets of groups of rows, and the way to multiply them; see [Note: products of groups].

    Attributes:
        ends: The end of each group, as `grouped_mm` wants it.
        busy: Number, start and end of each group with rows.
        dtype: The type to multiply in.
        in_one_call: Whether `grouped_mm` is wanted, where widths allow it.
        few_sizes: Whether groups are multiplied as ones of few sizes.
    """

    ends: list[int]
    busy: list[tuple[int, int, int]]
    dtype: torch.dtype
    in_one_call: bool
    few_sizes: bool

    @classmethod
    def of(cls, sizes: Sequence[int], rows: Tensor, weight: Tensor) -> "_Groups":
        """Return the groups of some sizes, for these operands."""
        ends = list(accumulate(sizes))
        busy = [
            (number, end - size, end)
            for number, (size, end) in enumerate(zip(sizes, ends, strict=True))
            if size
        ]
        if rows.device.type != "cpu":
            return cls(ends, busy, rows.dtype, in_one_call=True, few_sizes=False)
        is_small = len(rows) * weight.shape[1] * weight.shape[2] <= len(busy) * _SMALL
        is_wider = rows.dtype == torch.float16 or (rows.dtype == torch.bfloat16 and is_small)
        # Large matrices are cast one at a time: a copy of all would take memory.
        in_one_call = len(busy) > _FEW and (is_small or not is_wider)
        dtype = torch.float32 if is_wider else rows.dtype
        return cls(ends, busy, dtype, in_one_call, few_sizes=dtype == torch.bfloat16)

    def rounded(self, size: int) -> int:
        """Return as how many rows to multiply those of a group; see [Note: groups of few sizes]."""
        if not self.few_sizes:
            return size
        zeros = max(size.bit_length() - 4, 0)
        return -(-size >> zeros << zeros)

    def takes_grouped(self, left: Tensor, right: Tensor) -> bool:
        """Return whether `grouped_mm` multiplies these, into a result without gaps."""
        width = right.shape[-1] * right.element_size()
        fits = self.in_one_call and left.numel() > 0 and width % _ALIGNMENT == 0
        return fits and _is_aligned(left) and _is_aligned(right)


class _GroupedLinear(torch.autograd.Function):
    """Keeps the rows if the weight needs a gradient, and the weight if the rows do."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, groups: _Groups, transposed: bool
    ) -> Tensor:
        needs_rows, needs_weight, *_ = ctx.needs_input_grad
        ctx.save_for_backward(rows if needs_weight else None, weight if needs_rows else None)
        ctx.groups, ctx.transposed = groups, transposed
        y = _rows_times(rows, weight if transposed else weight.mT, groups)
        if bias is not None:
            for number, start, end in groups.busy:
                y[start:end] += bias[number]
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        groups: _Groups = ctx.groups
        needs_rows, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        dy = dy.contiguous()
        drows = dweight = dbias = None
        if needs_bias:
            dbias = dy.new_zeros(len(groups.ends), dy.shape[1])
            for number, start, end in groups.busy:
                torch.sum(dy[start:end], 0, out=dbias[number])
        if needs_rows:
            drows = _rows_times(dy, weight.mT if ctx.transposed else weight, groups)
        if needs_weight:
            left, right = (rows, dy) if ctx.transposed else (dy, rows)
            dweight = _columns_times(left, right, groups)
        return drows, dweight, dbias, None, None


def _rows_times(rows: Tensor, matrices: Tensor, groups: _Groups) -> Tensor:
    """Return the rows of each group times its matrix: (R, k) and (groups, k, n) make (R, n)."""
    if groups.takes_grouped(rows, matrices):
        ends = torch.tensor(groups.ends, dtype=torch.int32, device=rows.device)
        product = functional.grouped_mm(rows.to(groups.dtype), matrices.to(groups.dtype), offs=ends)
        return product.to(rows.dtype)
    result = rows.new_empty(len(rows), matrices.shape[2])
    for number, start, end in groups.busy:
        stop = start + groups.rounded(end - start)  # beyond the last row, slices end with it
        _multiply(rows[start:stop], matrices[number], groups.dtype, out=result[start:stop])
    return result


def _columns_times(left: Tensor, right: Tensor, groups: _Groups) -> Tensor:
    """Return left^T right of each group: (R, m) and (R, n) make (groups, m, n), zeros for an empty group."""
    columns = left.t()
    if groups.takes_grouped(columns, right):
        ends = torch.tensor(groups.ends, dtype=torch.int32, device=left.device)
        product = functional.grouped_mm(columns.to(groups.dtype), right.to(groups.dtype), offs=ends)
        return product.to(left.dtype)
    num_groups = len(groups.ends)
    make = left.new_empty if len(groups.busy) == num_groups else left.new_zeros
    result = make(num_groups, left.shape[1], right.shape[1])
    for number, start, end in groups.busy:
        part, others = left[start:end], right[start:end]
        if missing := groups.rounded(end - start) - (end - start):
            part, others = (functional.pad(each, (0, 0, 0, missing)) for each in (part, others))
        _multiply(part.t(), others, groups.dtype, out=result[number])
    return result


def _multiply(left: Tensor, right: Tensor, dtype: torch.dtype, *, out: Tensor) -> None:
    """Write a product into its place, multiplied in a type."""
    if dtype == out.dtype:
        torch.mm(left, right, out=out)
    else:
        out.copy_(torch.mm(left.to(dtype), right.to(dtype)))


def _is_aligned(operand: Tensor) -> bool:
    """Return whether rows, or columns where those are contiguous, begin at multiples of 16 bytes."""
    (num_rows, num_columns), (down, across) = operand.shape[-2:], operand.stride()[-2:]
    if operand.dtype not in _GROUPED:
        return False
    if across == 1 and down >= num_columns:
        return down * operand.element_size() % _ALIGNMENT == 0
    return down == 1 and across >= num_rows and across * operand.element_size() % _ALIGNMENT == 0
