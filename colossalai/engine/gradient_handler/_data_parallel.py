"""Averages gradients over the data-parallel ranks after the backward."""

from colossalai.context import ParallelMode, global_context
from colossalai.engine.gradient_handler._average import GradientAverage
from colossalai.engine.gradient_handler._base import BaseGradientHandler
from colossalai.registry import GRADIENT_HANDLER


@GRADIENT_HANDLER.register_module
class DataParallelGradientHandler(BaseGradientHandler):
    """Averages all gradients over DATA; see `GradientAverage`."""

    _average: GradientAverage | None = None  # from the first call on

    def handle_gradient(self) -> None:
        """Average the gradients in place; nothing with one rank along `dp`."""
        self._average = self._average or GradientAverage(global_context.axis(ParallelMode.DATA))
        self._average(self._model.parameters())
