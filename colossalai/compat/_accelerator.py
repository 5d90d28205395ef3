"""A device by its name, which moves models to it."""

import torch
from torch import nn


class Accelerator:
    """A kind of device.

    Args:
        device: "cpu", or the type of this machine's accelerator.

    Raises:
        ValueError: `device` is neither "cpu" nor the type of an accelerator that this machine has.
    """

    def __init__(self, device: str) -> None:
        current = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        supported = ["cpu", *([current.type] if current is not None else [])]
        if device not in supported:
            raise ValueError(f"device is {device!r}; it must be one of {supported} on this machine")
        self.device = device

    def configure_model(self, model: nn.Module) -> nn.Module:
        """Move a model to the device and return it."""
        return model.to(torch.device(self.device))
