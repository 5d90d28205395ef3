"""Mixed precision as the hooks of a training step: what surrounds the forward, and how the loss is scaled.

A `Precision` says what a precision is; it is frozen and can be shared. `make_scaler` gives each optimizer the
state that goes with it.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from colossalai.amp._scaler import DynamicLossScaler, LossScaler


class Precision:
    """What a precision does around a step; the base class leaves everything as the model has it."""

    def forward_context(self, device_type: str) -> AbstractContextManager[Any]:
        """Return the context in which the forward runs."""
        return nullcontext()

    def convert_output(self, output: Any) -> Any:
        """Convert what the forward returned."""
        return output

    def make_scaler(self) -> LossScaler:
        """Return a new loss scaler for one optimizer."""
        return LossScaler()


@dataclass(frozen=True)
class FullPrecision(Precision):
    """The model computes in the dtype of its parameters."""


class _Autocast(Precision):
    """Parameters stay as they are; torch picks the dtype of each operation.

    What the model returns is float32 again, so that the loss is computed in it.
    """

    dtype: torch.dtype

    def forward_context(self, device_type: str) -> AbstractContextManager[Any]:
        return torch.autocast(device_type, dtype=self.dtype)

    def convert_output(self, output: Any) -> Any:
        return tree_map_only(torch.Tensor, _to_float32, output)


@dataclass(frozen=True)
class BF16Autocast(_Autocast):
    """Autocast to bfloat16, which has the range of float32 and so needs no loss scaling."""

    dtype = torch.bfloat16


@dataclass(frozen=True)
class FP16Autocast(_Autocast):
    """Autocast to float16 with a dynamic loss scale.

    Attributes:
        init_scale: The first scale.
        growth_factor: Factor of the scale after `growth_interval` steps without overflow.
        backoff_factor: Factor of the scale after an overflow.
        growth_interval: Number of steps without overflow before the scale grows.
        enabled: False leaves the loss unscaled.
    """

    dtype = torch.float16

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True

    def make_scaler(self) -> LossScaler:
        if not self.enabled:
            return LossScaler()
        return DynamicLossScaler(
            init_scale=self.init_scale,
            growth_factor=self.growth_factor,
            backoff_factor=self.backoff_factor,
            growth_interval=self.growth_interval,
        )


def _to_float32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
