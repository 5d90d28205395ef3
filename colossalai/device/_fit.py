"""The fit of a straight line, alpha + beta n, to measured times of messages of n bytes.

R. Hockney's model of communication: a start-up time alpha in seconds and beta, the inverse of a bandwidth, in
seconds per byte ("The communication challenge for MPP", Parallel Computing 20, 1994). Sizes and times reach
over four orders of magnitude, so deviations are counted relative to the line: the fit minimizes

    sum over i of ((alpha + beta n_i - t_i) / (alpha + beta n_i))^2.

An ordinary fit would be dominated by the largest sizes, and weights of 1 / t_i would pull the line below
noisy times, since too short times would weigh more than too long ones.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_NUM_PASSES = 20  # of the reweighting; it converges after about five


@dataclass(frozen=True)
class AlphaBeta:
    """A line: an operation on `n` bytes takes `alpha + beta * n` seconds.

    Attributes:
        alpha: Latency in seconds.
        beta: Seconds per byte.
        error: Root mean square of the relative deviations of the fitted times; 0: not fitted.
    """

    alpha: float
    beta: float
    error: float = 0.0

    def seconds(self, num_bytes: float) -> float:
        """Return the seconds of an operation on some bytes."""
        return self.alpha + self.beta * num_bytes


def fit_alpha_beta(sizes: Sequence[float], seconds: Sequence[float]) -> AlphaBeta:
    """Return the line with the least relative deviation from measured times; neither part is negative.

    Args:
        sizes: Bytes; at least two different numbers.
        seconds: Seconds of each size.

    Raises:
        ValueError: `sizes` and `seconds` are not equally long, `sizes` has fewer than two different numbers,
            or a number of either is not above 0 or not finite.
    """
    n, t = np.asarray(sizes, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    if n.shape != t.shape or n.ndim != 1 or len(np.unique(n)) < 2:
        raise ValueError(
            f"{len(sizes)} sizes, {len(set(sizes))} of them different, and {len(seconds)} times: give a time "
            "for each size, and at least two different sizes"
        )
    if not (np.isfinite(n).all() and np.isfinite(t).all() and (n > 0).all() and (t > 0).all()):
        raise ValueError("sizes and times must be finite and above 0")
    weights = 1 / t
    for _ in range(_NUM_PASSES):
        alpha, beta = _weighted(n, t, weights)
        weights = 1 / (alpha + beta * n)
    deviations = (t - alpha - beta * n) * weights
    return AlphaBeta(alpha, beta, math.sqrt(float(np.mean(deviations**2))))


def _weighted(n: np.ndarray, t: np.ndarray, weights: np.ndarray) -> tuple[float, float]:
    """Return the alpha and beta of least squares with given weights, neither of them negative."""
    rows = np.stack([weights, weights * n], axis=1)
    scale = np.linalg.norm(rows, axis=0)  # a byte takes a millionth of the time of a message
    alpha, beta = np.linalg.lstsq(rows / scale, weights * t, rcond=None)[0] / scale
    if beta < 0:  # longer messages were not slower: all of the time is latency
        return float(np.sum(weights**2 * t) / np.sum(weights**2)), 0.0
    if alpha < 0:
        return 0.0, float(np.sum(weights**2 * n * t) / np.sum((weights * n) ** 2))
    return float(alpha), float(beta)
