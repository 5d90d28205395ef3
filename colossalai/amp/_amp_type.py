"""Mixed-precision modes of a config, and the conversion of single components without `initialize`."""

from collections.abc import Callable, Mapping
from enum import Enum
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from colossalai._aliases import NAMES
from colossalai._lazy import find_name
from colossalai._not_landed import FP8
from colossalai.amp._gradients import OptimizerGroup
from colossalai.amp._low_weights import NaiveFP16, PureBF16
from colossalai.amp._optimizer import OptimizerWrapper
from colossalai.amp._precision import BF16Autocast, FP16Autocast, FullPrecision, Precision, PrecisionModule
from colossalai.context import ConfigException, check_bool, check_keys, check_mapping, check_number
from colossalai.logging import get_dist_logger


class AMP_TYPE(Enum):
    """Mixed-precision modes: `fp16=dict(mode=AMP_TYPE.TORCH)`."""

    TORCH = "torch"
    BF16 = "bf16"
    NAIVE = "naive"
    APEX = "apex"


def bf16(*, master_weights: bool = False) -> Precision:
    """Return one of the two ways to use bfloat16.

    Args:
        master_weights: Hold the model in bfloat16, with float32 masters in the optimizer. Default: autocast.

    Raises:
        ValueError: `master_weights` is not a bool.
    """
    check_bool(master_weights, "master_weights")
    return PureBF16() if master_weights else BF16Autocast()


_PRECISIONS: Mapping[AMP_TYPE, Callable[..., Precision]] = {
    AMP_TYPE.TORCH: FP16Autocast,
    AMP_TYPE.BF16: bf16,
    AMP_TYPE.NAIVE: NaiveFP16,
}
_CLIPPED = {AMP_TYPE.NAIVE}  # modes with `clip_grad_norm` among their options in a config


def precision_of(mode: AMP_TYPE | str, options: Mapping[str, Any] | None = None) -> Precision:
    """Return the precision of a mode with its options.

    Raises:
        ValueError: `mode` is unknown, or `options` has an option or a value that the mode does not accept.
    """
    amp_type = _amp_type(mode, "the mode")
    try:
        return _factory(amp_type)(**(options or {}))
    except TypeError as error:
        raise ValueError(
            f"the options {dict(options or {})} do not fit AMP_TYPE.{amp_type.name}: {error}"
        ) from error


def precision_of_config(fp16: Mapping[str, Any]) -> Precision:
    """Return the precision of `fp16=dict(mode=..., ...)` of a config.

    Raises:
        ConfigException: `fp16` is not a dict, its mode is missing or unknown, or it has a key or a value that
            the mode does not accept.
    """
    check_mapping(fp16, "fp16", example="fp16=dict(mode=AMP_TYPE.TORCH)")
    if "mode" not in fp16:
        raise ConfigException("fp16 has no mode: write fp16=dict(mode=AMP_TYPE.TORCH)")
    options = {key: value for key, value in fp16.items() if key != "mode"}
    if fp16["mode"] is None:
        if options:
            get_dist_logger().log_once(
                f"fp16.mode is None, which means no mixed precision: {[*options]} of fp16 have no effect",
                ranks=[0],
            )
        return FullPrecision()
    try:
        amp_type = _amp_type(fp16["mode"], "mode")
        known = [*signature(_factory(amp_type)).parameters]
        if amp_type in _CLIPPED:
            known.append("clip_grad_norm")
            check_number(options.pop("clip_grad_norm", 0.0), "clip_grad_norm", least=0)
        check_keys(options, ["mode", *known], f"(mode {amp_type.value!r})")
        return _factory(amp_type)(**options)
    except ValueError as error:
        text = str(error)
        raise ConfigException(f"fp16 {text}" if text.startswith("(") else f"fp16.{text}") from error


def _factory(amp_type: AMP_TYPE) -> Callable[..., Precision]:
    """Return the class or function of a mode; that of Apex's levels is imported at the first call."""
    if amp_type is AMP_TYPE.APEX:
        found: Callable[..., Precision] = find_name(__package__, NAMES[__package__], "ApexPrecision")
        return found
    return _PRECISIONS[amp_type]


def _amp_type(mode: Any, name: str) -> AMP_TYPE:
    value = mode.value if isinstance(mode, Enum) else mode
    if isinstance(value, str) and value.lower().startswith("fp8"):
        raise ValueError(f"{name} is {mode!r}. {FP8}")
    if value not in tuple(each.value for each in AMP_TYPE):
        raise ValueError(
            f"{name} is {mode!r}; it must be one of {', '.join(map(str, AMP_TYPE))} (or "
            f"{', '.join(repr(each.value) for each in AMP_TYPE)})"
        )
    return AMP_TYPE(value)


def convert_to_amp(
    model: nn.Module,
    optimizer: Optimizer,
    criterion: Callable[..., torch.Tensor],
    mode: AMP_TYPE = AMP_TYPE.TORCH,
    amp_config: Mapping[str, Any] | None = None,
) -> tuple[nn.Module, OptimizerWrapper, Callable[..., torch.Tensor]]:
    """Give a model, an optimizer and a criterion mixed precision without `colossalai.initialize`.

    Call `optimizer.backward(loss)` instead of `loss.backward()`. The criterion is not changed: the model's
    output is float32. All ranks of the default process group, if there is one, decide together on overflow.

    Args:
        model: The model; its parameters keep their dtype, unless the mode casts them.
        optimizer: Its optimizer.
        criterion: The loss function.
        mode: The mixed-precision mode.
        amp_config: Options of the mode, as in `fp16=dict(mode=..., ...)` of a config, and `clip_grad_norm`,
            the bound of the gradient norm in every step.

    Raises:
        ValueError: `mode` is unknown, `amp_config` has an option or a value that the mode does not accept, or
            `model` or `optimizer` is of another type or converted already.
    """
    options = {key: value for key, value in (amp_config or {}).items() if key != "mode"}
    max_norm = options.pop("clip_grad_norm", 0.0)
    precision = precision_of(mode, options)
    _check_components(model, optimizer)
    names = {param: name for name, param in model.named_parameters()}
    # Not float32: the caller can still wrap the model in DistributedDataParallel.
    masters = precision.convert_model(model, float32_grads=False).replace_params(optimizer)
    device = next((param.device for param in model.parameters()), torch.device("cpu"))
    wrapped = OptimizerWrapper(
        optimizer,
        group=OptimizerGroup(
            precision.make_scaler(), ranks=dist.group.WORLD if dist.is_initialized() else None
        ),
        param_names=names,
        masters=masters,
        before_step=precision.step_hooks(),
        max_norm=max_norm,
    )
    return PrecisionModule(model, precision, device.type), wrapped, criterion


def convert_to_torch_amp(
    model: nn.Module,
    optimizer: Optimizer,
    criterion: Callable[..., torch.Tensor] | None = None,
    amp_config: Mapping[str, Any] | None = None,
) -> tuple[nn.Module, OptimizerWrapper, Callable[..., torch.Tensor] | None]:
    """Give components autocast to float16 with a dynamic loss scale; see `convert_to_amp`.

    Args:
        model: The model; its parameters keep their dtype.
        optimizer: Its optimizer.
        criterion: The loss function, returned unchanged.
        amp_config: Options as in `fp16=dict(mode=AMP_TYPE.TORCH, ...)` of a config.

    Raises:
        ValueError: `amp_config` has an option or a value that the mode does not accept, or `model` or
            `optimizer` is of another type or converted already.
    """
    converted, wrapped, _ = convert_to_amp(model, optimizer, _no_criterion, AMP_TYPE.TORCH, amp_config)
    return converted, wrapped, criterion


def convert_to_naive_amp(
    model: nn.Module, optimizer: Optimizer, amp_config: Mapping[str, Any] | None = None
) -> tuple[nn.Module, OptimizerWrapper]:
    """Give a model and an optimizer float16 with float32 masters of the weights; see `convert_to_amp`.

    Args:
        model: The model; it is cast to float16 in place.
        optimizer: Its optimizer.
        amp_config: Options as in `fp16=dict(mode=AMP_TYPE.NAIVE, ...)` of a config.

    Raises:
        ValueError: `amp_config` has an option or a value that the mode does not accept, or `model` or
            `optimizer` is of another type or converted already.
    """
    converted, wrapped, _ = convert_to_amp(model, optimizer, _no_criterion, AMP_TYPE.NAIVE, amp_config)
    return converted, wrapped


def convert_to_apex_amp(
    model: nn.Module, optimizer: Optimizer, amp_config: Mapping[str, Any] | None = None
) -> tuple[nn.Module, OptimizerWrapper]:
    """Give a model and an optimizer one of Apex's optimization levels; see `convert_to_amp`.

    Args:
        model: The model; O0, O2 and O3 cast it in place.
        optimizer: Its optimizer.
        amp_config: Options as in `fp16=dict(mode=AMP_TYPE.APEX, ...)` of a config.

    Raises:
        ValueError: `amp_config` has an option or a value that the mode does not accept, or `model` or
            `optimizer` is of another type or converted already.
    """
    converted, wrapped, _ = convert_to_amp(model, optimizer, _no_criterion, AMP_TYPE.APEX, amp_config)
    return converted, wrapped


def _check_components(model: Any, optimizer: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"the model is a {type(model).__name__}; it must be a torch.nn.Module")
    if not isinstance(optimizer, Optimizer):
        raise ValueError(f"the optimizer is a {type(optimizer).__name__}; it must be a torch.optim.Optimizer")
    if isinstance(optimizer, OptimizerWrapper):
        raise ValueError(
            "this optimizer has its precision already, from boost, initialize or a conversion: pass the one "
            "you built yourself"
        )


def _no_criterion(*_: torch.Tensor) -> torch.Tensor:
    raise AssertionError("this criterion is not called")
