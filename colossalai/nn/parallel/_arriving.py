"""Parameters between the model that a user built and the data method that takes them.

They may be lazy, on another device than the one that computes, or of another dtype than that of the plan.
Most methods take all of them at once. One that keeps a part of each takes them in runs, so that no device and
no tier ever has more than a run as a whole.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol, final

import torch
from torch import nn

from colossalai.amp import Casts, Masters
from colossalai.tensor import keep_dtype, keeps_dtype, row_cache_modules


class LazyValues(Protocol):
    """Source of the values of a lazily built module: first `others`, then `params` in runs, then `end`."""

    def others(self) -> None:
        """Materialize buffers."""

    def params(self, params: Iterable[nn.Parameter]) -> None:
        """Give values to some parameters."""

    def end(self) -> None:
        """Called once all parameters have their values."""


@final
class ArrivingParams:
    """The parameters and buffers of a model, each in its final form.

    They are materialized by `all`, or by `buffers`, then `some` for each run, then `end`. After that each
    stays the same object, and is neither moved nor cast again.

    Args:
        module: The model.
        casts: The dtypes that they get.
        device: Their device.
        lazy: Materializes the model; None: it has its values.

    Attributes:
        device: As given.
    """

    def __init__(
        self, module: nn.Module, casts: Casts, device: torch.device, *, lazy: LazyValues | None = None
    ) -> None:
        self.device = device
        self._module = module
        self._casts = casts
        self._lazy = lazy
        self._are_on_device = False
        self._masters: dict[nn.Parameter, nn.Parameter] = {}
        for part in row_cache_modules(module):  # which no data method takes
            part.to(device)

    def dtype_of(self, param: nn.Parameter) -> torch.dtype:
        """Return the dtype that a parameter will have."""
        return self._casts.dtype_of(param)

    def has_master(self, param: nn.Parameter) -> bool:
        """Return whether a parameter gets a float32 master."""
        return self._casts.has_master(param)

    def bring_all(self) -> None:
        """Give everything its values, on the device, before anything is cast."""
        if self._are_on_device:
            return
        if self._lazy is not None:
            self._lazy.others()
            self._lazy.params(self._module.parameters())
            self._lazy.end()
        self._module.to(self.device)
        self._are_on_device = True

    def all(self) -> None:
        """Let everything come; `masters` are there then."""
        self.bring_all()
        self._masters = self._casts.cast(self._module.parameters())  # a tied one comes once
        self._casts.cast_buffers(self._module)

    def masters(self) -> Masters:
        """Return the masters of all that came by `all`."""
        return Masters(self._masters)

    def buffers(self) -> None:
        """Materialize buffers."""
        if not self._are_on_device:
            if self._lazy is not None:
                self._lazy.others()
            for part in self._module.modules():
                for name, buffer in part._buffers.items():
                    if buffer is not None:
                        moved = buffer.to(self.device)
                        part._buffers[name] = keep_dtype(moved) if keeps_dtype(buffer) else moved
        self._casts.cast_buffers(self._module)

    def bring(self, params: Sequence[nn.Parameter]) -> None:
        """Give some parameters their values, on the device; `cast` is next."""
        if self._are_on_device:
            return
        if self._lazy is not None:
            self._lazy.params(params)
        for param in params:
            param.data = param.data.to(self.device)
            if param.grad is not None:
                param.grad = param.grad.to(self.device)

    def cast(self, params: Sequence[nn.Parameter]) -> dict[nn.Parameter, nn.Parameter]:
        """Let parameters that were brought have their dtype; return the masters of those that get one."""
        return self._casts.cast(params)

    def end(self) -> None:
        """Called once all parameters are materialized."""
        if self._lazy is not None and not self._are_on_device:
            self._lazy.end()
