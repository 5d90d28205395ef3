"""The rule: which products of two matrices go to oneDNN, and in which pieces, by their sizes alone.

It does not depend on earlier computations, so a repeated step, after a resume or in a recomputation, uses the
same kernels and gives the same bits.

[Note: pieces of few sizes]
oneDNN compiles a kernel for each shape: 1 to 2 ms, and 0.6 to 1.1 MiB that stay (measured: 64 and 256
features, 1,000 numbers of rows). Batches of ragged text have thousands of numbers of rows. So the dimension
that counts rows of the batch, in a forward or an input gradient the rows of the product, in a weight gradient
the terms of its sums, is cut into pieces whose sizes have three leading bits and then zeros: four sizes
between a power of two and the next, 1000 = 896 + 96 + 8. Such a size stays whole. The last rows are torch's.
"""

from dataclasses import dataclass

LEAST_MULTIPLICATIONS = 1 << 20
"""Smaller products go to torch directly: torch takes some 25 us for this size, a call of oneDNN 15."""

_LEAST_SIDE = 8  # with a thin side a product is memory-bound, and oneDNN often copies its operands
_LEAST_COLUMNS = 16  # for 8 columns oneDNN took 1.2 to 1.3 of MKL's time
_MARGIN = 0.9  # of torch's time, for costs that the model omits


@dataclass(frozen=True)
class Profile:
    """Speed of both libraries for float32 matrices on a processor.

    The defaults are figures of an AMD EPYC (family 26) with torch 2.13 on one core, where MKL does not take
    its best path; `measured_profile` returns those of this processor.

    Attributes:
        call_us: Additional microseconds of an empty call of oneDNN over one of torch.
        torch_gflops: GFLOP/s of torch's BLAS.
        onednn_gflops: GFLOP/s of oneDNN; 0 if it rounds to less than float32.
        turn_ns: Nanoseconds to transpose an element of a left operand that is stored by columns: the one of
            the weight gradient, which oneDNN copies.
        write_ns: Nanoseconds to write an element of the result, independent of the number of terms.
    """

    call_us: float = 13.0
    torch_gflops: float = 85.0
    onednn_gflops: float = 190.0
    turn_ns: float = 0.5
    write_ns: float = 0.0

    @property
    def speedup(self) -> float:
        """Ratio of the speeds of oneDNN and torch's BLAS, without the calls."""
        return self.onednn_gflops / self.torch_gflops

    def pays(self, m: int, k: int, n: int, *, a_is_plain: bool) -> bool:
        """Return whether oneDNN is faster for a product of (m, k) and (k, n).

        Args:
            m: Rows of the product.
            k: Terms of each sum.
            n: Columns of the product.
            a_is_plain: Whether the rows of the left operand are contiguous; otherwise its columns are.
        """
        if m < _LEAST_SIDE or k < _LEAST_SIDE or n < _LEAST_COLUMNS:
            return False
        kflop = 2e-3 * m * k * n
        moving_us = 1e-3 * m * n * self.write_ns
        if not a_is_plain:
            moving_us += 1e-3 * m * k * self.turn_ns
        return self.call_us + moving_us + kflop / self.onednn_gflops <= _MARGIN * kflop / self.torch_gflops


def leading_piece(rows: int) -> int:
    """Return the largest size of a piece up to `rows`; see [Note: pieces of few sizes]."""
    zeros = max(rows.bit_length() - 3, 0)
    return rows >> zeros << zeros
