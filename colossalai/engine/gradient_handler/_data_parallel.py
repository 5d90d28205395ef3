"""Averages gradients over the data-parallel ranks after the backward."""

from colossalai.context import ParallelMode, global_context
from colossalai.engine.gradient_handler._average import average_gradients
from colossalai.engine.gradient_handler._base import BaseGradientHandler
from colossalai.registry import GRADIENT_HANDLER


@GRADIENT_HANDLER.register_module
class DataParallelGradientHandler(BaseGradientHandler):
    """Averages all gradients over DATA; see `average_gradients`."""

    def handle_gradient(self) -> None:
        """Average the gradients in place; nothing with one rank along `dp`."""
        average_gradients(self._model.parameters(), global_context.axis(ParallelMode.DATA))
