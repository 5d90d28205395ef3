"""Ends the averaging of gradients that ZeRO has begun during the backward."""

from torch import nn
from torch.optim import Optimizer

from colossalai.amp import OptimizerWrapper
from colossalai.engine.gradient_handler._base import BaseGradientHandler
from colossalai.registry import GRADIENT_HANDLER
from colossalai.zero import Shards


@GRADIENT_HANDLER.register_module
class ZeROGradientHandler(BaseGradientHandler):
    """Waits until each rank has its slices of the mean gradients, and averages what has not been yet.

    A step under ZeRO does so by itself. Where this has been before, the step finds it done.

    Args:
        model: The model.
        optimizer: Its optimizer, from a door, under ZeRO stage 1 or 2.

    Raises:
        ValueError: The optimizer is not under ZeRO.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        super().__init__(model, optimizer)
        shards = optimizer.masters if isinstance(optimizer, OptimizerWrapper) else None
        if not isinstance(shards, Shards):
            raise ValueError(
                "ZeROGradientHandler needs an optimizer under ZeRO: put zero=dict(stage=1) into the config, "
                "or take DataParallelGradientHandler"
            )
        self._shards = shards

    def handle_gradient(self) -> None:
        """Finish the means; collective over the replicas."""
        self._shards.finish_means()
