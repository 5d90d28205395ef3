"""The context in which models are built lazily."""

from contextlib import ExitStack
from typing import Self

import torch
from torch import nn

from colossalai.lazy._materialize import materialize
from colossalai.lazy._replay import Device
from colossalai.lazy._tensor import RecordingMode


class LazyInitContext:
    """Builds models without their memory: parameters are on the meta device until they are materialized.

    What a model does to initialize its tensors is recorded, and `materialize` does it for the part of the
    model that a process owns, with the values of an eager build from the same random state, bit for bit.
    Building takes as long as it does eagerly, because all random numbers are drawn, and the memory of the
    largest tensor.

    Values that Python asks for while a model is built (`.item()`, `.tolist()`, a mask) are computed then.
    What is made from Python numbers or numpy (`torch.tensor`, `torch.from_numpy`) is real at once. Inside the
    context a lazy tensor says that it is on the device where it will be, outside of it on the meta device.

    Args:
        default_device: Where tensors will be that are made without a device; default: torch's.

    Example:
        >>> with LazyInitContext():
        ...     model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        >>> stage = LazyInitContext.materialize(model[0])
    """

    def __init__(self, default_device: Device = None) -> None:
        self.default_device = None if default_device is None else torch.device(default_device)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        if self.default_device is not None:
            self._stack.enter_context(self.default_device)
        self._stack.enter_context(RecordingMode(self.default_device or torch.device("cpu")))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @staticmethod
    def materialize(module: nn.Module, device: Device = None) -> nn.Module:
        """Give a lazily built module or a part of one memory and values: `colossalai.lazy.materialize`."""
        return materialize(module, device=device)
