"""The door for configs: Engine, schedules and gradient handlers."""

from colossalai.engine._engine import Engine as Engine
from colossalai.engine.gradient_handler import BaseGradientHandler as BaseGradientHandler
