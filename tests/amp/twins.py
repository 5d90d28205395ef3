"""A model with several optimizers under one loss scale beside its twin in plain float32."""

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer


class TwinsOfSeveral:
    """Steps of both, compared; subclasses run the backwards.

    Args:
        model: The model, wrapped or not.
        optimizers: Its wrapped optimizers.
        twin: The model in plain float32.
        plain: The optimizers of the twin.
        tolerance: Maximum difference of a parameter.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Any],
        twin: nn.Module,
        plain: Sequence[Optimizer],
        tolerance: float,
    ) -> None:
        self.model, self.optimizers = model, tuple(optimizers)
        self.twin, self.plain = twin, tuple(plain)
        self.scaler = optimizers[0].scaler
        self.tolerance = tolerance

    def zero_grad(self, *which: int) -> None:
        for number in which or (0, 1):
            self.optimizers[number].zero_grad()
            self.plain[number].zero_grad()

    def step(self, *which: int, skipped: bool = False) -> None:
        """Step with some optimizers, and compare all parameters."""
        for number in which or (0, 1):
            self.optimizers[number].step()
            assert self.optimizers[number].stepped != skipped
            if not skipped:
                self.plain[number].step()
        expected = dict(self.twin.named_parameters())
        for name, param in self.model.named_parameters():
            error = (param.to(expected[name].dtype) - expected[name]).abs().max().item()
            assert error <= self.tolerance, f"{name} differs by {error:.3g}"
