"""What the executor calls: a stage, given what the stage before returned and the data of a microbatch."""

from abc import ABC, abstractmethod
from typing import Any

from torch import nn


class PipelineStage(nn.Module, ABC):
    """A part of a model that says itself how it runs as a stage.

    The names of its parameters are those that they have in the whole model.
    """

    @abstractmethod
    def forward(self, received: Any, data: Any) -> Any:
        """Run the stage.

        Args:
            received: What the stage before returned, a tensor or a tuple, list or dict of tensors; None on
                the first stage.
            data: The data of the microbatch as the loader gave it, the same on every stage.

        Returns:
            What the next stage receives; on the last stage, the output of the model.
        """
