"""A linear layer for each group of rows: what the experts of a rank compute.

Rows x (R, in) come sorted by expert, n_e of them for expert e, whose matrix is W_e:

    y_e = x_e W_e^T + b_e        dx_e = dy_e W_e        dW_e = dy_e^T x_e        db_e = sum of rows of dy_e

[Note: products of groups]
All groups go to `torch.nn.functional.grouped_mm` in one call, which on CPU multiplies one after the other,
without a call from Python for each; with 256 small experts this halves the time. It asks that rows begin
at multiples of 16 bytes, and knows no float64: there each group is multiplied by a call of its own, into its
part of the result. On CPU, half-precision operands are multiplied in float32 where that is faster: all of
float16, and bfloat16 where products are small. The products are then the same, rounded once at the end;
operands are copied for it, one product at a time. `docs/design/moe.md` has the figures.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from colossalai.nn.layer.tensor_parallel import as_autocast

_ALIGNMENT = 16  # bytes, of rows in memory
_GROUPED = (torch.float32, torch.bfloat16, torch.float16)
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
    gradient of the weight is one tensor, with zeros for an expert without rows, also if nobody has any. Under
    autocast operands are cast as by `torch.nn.functional.linear`.

    Args:
        rows: (R, in), sorted by expert.
        weight: (experts, out, in).
        sizes: How many rows each expert has; their sum is R.
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
    result: Tensor = _GroupedLinear.apply(rows, weight, bias, list(sizes), transposed)
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


class _GroupedLinear(torch.autograd.Function):
    """Keeps the rows if the weight needs a gradient, and the weight if the rows do."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, sizes: list[int], transposed: bool
    ) -> Tensor:
        needs_rows, needs_weight, *_ = ctx.needs_input_grad
        ctx.save_for_backward(rows if needs_weight else None, weight if needs_rows else None)
        ctx.sizes, ctx.transposed, ctx.dtype = sizes, transposed, _dtype_of_products(rows, weight, sizes)
        y = _rows_times(rows, weight if transposed else weight.mT, sizes, ctx.dtype)
        if bias is not None:
            for part, row in zip(y.split(sizes), bias.unbind(0), strict=True):
                part += row
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        sizes: list[int] = ctx.sizes
        needs_rows, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        dy = dy.contiguous()
        drows = dweight = dbias = None
        if needs_bias:
            dbias = torch.stack([part.sum(0) for part in dy.split(sizes)])
        if needs_rows:
            drows = _rows_times(dy, weight.mT if ctx.transposed else weight, sizes, ctx.dtype)
        if needs_weight:
            left, right = (rows, dy) if ctx.transposed else (dy, rows)
            dweight = _columns_times(left, right, sizes, ctx.dtype)
        return drows, dweight, dbias, None, None


def _dtype_of_products(rows: Tensor, weight: Tensor, sizes: list[int]) -> torch.dtype:
    """Return the type in which to multiply; see [Note: products of groups]."""
    if rows.device.type != "cpu" or rows.dtype not in (torch.bfloat16, torch.float16):
        return rows.dtype
    num_busy = sum(1 for size in sizes if size)
    is_small = len(rows) * weight.shape[1] * weight.shape[2] <= num_busy * _SMALL
    return torch.float32 if is_small or rows.dtype == torch.float16 else rows.dtype


def _rows_times(rows: Tensor, matrices: Tensor, sizes: list[int], dtype: torch.dtype) -> Tensor:
    """Return the rows of each group times its matrix: (R, k) and (groups, k, n) make (R, n).

    Args:
        rows: (R, k).
        matrices: (groups, k, n).
        sizes: The number of rows of each group.
        dtype: The type to multiply in; the result has that of the rows.
    """
    given, rows, matrices = rows.dtype, rows.to(dtype), matrices.to(dtype)
    if _takes_grouped(rows, matrices):
        return functional.grouped_mm(rows, matrices, offs=_ends(sizes, rows.device)).to(given)
    result = rows.new_empty(len(rows), matrices.shape[2])
    parts = zip(sizes, rows.split(sizes), matrices.unbind(0), result.split(sizes), strict=True)
    for size, part, matrix, out in parts:
        if size:
            torch.mm(part, matrix, out=out)
    return result.to(given)


def _columns_times(left: Tensor, right: Tensor, sizes: list[int], dtype: torch.dtype) -> Tensor:
    """Return left^T right of each group: (R, m) and (R, n) make (groups, m, n), zeros for an empty group.

    Args:
        left: (R, m).
        right: (R, n).
        sizes: The number of rows of each group.
        dtype: The type to multiply in; the result has that of the operands.
    """
    given, left, right = left.dtype, left.to(dtype), right.to(dtype)
    if _takes_grouped(left.t(), right):
        return functional.grouped_mm(left.t(), right, offs=_ends(sizes, left.device)).to(given)
    result = left.new_empty(len(sizes), left.shape[1], right.shape[1])
    parts = zip(sizes, left.t().split(sizes, 1), right.split(sizes), result.unbind(0), strict=True)
    for size, columns, part, out in parts:
        if size:
            torch.mm(columns, part, out=out)
        else:
            out.zero_()
    return result.to(given)


def _takes_grouped(left: Tensor, right: Tensor) -> bool:
    """Return whether `grouped_mm` multiplies these, into a result without gaps."""
    width = right.shape[-1] * right.element_size()
    return left.numel() > 0 and width % _ALIGNMENT == 0 and _is_aligned(left) and _is_aligned(right)


def _is_aligned(operand: Tensor) -> bool:
    """Return whether rows, or columns where those are contiguous, begin at multiples of 16 bytes."""
    (num_rows, num_columns), (down, across) = operand.shape[-2:], operand.stride()[-2:]
    if operand.dtype not in _GROUPED:
        return False
    if across == 1 and down >= num_columns:
        return down * operand.element_size() % _ALIGNMENT == 0
    return down == 1 and across >= num_rows and across * operand.element_size() % _ALIGNMENT == 0


def _ends(sizes: list[int], device: torch.device) -> Tensor:
    return torch.tensor(list(accumulate(sizes)), dtype=torch.int32, device=device)
