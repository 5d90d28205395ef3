"""Engine: training with a config, with its schedules and gradient handlers."""

from typing import Any

from colossalai._lazy import find_name
from colossalai.engine._engine import Engine as Engine
from colossalai.engine._gradient_handler import BaseGradientHandler as BaseGradientHandler
from colossalai.engine._gradient_handler import build_gradient_handler as build_gradient_handler


def __getattr__(name: str) -> Any:
    """Import a sub-module at its first access (PEP 562)."""
    return find_name(__name__, {}, name)
