"""Noise on the logits of a router, so that experts which are nearly chosen are tried as well.

Ranks that hold different tokens draw different noise, those that share tokens (along `tp`) the same
(`context.drawing_by_batch`).
"""

import torch
from torch import Tensor


class NormalNoiseGenerator:
    """Adds normal noise of mean 0 and standard deviation 1 / experts to logits (1701.06538).

    Args:
        num_experts: The number of experts.

    Raises:
        ValueError: `num_experts` is not positive.
    """

    def __init__(self, num_experts: int) -> None:
        if num_experts < 1:
            raise ValueError(f"num_experts is {num_experts}; it must be at least 1")
        self.num_experts = num_experts

    def __call__(self, logits: Tensor) -> Tensor:
        """Return logits of any shape with noise."""
        return logits + torch.randn_like(logits) / self.num_experts


class UniformNoiseGenerator:
    """Multiplies logits by uniform noise from 1 - eps to 1 + eps: the jitter of 2101.03961.

    Args:
        eps: How far the factors reach.

    Raises:
        ValueError: `eps` is negative.
    """

    def __init__(self, eps: float = 1e-2) -> None:
        if eps < 0:
            raise ValueError(f"eps is {eps}; it must not be negative")
        self.eps = eps

    def __call__(self, logits: Tensor) -> Tensor:
        """Return logits of any shape with noise."""
        return logits * torch.empty_like(logits).uniform_(1 - self.eps, 1 + self.eps)
