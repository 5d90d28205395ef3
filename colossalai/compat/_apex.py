"""NVIDIA Apex's optimization levels, built on torch.

Apex's own amp is deprecated and gone; its levels have a meaning that can be had without it:

    level  model     batch norm  forward              masters  loss scale
    O0     float32   float32     float32              no       1
    O1     float32   float32     autocast to float16  no       dynamic
    O2     float16   float32     float16              yes      dynamic
    O3     float16   float16     float16              no       1

Each option overrides the level. Outputs of the model are float32, as in Apex under O0, O2 and O3; under O1
Apex computes losses in float32, which is equivalent. Apart from Apex: with a fixed loss
scale, too, a step with an overflow is skipped (Apex makes it, and the weights are lost).
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from colossalai.amp import (
    MAX_CONSECUTIVE_SKIPS,
    Casts,
    DynamicLossScaler,
    LossScaler,
    Precision,
    StaticLossScaler,
    cast_floats,
    tensors_of_batch_norms,
    to_float32,
)
from colossalai.booster.mixed_precision import MixedPrecision
from colossalai.context import check_bool, check_number, check_positive
from colossalai.logging import get_dist_logger

_HALVES = (torch.float16, torch.bfloat16)
_FIRST_SCALE = 2.0**16
_MAX_SCALE = 2.0**24


@dataclass(frozen=True)
class _Level:
    """A level with its overriding options."""

    model_dtype: torch.dtype | None
    autocast: bool
    keeps_batch_norm: bool
    masters: bool
    loss_scale: float | str

    @property
    def is_low(self) -> bool:
        """Whether the model itself holds 16 bits."""
        return self.model_dtype in _HALVES


_LEVELS = {
    "O0": _Level(torch.float32, False, False, False, 1.0),
    "O1": _Level(None, True, False, False, "dynamic"),
    "O2": _Level(torch.float16, False, True, True, "dynamic"),
    "O3": _Level(torch.float16, False, False, False, 1.0),
}


@dataclass(frozen=True)
class ApexPrecision(Precision):
    """One of Apex's optimization levels; None leaves an option to the level.

    Attributes:
        opt_level: "O0", "O1", "O2" or "O3".
        cast_model_type: The dtype of parameters, buffers and inputs; not under O1.
        patch_torch_functions: Let torch choose the dtype of each operation (autocast); under O1 only.
        keep_batchnorm_fp32: Leave batch normalizations in float32; not under O1.
        master_weights: Let the optimizer work on float32 copies of the weights; not under O1.
        loss_scale: "dynamic", or a fixed number above 0.
        cast_model_outputs: The dtype of the model's outputs; None: float32.
        num_losses: Number of losses. They share one scale: more than one has no effect.
        verbosity: 0 for silence, 1 to warn of skipped steps, 2 to log every change of the scale.
        min_loss_scale: A dynamic scale does not shrink below it; None for no bound.
        max_loss_scale: A dynamic scale does not grow above it.
        max_consecutive_skips: So many skipped steps in a row stop training; 0 for no bound.
        enabled: False leaves everything as it is.

    Raises:
        ValueError: `opt_level` is unknown, or an option has another type, is out of range, or does not go
            with the level.
    """

    opt_level: str = "O1"
    cast_model_type: torch.dtype | None = None
    patch_torch_functions: bool | None = None
    keep_batchnorm_fp32: bool | None = None
    master_weights: bool | None = None
    loss_scale: float | str | None = None
    cast_model_outputs: torch.dtype | None = None
    num_losses: int = 1
    verbosity: int = 1
    min_loss_scale: float | None = None
    max_loss_scale: float = _MAX_SCALE
    _: KW_ONLY
    max_consecutive_skips: int = MAX_CONSECUTIVE_SKIPS
    enabled: bool = True

    def __post_init__(self) -> None:
        _check(self)
        self.make_scaler()  # it checks the rest
        if self.enabled:
            for text in _without_effect(self):
                get_dist_logger().log_once(f"fp16_apex, {self.opt_level}: {text}", ranks=[0])

    @property
    def has_masters(self) -> bool:
        return self.enabled and _level_of(self).masters

    def forward_context(self, device_type: str) -> AbstractContextManager[Any]:
        if self.enabled and _level_of(self).autocast:
            return torch.autocast(device_type, dtype=torch.float16)
        return nullcontext()

    def casts(self, model: nn.Module, *, float32_grads: bool) -> Casts:
        level = _level_of(self)
        if not self.enabled or level.model_dtype is None:
            return Casts()
        return Casts(
            level.model_dtype,
            keep=tensors_of_batch_norms(model) if level.keeps_batch_norm else (),
            grad_dtype=torch.float32 if float32_grads else level.model_dtype,
            with_masters=level.masters,
        )

    def convert_input(self, inputs: Any) -> Any:
        dtype = _level_of(self).model_dtype
        return cast_floats(inputs, dtype) if self.enabled and dtype is not None else inputs

    def convert_output(self, output: Any) -> Any:
        if not self.enabled:
            return output
        if self.cast_model_outputs is not None:
            return cast_floats(output, self.cast_model_outputs)
        return tree_map_only(torch.Tensor, to_float32, output)

    def make_scaler(self) -> LossScaler:
        level = _level_of(self)
        if not self.enabled or (level.loss_scale == 1.0 and not (level.is_low or level.autocast)):
            return LossScaler()
        quiet = self.verbosity == 0
        if level.loss_scale != "dynamic":
            scale = float(level.loss_scale)
            return StaticLossScaler(scale, max_consecutive_skips=self.max_consecutive_skips, quiet=quiet)
        return DynamicLossScaler(
            init_scale=max(min(_FIRST_SCALE, self.max_loss_scale), self.min_loss_scale or 0.0),
            growth_factor=2.0,
            backoff_factor=0.5,
            growth_interval=2000,
            min_scale=self.min_loss_scale or 0.0,
            max_scale=self.max_loss_scale,
            max_consecutive_skips=self.max_consecutive_skips,
            verbose=self.verbosity > 1,
            quiet=quiet,
        )


@dataclass(frozen=True)
class FP16ApexMixedPrecision(ApexPrecision, MixedPrecision):
    """One of the optimization levels of NVIDIA Apex, built on torch.

    The options are those of `ApexPrecision`; the first of them is the level. O0 is float32; O1 autocast
    to float16; O2 a float16 model with float32 batch normalization and masters of the weights; O3 a float16
    model and nothing else. O1 and O2 scale the loss dynamically.
    """

    def precision(self) -> Precision:
        """See the base class."""
        return ApexPrecision(**vars(self))


def _level_of(options: ApexPrecision) -> _Level:
    """Return the level with its overriding options."""
    level = _LEVELS[options.opt_level]
    dtype = level.model_dtype if options.cast_model_type is None else options.cast_model_type
    is_low = dtype in _HALVES
    return _Level(
        model_dtype=dtype,
        autocast=_either(options.patch_torch_functions, level.autocast),
        keeps_batch_norm=_either(options.keep_batchnorm_fp32, level.keeps_batch_norm),
        masters=is_low and _either(options.master_weights, level.masters),
        loss_scale=level.loss_scale if options.loss_scale is None else options.loss_scale,
    )


def _either(option: bool | None, default: bool) -> bool:
    return default if option is None else option


def _check(options: ApexPrecision) -> None:
    if options.opt_level not in _LEVELS:
        raise ValueError(f"opt_level is {options.opt_level!r}; it must be one of {', '.join(_LEVELS)}")
    for name in ("cast_model_type", "cast_model_outputs"):
        dtype = getattr(options, name)
        if dtype not in (None, torch.float32, *_HALVES):
            raise ValueError(f"{name} is {dtype!r}; it must be torch.float16, bfloat16 or float32")
    _check_values(options)
    if options.opt_level == "O1":
        _check_first_level(options)
    elif options.patch_torch_functions:
        raise ValueError(
            f"patch_torch_functions=True goes with O1, which is autocast; {options.opt_level} casts the model"
        )


def _check_values(options: ApexPrecision) -> None:
    """Check each option by itself."""
    check_bool(options.enabled, "enabled")
    for name in ("patch_torch_functions", "keep_batchnorm_fp32", "master_weights"):
        if getattr(options, name) is not None:
            check_bool(getattr(options, name), name)
    check_positive(options.num_losses, "num_losses")
    check_number(options.verbosity, "verbosity", least=0)
    scale = options.loss_scale
    is_number = isinstance(scale, int | float) and not isinstance(scale, bool) and scale > 0
    if scale is not None and scale != "dynamic" and not is_number:
        raise ValueError(f'loss_scale is {scale!r}; it must be "dynamic" or a number above 0')
    for name in ("min_loss_scale", "max_loss_scale"):
        if getattr(options, name) is not None:
            check_number(getattr(options, name), name, least=0, positive=True)
    if options.min_loss_scale is not None and options.min_loss_scale > options.max_loss_scale:
        raise ValueError(
            f"min_loss_scale is {options.min_loss_scale:g}; it must be at most max_loss_scale "
            f"({options.max_loss_scale:g})"
        )


def _check_first_level(options: ApexPrecision) -> None:
    """Refuse options that cast the model: O1 leaves it in float32, and casts operands."""
    reasons = {
        "cast_model_type": "the model stays in float32, and inputs of operations are cast: use O2 or O3",
        "keep_batchnorm_fp32": "the model is in float32, batch normalizations included: use O2 or O3",
        "master_weights": "the weights are in float32 themselves: use O2 or O3",
    }
    for name, reason in reasons.items():
        value = getattr(options, name)
        if value is not None:
            raise ValueError(f"{name}={value!r} does not go with O1, under which {reason}")


def _without_effect(options: ApexPrecision) -> list[str]:
    """Return log lines about options without effect."""
    level = _level_of(options)
    found = {
        f"num_losses={options.num_losses} has no effect: all losses share one scale": options.num_losses > 1,
        "min_loss_scale and max_loss_scale have no effect: the loss scale is fixed": (
            level.loss_scale != "dynamic"
            and (options.min_loss_scale is not None or options.max_loss_scale != _MAX_SCALE)
        ),
    }
    if options.opt_level != "O1" and not level.is_low:
        for name in ("keep_batchnorm_fp32", "master_weights"):
            found[f"{name}=True has no effect: the whole model is float32"] = getattr(options, name) is True
    return [text for text, is_so in found.items() if is_so]
