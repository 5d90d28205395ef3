"""Products by oneDNN: the kernels that replace torch's, and the cases that they leave to torch.

Each kernel checks its operands and the rule (`_rule.py`) and multiplies by oneDNN, or calls torch's kernel
with its arguments unchanged. So torch handles all unusual cases: another dtype, views that overlap or have
gaps, a bias that is expanded or strided (oneDNN would read out of bounds), a scale, an invalid call. They are
kernels of the dispatch key CPU: autograd, autocast, vmap, fake tensors and subclasses come before.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from colossalai.kernel._rule import LEAST_MULTIPLICATIONS, Profile, leading_piece

Kernel = Callable[..., torch.Tensor]

REPLACED = ("mm", "mm.out", "addmm", "addmm.out", "addmm_")
"""The operators of `aten` with a kernel of ours."""

_MOST_SIDES = 128
_FLOAT32 = torch.float32
_NOT_ROUNDED = ("ieee", "none")  # torch's names of full float32 precision


class Products:
    """Our kernels, with torch's own as fallback.

    Args:
        plain: torch's kernels by the names of `REPLACED`; the first argument is the set of dispatch keys.

    Attributes:
        is_active: Whether oneDNN multiplies; otherwise all calls are passed on.
        profile: Speed of both libraries, which decides where oneDNN pays.
        sides: Pairs of extents so far that are not cut into pieces, mostly those of weights. A program with
            more than 128 has sequence lengths among them; further ones are torch's, so that oneDNN does not
            keep a kernel for each.
    """

    def __init__(self, plain: Mapping[str, Kernel]) -> None:
        self.is_active = False
        self.profile = Profile()
        self.sides: set[tuple[int, int]] = set()
        self._plain = plain
        self._linear: Kernel = torch.ops.mkldnn._linear_pointwise.default
        self._linear_and_add: Kernel = torch.ops.mkldnn._linear_pointwise.binary

    def kernels(self) -> dict[str, Kernel]:
        """Return our kernels by the names of `REPLACED`."""
        ours = (self._mm, self._mm_out, self._addmm, self._addmm_out, self._addmm_)
        return dict(zip(REPLACED, ours, strict=True))

    def _mm(self, keys: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if self.is_active and _is_large(a, b) and self._takes(a, b):
            return self._product(keys, a, b, None)
        return self._plain["mm"](keys, a, b)

    def _mm_out(self, keys: Any, a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        if self.is_active and _is_large(a, b) and _is_apart(out, a, b) and self._takes(a, b):
            return self._fill(keys, out, a, b, None)
        return self._plain["mm.out"](keys, a, b, out=out)

    def _addmm(
        self,
        keys: Any,
        bias: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        *,
        beta: Any = 1,
        alpha: Any = 1,
    ) -> torch.Tensor:
        if (
            self.is_active
            and _is_large(a, b)
            and alpha == beta == 1
            and _is_bias(bias, b)
            and self._takes(a, b)
        ):
            return self._product(keys, a, b, bias)
        return self._plain["addmm"](keys, bias, a, b, beta=beta, alpha=alpha)

    def _addmm_out(
        self,
        keys: Any,
        bias: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        *,
        beta: Any = 1,
        alpha: Any = 1,
        out: torch.Tensor,
    ) -> torch.Tensor:
        if self.is_active and _is_large(a, b) and alpha == beta == 1 and _is_apart(out, a, b):
            if bias is out and self._takes(a, b):
                return self._add(keys, out, a, b)
            if _is_bias(bias, b) and not _share(bias, out) and self._takes(a, b):
                return self._fill(keys, out, a, b, bias)
        return self._plain["addmm.out"](keys, bias, a, b, beta=beta, alpha=alpha, out=out)

    def _addmm_(
        self,
        keys: Any,
        total: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        *,
        beta: Any = 1,
        alpha: Any = 1,
    ) -> torch.Tensor:
        is_sum = self.is_active and _is_large(a, b) and alpha == beta == 1 and _is_apart(total, a, b)
        if is_sum and self._takes(a, b):
            return self._add(keys, total, a, b)
        return self._plain["addmm_"](keys, total, a, b, beta=beta, alpha=alpha)

    def _takes(self, a: torch.Tensor, b: torch.Tensor) -> bool:
        """Return whether oneDNN should multiply two matrices."""
        (m, k), (rows, n) = a.shape, b.shape
        if k != rows or a.dtype is not _FLOAT32 or b.dtype is not _FLOAT32:
            return False
        # Both dense, by their strides, which show a dimension of stride 0, a gap or an overlap.
        a_strides, b_strides = a.stride(), b.stride()
        a_is_plain, b_is_plain = a_strides == (k, 1), b_strides == (n, 1)
        if not (a_is_plain or a_strides == (1, m)) or not (b_is_plain or b_strides == (1, k)):
            return False
        if not self.profile.pays(m, k, n, a_is_plain=a_is_plain):
            return False
        if torch._C._get_fp32_precision_getter("mkldnn", "matmul") not in _NOT_ROUNDED:
            return False  # keep to the user's own precision setting; also below
        if not torch._C._get_mkldnn_enabled():
            return False
        side = (k, n) if a_is_plain else (m, n)
        if side not in self.sides:
            if len(self.sides) >= _MOST_SIDES:
                return False
            self.sides.add(side)
        return True

    def _product(
        self, keys: Any, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return a product, plus `bias` in every row."""
        cut = 0 if a.stride(1) == 1 else 1  # the dimension of the left operand that counts rows of a batch
        size = leading_piece(a.shape[cut])
        if size == a.shape[cut]:
            return self._linear(a, b.t(), bias, "none", [], "")
        if cut == 0:
            return self._fill(keys, a.new_empty(a.shape[0], b.shape[1]), a, b, bias)
        total = self._linear(a[:, :size], b[:size].t(), bias, "none", [], "")
        return self._plain["addmm_"](keys, total, a[:, size:], b[size:], beta=1, alpha=1)

    def _fill(
        self, keys: Any, out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Write a product, plus `bias` in every row, into `out`."""
        if a.stride(1) != 1:
            return out.copy_(self._product(keys, a, b, bias))
        weight, done = b.t(), 0
        for start, end in self._pieces(a, b):
            out[start:end] = self._linear(a[start:end], weight, bias, "none", [], "")
            done = end
        if done < a.shape[0] and bias is None:
            self._plain["mm.out"](keys, a[done:], b, out=out[done:])
        elif done < a.shape[0]:
            self._plain["addmm.out"](keys, bias, a[done:], b, beta=1, alpha=1, out=out[done:])
        return out

    def _add(self, keys: Any, total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Add a product to `total`."""
        if a.stride(1) != 1:
            size = leading_piece(a.shape[1])
            total.copy_(self._linear_and_add(a[:, :size], total, b[:size].t(), None, "add"))
            if size < a.shape[1]:
                self._plain["addmm_"](keys, total, a[:, size:], b[size:], beta=1, alpha=1)
            return total
        weight, done = b.t(), 0
        for start, end in self._pieces(a, b):
            part = total[start:end]
            part.copy_(self._linear_and_add(a[start:end], part, weight, None, "add"))
            done = end
        if done < a.shape[0]:
            self._plain["addmm_"](keys, total[done:], a[done:], b, beta=1, alpha=1)
        return total

    def _pieces(self, a: torch.Tensor, b: torch.Tensor) -> list[tuple[int, int]]:
        """Return the begins and ends of the pieces of the rows of `a` for which oneDNN pays."""
        (m, k), n = a.shape, b.shape[1]
        found, start = [], 0
        while start < m:
            end = start + leading_piece(m - start)
            if not self.profile.pays(end - start, k, n, a_is_plain=True):
                break
            found.append((start, end))
            start = end
        return found


def _is_large(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether these are matrices with many multiplications; checked first, as most are small."""
    num = a.numel()
    if num * b.numel() < LEAST_MULTIPLICATIONS:  # k times the multiplications: excludes nearly all small ones
        return False
    return a.dim() == 2 == b.dim() and num * b.shape[1] >= LEAST_MULTIPLICATIONS


def _is_bias(bias: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether a tensor can be added to all rows, in its full size and contiguous."""
    return bias.dtype is _FLOAT32 and bias.shape == b.shape[1:] and bias.stride() == (1,)


def _is_apart(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether a product can be written to a tensor: of its shape, dense, without shared memory."""
    is_result = out.dtype is _FLOAT32 and out.shape == (a.shape[0], b.shape[1]) and out.is_contiguous()
    return is_result and not _share(out, a) and not _share(out, b)


def _share(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
