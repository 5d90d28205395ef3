"""Gradient handlers of a config: functions of the gradients of all ranks between backward and clipping."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from colossalai.registry import GRADIENT_HANDLER


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


def build_gradient_handler(
    config: Mapping[str, Any], model: nn.Module, optimizer: Optimizer
) -> BaseGradientHandler:
    """Build the handler that `dict(type=..., ...)` names; further entries are its arguments.

    Raises:
        ValueError: No handler is registered under that name, or the registered object is not one.
    """
    arguments = {key: value for key, value in config.items() if key != "type"}
    handler = GRADIENT_HANDLER.get_module(config["type"])(model, optimizer, **arguments)
    if not isinstance(handler, BaseGradientHandler):
        raise ValueError(f"gradient handler {config['type']!r} is not a subclass of BaseGradientHandler")
    return handler
