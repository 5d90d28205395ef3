"""The context for building models lazily."""

from contextlib import ExitStack
from typing import Self

import torch
from torch import nn

from colossalai.lazy._materialize import materialize
from colossalai.lazy._replay import Device
from colossalai.lazy._tensor import RecordingMode


class LazyInitContext:
    """Builds models without their memory: parameters are on the meta device until they are materialized.

    Initialization of tensors is recorded, and `materialize` replays it for the part of the model that a
    process owns, with the values of an eager build from the same random state, bit for bit. Building takes as
    long as an eager build, because all random numbers are drawn, and the memory of the largest tensor.

    Values that Python reads while a model is built (`.item()`, `.tolist()`, a mask) are computed immediately.
    Tensors made from Python numbers or numpy (`torch.tensor`, `torch.from_numpy`) are real. Inside the
    context the `device` of a lazy tensor is its future device, outside of it the meta device.

    Args:
        default_device: Device of tensors that are made without a device. Default: torch's.

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
        """Materialize a lazily built module or a part of one: `colossalai.lazy.materialize`."""
        return materialize(module, device=device)
