"""The functions that put a model and its optimizers under ZeRO, without Booster and without a config.

model = zero_model_wrapper(model, zero_stage=2)
optimizer = zero_optim_wrapper(model, optimizer)
optimizer.backward(loss)
optimizer.step()

`LowLevelZeroOptimizer(optimizer, ...)` does it for an optimizer alone.
"""

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from colossalai.compat._gemini_wrappers import GeminiDDP
from colossalai.zero import (
    PRECISIONS,
    LowLevelZeroOptimizer,
    ZeroModel,
    ZeroReplicas,
    defaults_of,
    scaler_of,
)


def zero_model_wrapper(
    model: nn.Module,
    zero_stage: int = 1,
    gemini_config: dict[str, Any] | None = None,
    *,
    precision: str | None = None,
    bucket_cap_mb: float = 25.0,
    overlap_communication: bool = True,
    communication_dtype: torch.dtype | None = None,
    cpu_offload: bool = False,
) -> ZeroModel:
    """Prepare a model for ZeRO over the data-parallel ranks; call it before `zero_optim_wrapper`.

    Args:
        model: The model; it is moved to the device of this rank and changed in place.
        zero_stage: 1 cuts optimizer states, 2 also gradients, 3 also parameters, in chunks (Gemini).
        gemini_config: The keywords of `GeminiDDP`, for stage 3.
        precision: "bf16" or "fp16": all in that precision, with float32 masters; "fp32": as the model is.
            Default: "bf16", and "fp16" with stage 3.
        bucket_cap_mb: Size of a bucket of gradients in MB (1024 * 1024 bytes), for stages 1 and 2.
        overlap_communication: Average gradients while the backward runs; stage 3 always does.
        communication_dtype: The dtype in which gradients are sent, for stages 1 and 2; None: their own.
        cpu_offload: Keep optimizer states and masters in host memory, for stages 1 and 2.

    Returns:
        The model; with stage 3 a `GeminiDDP`.

    Raises:
        RuntimeError: The job has not been launched.
        ValueError: `zero_stage` is not 1, 2 or 3, `gemini_config` is given without stage 3 or has a key that
            `GeminiDDP` does not have, `precision` is unknown, another option is out of range or not one of
            this stage, `model` is prepared already, or a parameter has no values yet.
    """
    options = {
        "bucket_cap_mb": bucket_cap_mb,
        "overlap_communication": overlap_communication,
        "communication_dtype": communication_dtype,
        "cpu_offload": cpu_offload,
    }
    if zero_stage == 3:
        defaults = defaults_of(zero_model_wrapper, options)
        if taken := [name for name, value in options.items() if value != defaults[name]]:
            raise ValueError(
                f"{', '.join(taken)}: options of stages 1 and 2, and zero_stage is 3: leave them out; "
                "gemini_config=dict(placement_policy=...) places the data"
            )
        config = dict(gemini_config or {})
        if precision is not None and config.setdefault("precision", precision) != precision:
            raise ValueError(
                f"precision is {precision!r}, and gemini_config has {config['precision']!r}: give it once"
            )
        return GeminiDDP(model, **config)
    if gemini_config is not None:
        raise ValueError(f"gemini_config is for stage 3, and zero_stage is {zero_stage}: leave it out")
    chosen = "bf16" if precision is None else precision
    if chosen not in PRECISIONS:
        raise ValueError(f"precision is {precision!r}; it must be one of {list(PRECISIONS)}")
    method = ZeroReplicas(
        stage=zero_stage,
        bucket_cap_mb=bucket_cap_mb,
        overlap=overlap_communication,
        communication_dtype=communication_dtype,
        cpu_offload=cpu_offload,
    )
    return ZeroModel(model, method, PRECISIONS[chosen])


def zero_optim_wrapper(
    model: nn.Module,
    optimizer: Optimizer,
    initial_scale: float = 2.0**16,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 1000,
    hysteresis: int = 2,
    min_scale: float = 1.0,
    max_scale: float = 2.0**32,
    max_norm: float = 0.0,
    norm_type: float = 2.0,
    verbose: bool = False,
) -> LowLevelZeroOptimizer:
    """Cut an optimizer of a model over the data-parallel ranks; call its `backward(loss)` and `step()`.

    A model may have several, of different parameters. They share one loss scale, whose options are given with
    the first, and all may step after the `backward` of one of them.

    Args:
        model: A result of `zero_model_wrapper`.
        optimizer: The optimizer; it is changed in place.
        initial_scale: First loss scale of precision "fp16"; so are all up to `max_scale`.
        growth_factor: Factor of the scale after `growth_interval` steps without overflow.
        backoff_factor: Factor of the scale after overflows.
        growth_interval: Number of steps without overflow before the scale grows.
        hysteresis: Number of overflows since the last growth before the scale shrinks.
        min_scale: The scale does not shrink below it.
        max_scale: The scale does not grow above it.
        max_norm: Bound of the gradient norm over all ranks, to which every step clips; 0 for none.
        norm_type: The p of that norm.
        verbose: Log every change of the loss scale.

    Raises:
        ValueError: `model` is not a result of `zero_model_wrapper`, `optimizer` cannot be cut, or an option
            is out of range, or differs from the model's first optimizer.
    """
    if not isinstance(model, ZeroModel):
        raise ValueError(
            f"the model is a {type(model).__name__}: pass the result of zero_model_wrapper(model, ...)"
        )
    options = {
        "initial_scale": initial_scale,
        "growth_factor": growth_factor,
        "backoff_factor": backoff_factor,
        "growth_interval": growth_interval,
        "hysteresis": hysteresis,
        "min_scale": min_scale,
        "max_scale": max_scale,
        "verbose": verbose,
    }
    scaler = scaler_of(model, options, defaults_of(zero_optim_wrapper, options))
    return LowLevelZeroOptimizer(
        optimizer, model=model, scaler=scaler, clip_grad_norm=max_norm, norm_type=norm_type
    )
