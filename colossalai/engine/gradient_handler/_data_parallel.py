"""Averages gradients over the data-parallel ranks after the backward."""

from torch import nn
from torch.optim import Optimizer

from colossalai.context import ParallelMode, global_context
from colossalai.engine.gradient_handler._average import GradientAverage
from colossalai.engine.gradient_handler._base import BaseGradientHandler
from colossalai.registry import GRADIENT_HANDLER


@GRADIENT_HANDLER.register_module
class DataParallelGradientHandler(BaseGradientHandler):
    """Averages all gradients over DATA; see `GradientAverage`.

    Args:
        model: The model.
        optimizer: Its optimizer.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        super().__init__(model, optimizer)
        self._average = GradientAverage(model, global_context.axis(ParallelMode.DATA))

    def handle_gradient(self) -> None:
        """Average the gradients in place; nothing with one rank along `dp`."""
        self._average()
