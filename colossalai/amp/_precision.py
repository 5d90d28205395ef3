"""Mixed precision as the hooks of a training step: what surrounds the forward, and how the loss is scaled.

A `Precision` says what a precision is; it is frozen and can be shared. `make_scaler` gives each optimizer the
state that goes with it.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from colossalai.amp._masters import Masters, cast_parameters
from colossalai.amp._optimizer import OptimizerWrapper
from colossalai.amp._scaler import DynamicLossScaler, LossScaler
from colossalai.logging import get_dist_logger

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class Precision:
    """What a precision does around a step; the base class leaves everything as the model has it.

    Attributes:
        has_masters: Whether `convert_model` gives parameters float32 masters.
    """

    has_masters: ClassVar[bool] = False

    def forward_context(self, device_type: str) -> AbstractContextManager[Any]:
        """Return the context in which the forward runs."""
        return nullcontext()

    def convert_model(self, model: nn.Module, *, float32_grads: bool) -> Masters:
        """Bring a model's parameters to the precision, in place; return the masters of those that get one.

        Args:
            model: The model, on its device, before anything is done with its parameters.
            float32_grads: Whether gradients may accumulate in float32 while parameters are lower. Torch's
                `DistributedDataParallel` cannot reduce such gradients.
        """
        return Masters()

    def convert_input(self, inputs: Any) -> Any:
        """Convert what the forward takes: any nest of tuples, lists and dicts."""
        return inputs

    def convert_output(self, output: Any) -> Any:
        """Convert what the forward returned."""
        return output

    def make_scaler(self) -> LossScaler:
        """Return a new loss scaler for one optimizer."""
        return LossScaler()

    def before_step(self, optimizer: OptimizerWrapper) -> None:
        """Look at the true gradients of a step that will be made."""


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


@dataclass(frozen=True, kw_only=True)
class NaiveFP16(Precision):
    """All in float16, with float32 masters of the weights and a dynamic loss scale.

    Parameters, inputs and outputs are float16; what the model returns is float32 again, so that the loss is
    computed in it. Batch normalization keeps parameters and statistics in float32: variances overflow
    float16, and torch's kernels take float16 inputs along with them. See [Note: who holds the weights].

    Attributes:
        log_num_zeros_in_grad: Log before every step how many elements of the gradients are 0.
        initial_scale: The first scale.
        min_scale: The scale does not shrink below it.
        growth_factor: Factor of the scale after `growth_interval` steps without overflow.
        backoff_factor: Factor of the scale after overflows.
        growth_interval: Number of steps without overflow before the scale grows.
        hysteresis: Number of overflows since the last growth before the scale shrinks.
        max_scale: The scale does not grow above it.
        verbose: Log every skipped step and every change of the scale.
    """

    has_masters: ClassVar[bool] = True

    log_num_zeros_in_grad: bool = False
    initial_scale: float = 2.0**32
    min_scale: float = 1.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 1000
    hysteresis: int = 2
    max_scale: float = 2.0**32
    verbose: bool = False

    def __post_init__(self) -> None:
        self.make_scaler()  # it checks the options

    def convert_model(self, model: nn.Module, *, float32_grads: bool) -> Masters:
        kept = [module for module in model.modules() if isinstance(module, _BATCH_NORMS)]
        return cast_parameters(
            model,
            torch.float16,
            keep={id(tensor) for module in kept for tensor in (*module.parameters(), *module.buffers())},
            grad_dtype=torch.float32 if float32_grads else torch.float16,
        )

    def convert_input(self, inputs: Any) -> Any:
        return tree_map_only(torch.Tensor, _to_float16, inputs)

    def convert_output(self, output: Any) -> Any:
        return tree_map_only(torch.Tensor, _to_float32, output)

    def make_scaler(self) -> LossScaler:
        return DynamicLossScaler(
            init_scale=self.initial_scale,
            growth_factor=self.growth_factor,
            backoff_factor=self.backoff_factor,
            growth_interval=self.growth_interval,
            hysteresis=self.hysteresis,
            min_scale=self.min_scale,
            max_scale=self.max_scale,
            verbose=self.verbose,
        )

    def before_step(self, optimizer: OptimizerWrapper) -> None:
        if self.log_num_zeros_in_grad:
            num_zeros = optimizer.count_zero_grads()
            get_dist_logger().info(f"{num_zeros} elements of the gradients are 0", ranks=[0])


def _to_float16(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.half() if tensor.is_floating_point() else tensor


def _to_float32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
