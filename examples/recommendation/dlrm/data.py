"""Click logs drawn from a seed, with known click probabilities: each sample is a function of its index.

The probability of a click is a logistic function of a bias, a linear effect of the dense features, an effect
of each id, and a product of two factors for the ids of some pairs of features. A DLRM can represent it, and
no model has a higher expected AUROC than the probabilities themselves.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

BIAS = -1.0
DENSE_STD, EFFECT_STD, FACTOR_STD = 1.0, 0.4, 0.4  # of the terms of a logit, and of the factors
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class Clicks(NamedTuple):
    """A batch of samples.

    Attributes:
        dense: (batch, dense features), float32.
        ids: (batch, tables), int64: a row of each table.
        labels: (batch,), float32: 1 for a click.
        probabilities: (batch,), float64: the known ones; NaN where they are unknown.
    """

    dense: Tensor
    ids: Tensor
    labels: Tensor
    probabilities: Tensor


class SyntheticClicks(Dataset[Clicks]):
    """Samples `begin` to `begin + length` of the endless click log of a seed.

    Args:
        table_sizes: Number of ids of each categorical feature.
        num_dense: Number of dense features.
        length: Number of samples.
        seed: Seed of the effects and of the samples.
        begin: Index of the first sample.
        exponent: Id k of a feature is drawn with a frequency of (k + 1) ** -exponent.
        interactions: Pairs of features, each with a product of a factor of both ids in the logit.
    """

    def __init__(
        self,
        table_sizes: Sequence[int],
        *,
        num_dense: int,
        length: int,
        seed: int,
        begin: int = 0,
        exponent: float = 1.2,
        interactions: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.length, self.seed, self.begin = length, seed, begin
        generator = torch.Generator().manual_seed(seed)
        weights = torch.randn(num_dense, generator=generator)
        self._dense = weights / weights.norm() * DENSE_STD
        self._effects = [torch.randn(size, generator=generator) * EFFECT_STD for size in table_sizes]
        self._factors = {
            pair: [torch.randn(table_sizes[table], generator=generator) * FACTOR_STD for table in pair]
            for pair in interactions
        }
        powers = [np.arange(1, size + 1, dtype=np.float64) ** -exponent for size in table_sizes]
        self._cumulative = [np.cumsum(each) / each.sum() for each in powers]

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Clicks:
        return Clicks(*(each[0] for each in self.__getitems__([index])))

    def __getitems__(self, indices: Sequence[int]) -> Clicks:
        """Return a batch, drawn at once; the DataLoader of torch calls it."""
        positions = np.asarray(indices, dtype=np.uint64) + np.uint64(self.begin)
        num_dense, num_tables = len(self._dense), len(self._effects)
        draws = [self._uniform(positions, stream) for stream in range(num_dense + num_tables + 1)]
        dense = torch.from_numpy(np.stack(draws[:num_dense], 1)).sub_(0.5).mul_(12**0.5).float()
        ids = [
            torch.from_numpy(np.minimum(cumulative.searchsorted(draw, "right"), len(cumulative) - 1))
            for cumulative, draw in zip(self._cumulative, draws[num_dense:], strict=False)
        ]
        logits = BIAS + dense @ self._dense
        for effects, rows in zip(self._effects, ids, strict=True):
            logits += effects[rows]
        for (left, right), (left_factors, right_factors) in self._factors.items():
            logits += left_factors[ids[left]] * right_factors[ids[right]]
        probabilities = logits.double().sigmoid()
        labels = (torch.from_numpy(draws[-1]) < probabilities).float()
        return Clicks(dense, torch.stack(ids, 1), labels, probabilities)

    def _uniform(self, positions: np.ndarray, stream: int) -> np.ndarray:
        """Return numbers in [0, 1): elements of the sequence of SplitMix64 of a seed and a stream."""
        start = _mix(_mix(np.array([self.seed], np.uint64)) + np.uint64(stream))
        bits = _mix(start + (positions + np.uint64(1)) * _GOLDEN) >> np.uint64(11)
        numbers: np.ndarray = bits.astype(np.float64) * 2.0**-53
        return numbers


def _mix(bits: np.ndarray) -> np.ndarray:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))
