"""The interface of gradient handlers."""

from abc import ABC, abstractmethod

from torch import nn
from torch.optim import Optimizer


class BaseGradientHandler(ABC):
    """Makes the gradients equal over ranks: after the last backward of a window, before clipping.

    Args:
        model: The model.
        optimizer: Its optimizer.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._model = model
        self._optimizer = optimizer

    @abstractmethod
    def handle_gradient(self) -> None:
        """Change the gradients of the model in place."""
