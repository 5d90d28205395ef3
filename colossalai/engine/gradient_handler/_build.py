"""From an entry of a config to a gradient handler."""

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from colossalai.engine.gradient_handler._base import BaseGradientHandler
from colossalai.registry import GRADIENT_HANDLER


def build_gradient_handler(
    config: Mapping[str, Any], model: nn.Module, optimizer: Optimizer
) -> BaseGradientHandler:
    """Build the handler that `dict(type=..., ...)` names; further entries are its arguments.

    Raises:
        ValueError: No handler is registered under that name, or what is registered is not one.
    """
    arguments = {key: value for key, value in config.items() if key != "type"}
    handler = GRADIENT_HANDLER.get_module(config["type"])(model, optimizer, **arguments)
    if not isinstance(handler, BaseGradientHandler):
        raise ValueError(f"gradient handler {config['type']!r} is not a subclass of BaseGradientHandler")
    return handler
