"""Precisions with parameters of 16 bits in the model, and float32 masters of the weights in the optimizer."""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from colossalai.amp._loss_scaling import MAX_CONSECUTIVE_SKIPS, DynamicLossScaler, LossScaler, check_scale
from colossalai.amp._masters import Casts
from colossalai.amp._optimizer import OptimizerWrapper
from colossalai.amp._precision import Precision, to_float32
from colossalai.context import check_bool, check_number
from colossalai.logging import get_dist_logger
from colossalai.tensor import with_full_precision, without_full_precision

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def tensors_of_batch_norms(model: nn.Module) -> set[int]:
    """Return the `id` of each parameter and buffer of the batch normalizations of a model."""
    found = [module for module in model.modules() if isinstance(module, _BATCH_NORMS)]
    return {id(tensor) for module in found for tensor in (*module.parameters(), *module.buffers())}


def cast_floats(nest: Any, dtype: torch.dtype) -> Any:
    """Return a nest of tuples, lists and dicts with its floating-point tensors in another dtype."""
    return tree_map_only(
        torch.Tensor, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, nest
    )


@contextmanager
def _without_alias_check() -> Iterator[None]:
    """Disable a check in the first call of compiled functions, which fails on subclasses of tensors."""
    from torch._functorch import config

    before = config.check_custom_op_aliasing
    config.check_custom_op_aliasing = False
    try:
        yield
    finally:
        config.check_custom_op_aliasing = before


class _LowWeights(Precision):
    """Parameters and activations in 16 bits, with float32 masters of the weights.

    Buffers and inputs keep their float32 values, and behave as tensors of 16 bits ([Note: full precision in
    16 bits]). The model's output is float32, so that the loss is computed in it. Batch normalization keeps
    parameters and statistics in float32: variances overflow float16, and torch's kernels accept 16-bit inputs
    along with them. See [Note: weights in two precisions].
    """

    dtype: torch.dtype

    @property
    def label(self) -> str:
        """See the base class."""
        return "bf16 with fp32 masters" if self.dtype == torch.bfloat16 else "fp16 with fp32 masters"

    @property
    def has_masters(self) -> bool:
        return True

    def casts(self, model: nn.Module, *, float32_grads: bool) -> Casts:
        return Casts(
            self.dtype,
            keep=tensors_of_batch_norms(model),
            grad_dtype=torch.float32 if float32_grads else self.dtype,
            with_masters=True,
            keeps_buffers=True,
        )

    def forward_context(self, device_type: str) -> AbstractContextManager[Any]:
        if torch.compiler.is_dynamo_compiling() or "torch._dynamo" not in sys.modules:
            return nullcontext()
        return _without_alias_check()

    def convert_input(self, inputs: Any) -> Any:
        return tree_map_only(torch.Tensor, self._converted, inputs)

    def convert_activation(self, output: Any) -> Any:
        return without_full_precision(output)

    def convert_output(self, output: Any) -> Any:
        return tree_map_only(torch.Tensor, to_float32, output)

    def _converted(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point() or tensor.dtype == self.dtype:
            return tensor
        low = tensor.to(self.dtype)
        if tensor.dtype not in (torch.float32, torch.float64) or type(tensor) is not torch.Tensor:
            return low
        # A copy, since the model can write to it. Values beyond the range of 16 bits are inf, as in `low`.
        return with_full_precision(torch.where(low.isinf(), low.float(), tensor.float()), self.dtype)


@dataclass(frozen=True)
class PureBF16(_LowWeights):
    """All in bfloat16, with float32 masters of the weights; bfloat16 needs no loss scale."""

    dtype = torch.bfloat16


@dataclass(frozen=True)
class NaiveFP16(_LowWeights):
    """All in float16, with float32 masters of the weights and a dynamic loss scale.

    Attributes:
        log_num_zeros_in_grad: Whether to log the number of zero elements of the gradients before every step.
        initial_scale: The first scale.
        min_scale: Lower bound of the scale.
        growth_factor: Factor of the scale after `growth_interval` steps without overflow.
        backoff_factor: Factor of the scale after overflows.
        growth_interval: Number of steps without overflow before the scale grows.
        hysteresis: Number of overflows since the last growth before the scale shrinks.
        max_scale: Upper bound of the scale.
        verbose: Whether to log every change of the scale.
        max_consecutive_skips: Number of consecutive skipped steps that stops training; 0 for no bound.
    """

    dtype = torch.float16

    log_num_zeros_in_grad: bool = False
    initial_scale: float = 2.0**32
    min_scale: float = 1.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 1000
    hysteresis: int = 2
    max_scale: float = 2.0**32
    verbose: bool = False
    _: KW_ONLY
    max_consecutive_skips: int = MAX_CONSECUTIVE_SKIPS

    def __post_init__(self) -> None:
        check_bool(self.log_num_zeros_in_grad, "log_num_zeros_in_grad")
        check_bool(self.verbose, "verbose")
        least = check_number(self.min_scale, "min_scale", least=0)
        most = check_number(self.max_scale, "max_scale", least=0, positive=True)
        check_scale(self.initial_scale, "initial_scale", least=least, most=most)
        self.make_scaler()  # it checks the other options

    def make_scaler(self) -> LossScaler:
        return DynamicLossScaler(
            init_scale=self.initial_scale,
            growth_factor=self.growth_factor,
            backoff_factor=self.backoff_factor,
            growth_interval=self.growth_interval,
            hysteresis=self.hysteresis,
            min_scale=self.min_scale,
            max_scale=self.max_scale,
            max_consecutive_skips=self.max_consecutive_skips,
            verbose=self.verbose,
        )

    def step_hooks(self) -> tuple[Callable[[OptimizerWrapper], None], ...]:
        return (_log_num_zeros,) if self.log_num_zeros_in_grad else ()


def _log_num_zeros(optimizer: OptimizerWrapper) -> None:
    num_zeros = optimizer.count_zero_grads()
    get_dist_logger().info(f"{num_zeros} elements of the gradients are 0", ranks=[0])
