"""Rates of a device: costs of the operations of a training step and of an optimizer step, and their fits.

An operation costs the overhead of its kind, plus the longer of two times: its floating point operations at a
rate that follows from its extents, and its bytes along a curve through measured sizes. Forward and backward
are separate, as autograd runs them; `_measure.py` measures the times.

[Note: rate of a product]
The floating point operations of a product of (m, k) and (k, n) take

    flops (1 / peak + a / m + b / k + c / n)  seconds.

flops / m is twice the elements of the right operand, flops / n those of the left one, flops / k those of the
result: a, b and c are the costs of moving an element to or from the multiplier. So a large product runs at
the peak, the smallest extent determines the rate of a thin one, and the rate never falls when an extent
grows. The four numbers are fitted to measured shapes, relatively, and none is negative. A convolution is the
product of (positions, terms) and (terms, channels), where positions are those of the output times the batch,
terms the inputs of one sum, and channels the outputs of one group. Attention has queries, keys and the size
of a head.

[Note: noise of the overhead]
On an accelerator the time of a small product cannot be distinguished from the noise of its launch: 3 us of
20, for 128 operations. A fit relative to these 3 us has to explain them, and an H200 got a rate of 50
GFLOP/s in bfloat16. So deviations are relative to the whole time of an operation.
"""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

Kind = Literal[
    "product",
    "convolution",
    "attention",
    "elementwise",
    "activation",
    "tanh",
    "dropout",
    "norm",
    "batch_norm",
    "softmax",
    "loss",
    "embedding",
    "pool",
    "other",
    "view",
]
"""Kinds of operations with separate rates; `kind_of` returns the kind of an operation of torch."""

FLOP_KINDS = ("product", "convolution", "attention")
"""The kinds with floating point operations, whose rate follows from a shape of three extents."""

Direction = Literal["forward", "backward"]
Optimizer = Literal["adamw", "sgd"]

_NUM_PASSES = 8  # passes of reweighting in a fit
_MOST_ABOVE_BEST = 1.25  # limit of a peak, relative to the best measured rate


@dataclass(frozen=True)
class FlopRate:
    """Rate of a kind of products; see [Note: rate of a product].

    Attributes:
        peak: FLOP/s of a product whose extents are all large.
        sides: For each extent, the additional seconds per floating point operation, times that extent.
    """

    peak: float
    sides: tuple[float, float, float] = (0.0, 0.0, 0.0)

    def seconds(self, flops: float, shape: Sequence[int] | None = None) -> float:
        """Return the seconds of some floating point operations.

        Args:
            flops: Number of operations.
            shape: The three extents. None: all large.
        """
        per_flop = 1.0 / self.peak
        if shape is not None:
            per_flop += sum(side / extent for side, extent in zip(self.sides, shape, strict=True))
        return flops * per_flop


@dataclass(frozen=True)
class ByteCurve:
    """Seconds to move bytes: straight lines through measured sizes, from 0 for no bytes.

    Attributes:
        sizes: Bytes, ascending.
        seconds: Seconds of each size, never decreasing. Beyond the last size its bandwidth applies.
    """

    sizes: tuple[float, ...]
    seconds: tuple[float, ...]

    def at(self, num_bytes: float) -> float:
        """Return the seconds to move some bytes."""
        if num_bytes >= self.sizes[-1]:
            return self.seconds[-1] * (num_bytes / self.sizes[-1])
        return float(np.interp(num_bytes, (0.0, *self.sizes), (0.0, *self.seconds)))


@dataclass(frozen=True)
class OpRate:
    """Costs of the operations of a kind in a direction.

    Attributes:
        overhead: Seconds of the smallest operation: the call, autograd's part in it, and kernel launches.
        curve: The time of the bytes; see [Note: bytes of an operation].
        flops: The time of the floating point operations. None for kinds outside of `FLOP_KINDS`.
    """

    overhead: float
    curve: ByteCurve
    flops: FlopRate | None = None


@dataclass(frozen=True)
class OptimizerRate:
    """Costs of a step of a fused optimizer.

    Attributes:
        overhead: Seconds of a step without parameters.
        per_tensor: Seconds for each parameter, independent of its size.
        curve: The time of the bytes of parameters, gradients and states, read and written.
    """

    overhead: float
    per_tensor: float
    curve: ByteCurve


Operations = Mapping[str, Mapping[str, Mapping[str, OpRate]]]


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Rates of a device for the operations of a training step.

    Attributes:
        device: The device: "cpu", or the name of an accelerator.
        num_threads: Number of threads of the process.
        num_ranks: Number of ranks that shared the machines, all busy, during the measurement.
        operations: By kind, the name of the dtype ("float32"), and direction.
        optimizers: By name.
        efficiency: Fraction of the peaks of `FLOP_KINDS` that is reached; 1 if they were measured.
    """

    device: str
    num_threads: int
    num_ranks: int
    operations: Operations = field(repr=False)
    optimizers: Mapping[str, OptimizerRate] = field(repr=False)
    efficiency: float = 1.0


def fit_flop_rate(
    flops: Sequence[float],
    shapes: Sequence[tuple[int, int, int]],
    seconds: Sequence[float],
    *,
    overhead: float = 0.0,
) -> FlopRate:
    """Return the rate with the least relative deviation from measured times; see [Note: rate of a product].

    As for lines of communication (`colossalai.device.fit_alpha_beta`), deviations are relative to the fit.
    All subsets of positive numbers among the four are tried. No peak is more than a quarter above the best
    measured rate: otherwise small extents alone could result in a peak that is never reached.

    Args:
        flops: Floating point operations of each sample.
        shapes: Their extents.
        seconds: Their seconds without the overhead; samples of 0 seconds do not count.
        overhead: Seconds of the smallest operation; see [Note: noise of the overhead].

    Raises:
        ValueError: `seconds` are all 0.
    """
    count, extents, taken = (np.asarray(each, dtype=np.float64) for each in (flops, shapes, seconds))
    counts = taken > 0
    if not counts.any():
        raise ValueError("no sample took longer than any operation does: measure again")
    count, extents, taken = count[counts], extents[counts], taken[counts]
    least_per_flop = float(np.min((overhead + taken) / count)) / _MOST_ABOVE_BEST
    features = count[:, None] * np.concatenate([np.ones((len(count), 1)), 1 / extents], axis=1)
    rest = taken - count * least_per_flop  # seconds left to explain
    expected = taken
    for _ in range(_NUM_PASSES):
        found, least = np.zeros(4), math.inf
        whole = overhead + expected
        for columns in itertools.chain.from_iterable(itertools.combinations(range(4), r) for r in range(5)):
            weighted = features[:, columns] / whole[:, None]
            scale = np.linalg.norm(weighted, axis=0)
            solved = np.linalg.lstsq(weighted / scale, rest / whole, rcond=None)[0] / scale
            error = float(np.sum((weighted @ solved - rest / whole) ** 2))
            if (solved >= 0).all() and error < least:
                found, least = np.zeros(4), error
                found[list(columns)] = solved
        expected = count * least_per_flop + features @ found
    per_flop, *sides = found.tolist()
    return FlopRate(1 / (least_per_flop + per_flop), (sides[0], sides[1], sides[2]))


def curve_through(sizes: Sequence[float], seconds: Sequence[float]) -> ByteCurve:
    """Return the curve through measured times; equal sizes are averaged, and seconds never decrease.

    Args:
        sizes: Bytes. For kinds that move none, the time is the overhead, and the curve is 0.
        seconds: Seconds of each size without the overhead.
    """
    by_size: dict[float, list[float]] = {}
    for size, taken in zip(sizes, seconds, strict=True):
        by_size.setdefault(float(size), []).append(taken)
    kept = sorted(size for size in by_size if size > 0)
    if not kept:
        return ByteCurve((1.0,), (0.0,))
    means = [statistics.fmean(by_size[size]) for size in kept]
    return ByteCurve(tuple(kept), tuple(itertools.accumulate(means, max)))


def optimizer_bytes(name: Optimizer, parameter_bytes: float) -> float:
    """Return the bytes that a step reads and writes, if gradients and states have the parameters' dtype.

    AdamW reads parameter, gradient and two moments and writes all but the gradient: 7 times the parameters;
    SGD with momentum has one moment: 5 times.
    """
    return {"adamw": 7.0, "sgd": 5.0}[name] * parameter_bytes
