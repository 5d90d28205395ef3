"""Mixed precision as hooks of a training step: the context of the forward, and loss scaling.

A `Precision` is frozen and can be shared. `make_scaler` makes the state for each model.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass
from inspect import signature
from pathlib import Path
from typing import Any, final

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from colossalai.amp._loss_scaling import MAX_CONSECUTIVE_SKIPS, DynamicLossScaler, LossScaler
from colossalai.amp._masters import Casts, Masters
from colossalai.amp._optimizer import OptimizerWrapper
from colossalai.context import check_bool
from colossalai.logging import get_dist_logger

_SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16"}


class Precision:
    """Hooks of a precision around a step; the base class changes nothing."""

    @property
    def label(self) -> str:
        """The name of the precision in the log; empty: the dtype of the model's parameters."""
        return type(self).__name__

    @property
    def has_masters(self) -> bool:
        """Whether parameters get float32 masters."""
        return False

    def resolve(self, model: nn.Module, device: torch.device, agree: Callable[[bool], bool]) -> "Precision":
        """Return the precision for a model on a device: itself, unless it depends on these two.

        Args:
            model: The model.
            device: The device of this rank.
            agree: Returns the verdict of rank 0 on every rank; collective.
        """
        return self

    def forward_context(self, device_type: str) -> AbstractContextManager[Any]:
        """Return the context in which the forward runs."""
        return nullcontext()

    def casts(self, model: nn.Module, *, float32_grads: bool) -> Casts:
        """Return the casts of a model's parameters and buffers, which are applied before all methods.

        Args:
            model: The model, whose parameters need not have values yet.
            float32_grads: Whether gradients can accumulate in float32 while parameters have a lower
                precision. Torch's `DistributedDataParallel` cannot reduce such gradients.
        """
        return Casts()

    @final
    def convert_model(self, model: nn.Module, *, float32_grads: bool) -> Masters:
        """Cast a whole model to the precision, in place; return the masters of its parameters.

        Args:
            model: The model, on its device, before any method is applied to its parameters.
            float32_grads: See `casts`.
        """
        casts = self.casts(model, float32_grads=float32_grads)
        masters = casts.cast(model.parameters())  # tied parameters are listed once
        casts.cast_buffers(model)
        return Masters(masters)

    def convert_input(self, inputs: Any) -> Any:
        """Convert the input of the forward: any nest of tuples, lists and dicts."""
        return inputs

    def convert_activation(self, output: Any) -> Any:
        """Convert the output of a pipeline stage, before it is sent to the next one."""
        return output

    def convert_output(self, output: Any) -> Any:
        """Convert the output of the forward."""
        return output

    def make_scaler(self) -> LossScaler:
        """Return a new loss scaler for the optimizers of one model."""
        return LossScaler()

    def step_hooks(self) -> tuple[Callable[[OptimizerWrapper], None], ...]:
        """Return hooks that run before each update, when the gradients are true."""
        return ()


@dataclass(frozen=True)
class FullPrecision(Precision):
    """The model computes in the dtype of its parameters.

    Attributes:
        returns_float32: Whether outputs in 16 bits are converted to float32.
    """

    returns_float32: bool = False

    @property
    def label(self) -> str:
        """See the base class."""
        return ""

    def convert_output(self, output: Any) -> Any:
        return tree_map_only(torch.Tensor, to_float32, output) if self.returns_float32 else output


class _Autocast(Precision):
    """Parameters keep their dtype; torch chooses the dtype of each operation.

    The model's output is float32, so that the loss is computed in it.
    """

    dtype: torch.dtype

    @property
    def label(self) -> str:
        """See the base class."""
        return f"{_SHORT[self.dtype]} autocast"

    def forward_context(self, device_type: str) -> AbstractContextManager[Any]:
        return torch.autocast(device_type, dtype=self.dtype)

    def convert_output(self, output: Any) -> Any:
        return tree_map_only(torch.Tensor, to_float32, output)


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
        max_consecutive_skips: Number of consecutive skipped steps that stops training; 0 for no bound.
    """

    dtype = torch.float16

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    _: KW_ONLY
    enabled: bool = True
    max_consecutive_skips: int = MAX_CONSECUTIVE_SKIPS

    def __post_init__(self) -> None:
        check_bool(self.enabled, "enabled")
        self.make_scaler()  # it checks the other options

    def make_scaler(self) -> LossScaler:
        if not self.enabled:
            return LossScaler()
        return DynamicLossScaler(
            init_scale=self.init_scale,
            growth_factor=self.growth_factor,
            backoff_factor=self.backoff_factor,
            growth_interval=self.growth_interval,
            max_consecutive_skips=self.max_consecutive_skips,
        )


@dataclass(frozen=True)
class AutoPrecision(Precision):
    """Bfloat16 on devices that are fast at it, full precision on others; decided before a model is cast.

    A model whose trained parameters have 16 bits already gets bfloat16 everywhere: in full precision it
    would not be cast, and have no float32 masters.

    Attributes:
        bfloat16: The precision on fast devices.
    """

    bfloat16: Precision

    @property
    def label(self) -> str:
        """See the base class."""
        return "auto"

    def resolve(self, model: nn.Module, device: torch.device, agree: Callable[[bool], bool]) -> Precision:
        """See the base class. Rank 0 logs the choice and its reason once."""
        is_fast, reason = is_fast_at_bfloat16(device)
        if any(param.requires_grad and param.dtype in _SHORT for param in model.parameters()):
            is_fast, reason = True, "the model has parameters of 16 bits"
        is_bfloat16 = agree(is_fast)
        chosen, other = ("bf16", "fp32") if is_bfloat16 else ("fp32", "bf16")
        get_dist_logger().log_once(
            f"precision='auto' is {chosen!r} here: {reason}. precision={other!r} would be the other one",
            level="INFO",
            ranks=[0],
        )
        return self.bfloat16 if is_bfloat16 else FullPrecision()

    def casts(self, model: nn.Module, *, float32_grads: bool) -> Casts:
        raise AssertionError("this precision is resolved first, by `Plan.resolve`")


def is_fast_at_bfloat16(
    device: torch.device, *, features: Mapping[str, Any] | None = None
) -> tuple[bool, str]:
    """Return whether matrix products are faster in bfloat16 than in float32 on a device, and the reason.

    The features of a processor decide, without a measurement: equal machines, and equal runs, give equal
    results. Without amx_bf16 and avx512_bf16 torch widens the operands of each product, which took five times
    as long as float32 with AVX-512. On an Intel processor avx512_bf16 alone took 1.6 times as long. The
    figures are from benchmarks/bfloat16.py.

    Args:
        device: The device.
        features: The features of the processor, as `torch.cpu.get_capabilities` returns them. Default: those
            of this machine.
    """
    if device.type != "cpu":
        # Without emulation: a device without bfloat16 units counts as one without support.
        supports = getattr(getattr(torch, device.type, None), "is_bf16_supported", None)
        if supports is None:
            return False, f"torch does not report whether the device ({device.type}) supports bfloat16"
        emulates = "including_emulation"
        options = {emulates: False} if emulates in signature(supports).parameters else {}
        if supports(**options):
            return True, f"the device ({device.type}) supports bfloat16"
        return False, f"the device ({device.type}) does not support bfloat16"
    if not torch.backends.mkldnn.is_available():
        return False, "this build of torch lacks oneDNN, which multiplies in bfloat16 on processors"
    if features is None:
        features = cpu_features()
    if features.get("amx_bf16"):
        return True, "the processor has amx_bf16"
    if not features.get("avx512_bf16"):
        return False, "the processor has neither amx_bf16 nor avx512_bf16"
    if "intel" in str(features.get("cpu_name", "")).lower():
        return False, "the processor, of Intel, has avx512_bf16 without amx_bf16"
    return True, "the processor has avx512_bf16"


def cpu_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> Mapping[str, Any]:
    """Return the features of the processor, with the names of `torch.cpu.get_capabilities`.

    Args:
        cpuinfo: The report of Linux, for versions of torch without that function. Without both the result is
            empty.
    """
    report = getattr(torch.cpu, "get_capabilities", None)
    if report is not None:
        found: Mapping[str, Any] = report()
        return found
    try:
        lines = cpuinfo.read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    except OSError:
        return {}
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return {"cpu_name": fields.get("vendor_id", ""), **dict.fromkeys(fields.get("flags", "").split(), True)}


def to_float32(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of 16 bits as float32; others are returned unchanged."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def refuse_misfit(precision: Precision, *, shards_parameters: bool) -> None:
    """Raise if a precision cannot be combined with sharded parameters.

    Args:
        precision: The precision.
        shards_parameters: Whether a rank holds only slices of the parameters.

    Raises:
        ValueError: `precision` keeps float32 masters, and `shards_parameters` is set.
    """
    if shards_parameters and precision.has_masters:
        raise ValueError(
            "float32 masters of the weights and sharded parameters cannot be combined: each rank's slice is "
            "its master already; use the precision 'fp16' or 'bf16', or keep the parameters whole"
        )


class PrecisionModule(nn.Module):
    """A module whose forward runs in the context of a precision, which converts input and output.

    Args:
        module: The module.
        precision: The precision.
        device_type: Type of the device that the module is on.
    """

    def __init__(self, module: nn.Module, precision: Precision, device_type: str) -> None:
        super().__init__()
        self.module = module
        self.precision = precision
        self.device_type = device_type

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        with self.precision.forward_context(self.device_type):
            args, kwargs = self.precision.convert_input((args, kwargs))
            output = self.module(*args, **kwargs)
        return self.precision.convert_output(output)


def apply_precision(module: nn.Module, precision: Precision, device_type: str) -> nn.Module:
    """Return a module that runs `module` in a precision; `module` itself in full precision."""
    return module if precision == FullPrecision() else PrecisionModule(module, precision, device_type)
