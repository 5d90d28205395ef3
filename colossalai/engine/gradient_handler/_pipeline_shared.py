"""Sums the gradients of parameters that pipeline stages share, after the backward."""

from colossalai.engine.gradient_handler._base import BaseGradientHandler
from colossalai.pipeline.stages import sync_shared_grads
from colossalai.registry import GRADIENT_HANDLER


@GRADIENT_HANDLER.register_module
class PipelineSharedModuleGradientHandler(BaseGradientHandler):
    """Sums the gradients of shared parameters; see `PipelineSharedModuleWrapper`.

    A pipeline does so in every step by itself. Where it has, this finds them summed and does nothing.
    """

    def handle_gradient(self) -> None:
        """Sum the gradients in place."""
        sync_shared_grads(self._model.parameters())
