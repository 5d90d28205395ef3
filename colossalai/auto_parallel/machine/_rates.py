"""Rates of a device: what the operations of a training and the step of an optimizer cost, and their fits.

An operation costs what any of its kind costs however small, and then the longer one of two times: that of its
floating point operations, at a rate that follows from its extents, and that of the bytes that it moves, along
a curve through measured sizes. Forward and backward are apart, as autograd runs them; `_measure.py` takes the
times.

[Note: rate of a product]
The floating point operations of a product of (m, k) and (k, n) take

    flops (1 / peak + a / m + b / k + c / n)  seconds.

flops / m is twice the elements of the right operand, flops / n those of the left one, flops / k those of the
result: a, b and c are what it costs to bring an element there where it is multiplied. So a large product runs
at the peak, of a thin one the smallest extent says the rate, and no extent can grow and the rate fall. The
four numbers are fitted to measured shapes, relatively, and none is negative. A convolution is the product of
(positions, terms) and (terms, channels), where positions are those of the output times the batch, terms the
inputs of one sum, and channels the outputs of one group. Attention has queries, keys and the size of a head.

[Note: noise of what any operation costs]
On an accelerator a small product takes no time of its own that could be told from the noise of its launch: 3
us of 20, for 128 operations. A fit relative to these 3 us has to explain them, and an H200 got a rate of 50
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
"""What is measured apart; `kind_of` says of which kind an operation of torch is."""

FLOP_KINDS = ("product", "convolution", "attention")
"""The kinds whose floating point operations count, and whose rate follows from a shape of three extents."""

Direction = Literal["forward", "backward"]
Optimizer = Literal["adamw", "sgd"]

_NUM_PASSES = 8  # of the reweighting of a fit
_MOST_ABOVE_BEST = 1.25  # of a peak, times the best measured rate


@dataclass(frozen=True)
class FlopRate:
    """How fast a kind of products multiplies; see [Note: rate of a product].

    Attributes:
        peak: FLOP/s of a product whose extents are all large.
        sides: For each extent the seconds times that extent that a floating point operation takes longer.
    """

    peak: float
    sides: tuple[float, float, float] = (0.0, 0.0, 0.0)

    def seconds(self, flops: float, shape: Sequence[int] | None = None) -> float:
        """Return what so many floating point operations take.

        Args:
            flops: Their number.
            shape: The three extents; None: all large.
        """
        per_flop = 1.0 / self.peak
        if shape is not None:
            per_flop += sum(side / extent for side, extent in zip(self.sides, shape, strict=True))
        return flops * per_flop


@dataclass(frozen=True)
class ByteCurve:
    """What it takes to move bytes: straight lines through measured sizes, from nothing for none.

    Attributes:
        sizes: Bytes, ascending.
        seconds: What each takes; never less than a smaller size. Beyond the last the bandwidth is its own.
    """

    sizes: tuple[float, ...]
    seconds: tuple[float, ...]

    def at(self, num_bytes: float) -> float:
        """Return the seconds that so many bytes take."""
        if num_bytes >= self.sizes[-1]:
            return self.seconds[-1] * (num_bytes / self.sizes[-1])
        return float(np.interp(num_bytes, (0.0, *self.sizes), (0.0, *self.seconds)))


@dataclass(frozen=True)
class OpRate:
    """What the operations of a kind cost in a direction.

    Attributes:
        overhead: Seconds, however small: the call, autograd's part in it, and the kernels' start.
        curve: The time of the bytes; see [Note: bytes of an operation].
        flops: The time of the floating point operations; None for kinds that are not in `FLOP_KINDS`.
    """

    overhead: float
    curve: ByteCurve
    flops: FlopRate | None = None


@dataclass(frozen=True)
class OptimizerRate:
    """What a step of a fused optimizer costs.

    Attributes:
        overhead: Seconds of a step, however little there is to update.
        per_tensor: Seconds for each parameter, however small.
        curve: The time of the bytes of parameters, gradients and states, read and written.
    """

    overhead: float
    per_tensor: float
    curve: ByteCurve


Operations = Mapping[str, Mapping[str, Mapping[str, OpRate]]]


@dataclass(frozen=True, kw_only=True)
class Rates:
    """How fast a device runs the operations of a training.

    Attributes:
        device: What computes: "cpu", or the name of an accelerator.
        num_threads: Of the process.
        num_ranks: How many shared the machines, all busy, while it was measured.
        operations: By kind, the name of the dtype ("float32"), and direction.
        optimizers: By name.
        efficiency: The share of the peaks of `FLOP_KINDS` that is reached; 1 where they were measured.
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
    """Return the rate that deviates least, relatively, from measured times; see [Note: rate of a product].

    As for lines of communication (`colossalai.device.fit_alpha_beta`), deviations are counted relative to the
    fit. All sets of the four numbers that may be above 0 are tried. No peak is more than a quarter above the
    best measured rate: else extents that were all small could say one that nothing reaches.

    Args:
        flops: Floating point operations of each sample.
        shapes: Their extents.
        seconds: What they took without what any costs; samples that took none do not count.
        overhead: What any costs; see [Note: noise of what any operation costs].

    Raises:
        ValueError: No sample took any time.
    """
    count, extents, taken = (np.asarray(each, dtype=np.float64) for each in (flops, shapes, seconds))
    counts = taken > 0
    if not counts.any():
        raise ValueError("no sample took longer than any operation does: measure again")
    count, extents, taken = count[counts], extents[counts], taken[counts]
    least_per_flop = float(np.min((overhead + taken) / count)) / _MOST_ABOVE_BEST
    features = count[:, None] * np.concatenate([np.ones((len(count), 1)), 1 / extents], axis=1)
    rest = taken - count * least_per_flop  # what is left to explain
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
    """Return the curve through measured times; of equal sizes the mean, and never less than a smaller size.

    Args:
        sizes: Bytes; where none are moved, the time is that of any operation, and the curve is 0.
        seconds: What each took without what any costs.
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
    """Return the bytes that a step reads and writes, where gradients and states have the parameters' type.

    AdamW reads parameter, gradient and two moments and writes all but the gradient: 7 times the parameters;
    SGD with momentum has one moment: 5 times.
    """
    return {"adamw": 7.0, "sgd": 5.0}[name] * parameter_bytes
