"""Averages gradients of models with experts, after the backward."""

from torch import nn
from torch.optim import Optimizer

from colossalai.context import ParallelMode, global_context
from colossalai.engine.gradient_handler._average import GradientAverage
from colossalai.engine.gradient_handler._base import BaseGradientHandler
from colossalai.registry import GRADIENT_HANDLER


@GRADIENT_HANDLER.register_module
class MoeGradientHandler(BaseGradientHandler):
    """Averages all gradients: those of experts over the ranks that hold them, others over DATA.

    See [Note: which ranks share a gradient]. Named in the config, `gradient_handler=[dict(type=
    "MoeGradientHandler")]`, it does so, and the data-parallel method leaves it to this. Where the config
    names no handler, `initialize` adds one to the engine of a model with experts; gradients are averaged by
    the data-parallel method then, beside the backward, which is quicker, and this one does nothing: the
    gradients of experts would be divided twice.

    Args:
        model: The model.
        optimizer: Its optimizer.
        averaged: Whether gradients are averaged before this is called.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, *, averaged: bool = False) -> None:
        super().__init__(model, optimizer)
        self.averaged = averaged
        self._average: GradientAverage | None = None

    def handle_gradient(self) -> None:
        """Average the gradients in place, unless they are."""
        if not self.averaged:
            self._average = self._average or GradientAverage(global_context.axis(ParallelMode.DATA))
            self._average(self._model.parameters())
