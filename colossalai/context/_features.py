"""The feature keys of a config: their names, their keys, and what their values must be.

Everything that is not a feature key is a hyper-parameter of the user's and is left alone; a name that looks
like a misspelt feature key gets a warning.
"""

from collections.abc import Callable, Mapping
from enum import Enum
from inspect import signature
from typing import Any, Protocol

import torch

from colossalai._lazy import JOB_PARTS, find_name
from colossalai._not_landed import FP8
from colossalai.context._check import (
    check_bool,
    check_keys,
    check_mapping,
    check_number,
    check_positive,
)
from colossalai.context._config import Config, ConfigException, nearest
from colossalai.context._layout import Layout, read_layout
from colossalai.logging import get_dist_logger
from colossalai.monitor import ACTIONS as WATCHDOG_ACTIONS

_SCALER_KEYS = (
    *("init_scale", "growth_factor", "backoff_factor", "growth_interval", "enabled"),
    "max_consecutive_skips",
)
PRECISION_KEYS: Mapping[str, tuple[str, ...]] = {
    "torch": _SCALER_KEYS,
    "bf16": ("master_weights",),
    "naive": (
        *("log_num_zeros_in_grad", "initial_scale", "min_scale", "growth_factor", "backoff_factor"),
        *("growth_interval", "hysteresis", "max_scale", "max_consecutive_skips", "verbose"),
        "clip_grad_norm",
    ),
    "apex": (
        *("enabled", "opt_level", "cast_model_type", "patch_torch_functions", "keep_batchnorm_fp32"),
        *("master_weights", "loss_scale", "cast_model_outputs", "num_losses", "verbosity"),
        *("min_loss_scale", "max_loss_scale", "max_consecutive_skips"),
    ),
}
"""The keys of `fp16=dict(mode=...)` beside `mode`, for every mode (a value of `colossalai.amp.AMP_TYPE`)."""

GEMINI_KEYS = (
    *("device", "placement_policy", "precision", "pin_memory", "force_outputs_fp32", "strict_ddp_mode"),
    *("search_range_mb", "hidden_dim", "min_chunk_size_mb", "memstats", "gpu_margin_mem_ratio"),
    *("initial_scale", "min_scale", "growth_factor", "backoff_factor", "growth_interval", "hysteresis"),
    *("max_scale", "max_norm", "norm_type", "verbose"),
    *("memory_budget", "host_budget", "warmup_ratio", "offload_dir", "whole_modules"),
)
"""The keys of `gemini=dict(...)`: the fields of `colossalai.zero.gemini.GeminiOptions`."""

MATMULS = ("auto", "torch", "onednn")
"""Who may multiply float32 matrices on CPU; what "auto" takes, it measures."""

_SAID_BY_AUTO: Mapping[str, str] = {
    "parallel": "the sizes of the mesh",
    "max_ep_size": "the sizes of the mesh",
    "fp16": "the precision",
    "zero": "the stage of ZeRO",
    "gemini": "the stage of ZeRO",
    "recompute": "what is recomputed",
    "NUM_MICRO_BATCHES": "how a pipeline is run",
    "NUM_CHUNKS": "how a pipeline is run",
    "TENSOR_SHAPE": "how a pipeline is run",
    "gradient_handler": "how gradients are made equal",
    "gradient_handlers": "how gradients are made equal",
}
"""The features that a plan of Colossal-Auto says, so that they cannot stand beside `auto`, and what of it."""

_CLIPPING = "clip_grad_norm=1.0"
_ACCUMULATION = "gradient_accumulation=4"
_PRECISION = "fp16=dict(mode=AMP_TYPE.TORCH), or AMP_TYPE.BF16,"
_ZERO = "zero=dict(stage=1), 2 or 3,"
_RECOMPUTE = "recompute=True"
_PIPELINE = "parallel=dict(pipeline=2)"
_TENSOR = "parallel=dict(tensor=dict(size=2, mode='1d'))"
_MICROBATCHES = "NUM_MICRO_BATCHES=8"
OTHERS_KEYS: Mapping[str, str] = {
    **dict.fromkeys(
        (
            *("clip_grad", "clip_norm", "gradient_clipping", "grad_clip_norm", "grad_clip", "grad_norm_clip"),
            *("gradient_clip_val", "gradient_clip", "gradient_clip_norm", "max_grad_norm", "max_norm"),
            *("clip_grad_by_norm", "clip_gradients"),
        ),
        _CLIPPING,
    ),
    **dict.fromkeys(
        (
            *("gradient_accumulation_steps", "accumulate_grad_batches", "accumulation_steps", "accumulation"),
            *("grad_accumulation", "grad_accumulation_steps", "gradient_accumulation_size", "grad_accum"),
            *("grad_accum_steps", "accumulate_gradients"),
        ),
        _ACCUMULATION,
    ),
    **dict.fromkeys(
        (
            "amp",
            "bf16",
            "precision",
            "mixed_precision",
            "amp_config",
            "use_amp",
            "amp_type",
            "half_precision",
        ),
        _PRECISION,
    ),
    **dict.fromkeys(("zero_optimization", "zero_stage", "fsdp", "fsdp_config", "zero_config"), _ZERO),
    **dict.fromkeys(
        (
            *("gradient_checkpointing", "activation_checkpointing", "activation_checkpoint", "checkpointing"),
            *("grad_checkpoint", "recompute_activations", "use_checkpoint"),
        ),
        _RECOMPUTE,
    ),
    **dict.fromkeys(
        (
            "pipeline",
            "pipeline_parallel",
            "pipeline_parallel_size",
            "pipeline_model_parallel_size",
            "pp_size",
        ),
        _PIPELINE,
    ),
    **dict.fromkeys(
        (
            *("tensor", "tensor_parallel", "tensor_parallel_size", "tensor_model_parallel_size", "tp_size"),
            "model_parallel_size",
        ),
        _TENSOR,
    ),
    **dict.fromkeys(
        ("num_microbatches", "num_micro_batches", "microbatches", "num_micro_batch"), _MICROBATCHES
    ),
    **dict.fromkeys(("num_chunks", "num_model_chunks"), "NUM_CHUNKS=2"),
    **dict.fromkeys(
        ("use_liger_kernel", "use_liger", "fused_linear_cross_entropy", "fused_cross_entropy"),
        "fused_loss=True",
    ),
    **dict.fromkeys(
        ("ep_size", "expert_parallel_size", "expert_model_parallel_size", "moe", "expert_parallel"),
        "parallel=dict(moe=2)",
    ),
    "tensor_shape": "TENSOR_SHAPE=(4, 1024, 768)",
    "strategy": "parallel=dict(...), zero=dict(...)",
    **dict.fromkeys(("data_parallel_size", "dp_size", "data_parallel"), "parallel=dict(data=4)"),
    **dict.fromkeys(("grad_handlers", "grad_handler"), "gradient_handlers=[dict(type='MyHandler')]"),
}
"""What DeepSpeed, Lightning, Accelerate, Megatron and transformers call a feature, and what it is here."""


def check_config(config: Config, world_size: int) -> Layout:
    """Check every feature key of a config and return the layout of the mesh.

    Raises:
        ConfigException: A feature has an unknown key, a value of the wrong type or out of range, or a
            misspelt name.
    """
    for key, check in _FEATURES.items():
        if config.get(key) is not None:
            check(config[key])
    _refuse_two_bounds(config)
    for key, what in _SAID_BY_AUTO.items():
        if config.get("auto") is not None and config.get(key) is not None:
            raise ConfigException(
                f"the config has both auto and {key}: the plan says {what}, and its predictions hold for "
                f"that, so leave {key} out, or leave auto out"
            )
    if config.get("gradient_handler") is not None and config.get("gradient_handlers") is not None:
        raise ConfigException(
            "the config has both gradient_handler and gradient_handlers: keep one of the two spellings"
        )
    for key, value in config.items():
        _look_for_misspelt_feature(key, value)
    return read_layout(config.get("parallel")).over(world_size)


class JobPlan(Protocol):
    """What a job needs of a plan of Colossal-Auto, which stands on a floor above."""

    def layout_over(self, world_size: int) -> Layout:
        """Return how the ranks are laid out.

        Raises:
            ConfigException: `world_size` is not the number of ranks that the plan is for.
        """

    def runtime_plan(self) -> Any:
        """Return the plan that `colossalai.runtime` carries out."""


def auto_plan_of(config: Config) -> JobPlan | None:
    """Return the plan that `auto` in a checked config gives, or is the path of; None without one.

    Raises:
        ConfigException: `auto.plan` cannot be read, or is no plan.
    """
    if config.get("auto") is None:
        return None
    try:
        plan: JobPlan = find_name("colossalai", JOB_PARTS, "given_plan")(config["auto"]["plan"])
    except ValueError as error:
        raise ConfigException(f"auto.plan: {error}") from error
    return plan


def _check_auto(value: Any) -> None:
    if not isinstance(value, Mapping):  # a plan by itself would be pages of a message
        raise ConfigException(f"auto is a {type(value).__name__}; it must be a dict: auto=dict(plan=...)")
    check_keys(value, ("plan",), "auto")
    if value.get("plan") is None:
        raise ConfigException("auto has no plan: write auto=dict(plan='plan.json'), or give an AutoPlan")


def _refuse_two_bounds(config: Config) -> None:
    """The bound of the gradient norm may stand by itself, or with naive AMP: one of them."""
    inner = (config.get("fp16") or {}).get("clip_grad_norm")
    outer = config.get("clip_grad_norm")
    if inner and outer and inner != outer:
        raise ConfigException(
            f"clip_grad_norm is {outer}, and fp16.clip_grad_norm {inner}: the gradients are clipped once, so "
            "leave one of them out"
        )


def _look_for_misspelt_feature(key: Any, value: Any) -> None:
    """Warn of a user's key that could be meant as a feature; refuse one whose value would be right for it.

    Raises:
        ConfigException: `key` is nearly the name of a feature, which takes `value`.
    """
    if key in FEATURE_KEYS or not str(key).isidentifier():
        return
    if key in OTHERS_KEYS:
        if value is not None and value is not False:
            get_dist_logger().log_once(
                f"config key {key!r} is not a feature and has no effect here: write {OTHERS_KEYS[key]} if it "
                "is meant as one",
                ranks=[0],
            )
        return
    in_lower_case = {known.lower(): known for known in FEATURE_KEYS}
    match = in_lower_case.get(str(key).lower()) or nearest(key, FEATURE_KEYS, cutoff=0.87)
    if match is None or value is None:
        return
    if _takes(match, value):
        raise ConfigException(
            f"config key {key!r} is not a feature and would have no effect; did you mean {match!r}? A key of "
            "your own needs another name"
        )
    get_dist_logger().log_once(f"config key {key!r} is not a feature; did you mean {match!r}?", ranks=[0])


def _takes(feature: str, value: Any) -> bool:
    """Return whether a value is right for a feature."""
    try:
        _FEATURES[feature](value)
        if feature == "parallel":
            read_layout(value)
    except ConfigException:
        return False
    return True


def precision_mode(value: Any) -> str:
    """Return the name of a precision mode that is written as a string or as an `AMP_TYPE`."""
    name = value.value if isinstance(value, Enum) else value
    if isinstance(name, str) and name.lower().startswith("fp8"):
        raise ConfigException(f"fp16.mode is {value!r}. {FP8}")
    if not isinstance(name, str) or name not in PRECISION_KEYS:
        raise ConfigException(
            f"fp16.mode is {value!r}; it must be one of AMP_TYPE.TORCH, AMP_TYPE.BF16, AMP_TYPE.NAIVE, "
            f"AMP_TYPE.APEX (or {', '.join(map(repr, PRECISION_KEYS))})"
        )
    return name


def _check_fp16(value: Any) -> None:
    check_mapping(value, "fp16", example="fp16=dict(mode=AMP_TYPE.TORCH)")
    if "mode" not in value:
        raise ConfigException("fp16 has no mode: write fp16=dict(mode=AMP_TYPE.TORCH)")
    if value["mode"] is None:
        _warn_of_options_without_mode(value)
        return
    mode = precision_mode(value["mode"])
    check_keys(value, ("mode", *PRECISION_KEYS[mode]), f"fp16 (mode {mode!r})")
    _PRECISION_CHECKS[mode](value)


def _warn_of_options_without_mode(value: Mapping[str, Any]) -> None:
    others = [key for key in value if key != "mode"]
    if others:
        get_dist_logger().log_once(
            f"fp16.mode is None, which means no mixed precision: {others} of fp16 have no effect", ranks=[0]
        )


def _check_bf16(value: Mapping[str, Any]) -> None:
    check_bool(value.get("master_weights", False), "fp16.master_weights")


def _check_apex(value: Mapping[str, Any]) -> None:
    """Check the options one by one; whether they go with the level is for `ApexPrecision` to say."""
    level = value.get("opt_level", "O1")
    if level not in _APEX_LEVELS:
        raise ConfigException(f"fp16.opt_level is {level!r}; it must be one of {', '.join(_APEX_LEVELS)}")
    check_bool(value.get("enabled", True), "fp16.enabled")
    for key in ("patch_torch_functions", "keep_batchnorm_fp32", "master_weights"):
        if value.get(key) is not None:
            check_bool(value[key], f"fp16.{key}")
    check_positive(value.get("num_losses", 1), "fp16.num_losses")
    check_number(value.get("verbosity", 1), "fp16.verbosity", least=0)
    _check_bound(value)
    for key in ("loss_scale", "min_loss_scale", "max_loss_scale"):
        if value.get(key) is not None and (key, value[key]) != ("loss_scale", "dynamic"):
            check_number(value[key], f"fp16.{key}", least=0, positive=True)


def _check_bound(value: Mapping[str, Any]) -> None:
    bound = value.get("max_consecutive_skips", 1)
    if type(bound) is not int or bound < 0:
        raise ConfigException(
            f"fp16.max_consecutive_skips is {bound!r}; it must be a whole number, 0 for no bound"
        )


def _check_scaler(value: Mapping[str, Any]) -> None:
    check_bool(value.get("enabled", True), "fp16.enabled")
    check_number(value.get("init_scale", 2.0**16), "fp16.init_scale", least=0, positive=True)
    check_number(value.get("growth_factor", 2.0), "fp16.growth_factor", least=1, positive=True)
    backoff = check_number(value.get("backoff_factor", 0.5), "fp16.backoff_factor", least=0, positive=True)
    if backoff >= 1:
        raise ConfigException(f"fp16.backoff_factor is {backoff}; it must be below 1")
    check_positive(value.get("growth_interval", 2000), "fp16.growth_interval")
    _check_bound(value)


def _check_naive(value: Mapping[str, Any]) -> None:
    check_bool(value.get("log_num_zeros_in_grad", False), "fp16.log_num_zeros_in_grad")
    check_bool(value.get("verbose", False), "fp16.verbose")
    check_number(value.get("clip_grad_norm", 0.0), "fp16.clip_grad_norm", least=0)
    check_positive(value.get("hysteresis", 2), "fp16.hysteresis")
    _check_scaler({key: value[key] for key in _SCALER_KEYS if key in value})
    least = check_number(value.get("min_scale", 1.0), "fp16.min_scale", least=0)
    greatest = check_number(value.get("max_scale", 2.0**32), "fp16.max_scale", least=0, positive=True)
    first = check_number(value.get("initial_scale", 2.0**32), "fp16.initial_scale", least=0, positive=True)
    if not least <= first <= greatest:
        raise ConfigException(
            f"fp16.initial_scale is {first:g}; it must be between min_scale ({least:g}) and max_scale "
            f"({greatest:g})"
        )


_APEX_LEVELS = ("O0", "O1", "O2", "O3")
_PRECISION_CHECKS: Mapping[str, Callable[[Mapping[str, Any]], None]] = {
    "torch": _check_scaler,
    "bf16": _check_bf16,
    "naive": _check_naive,
    "apex": _check_apex,
}


def _check_handlers(value: Any) -> None:
    example = "gradient_handler=[dict(type='MyGradientHandler')]"
    if not isinstance(value, list | tuple):
        raise ConfigException(f"gradient_handler is {value!r}; it must be a list, such as {example}")
    for handler in value:
        if not isinstance(handler, Mapping) or not isinstance(handler.get("type"), str):
            raise ConfigException(
                f"gradient_handler holds {handler!r}; each entry is a dict with a type: {example}"
            )


def _check_zero(value: Any) -> None:
    check_mapping(value, "zero", example="zero=dict(stage=1)")
    check_keys(value, ("stage", "cpu_offload"), "zero")
    stage = value.get("stage", 1)
    if type(stage) is not int or stage not in (1, 2, 3):
        raise ConfigException(f"zero.stage is {stage!r}; it must be 1, 2 or 3")
    check_bool(value.get("cpu_offload", False), "zero.cpu_offload")


def _check_gemini(value: Any) -> None:
    check_mapping(value, "gemini", example="gemini=dict(placement_policy='auto')")
    check_keys(value, GEMINI_KEYS, "gemini")


def _check_shape(value: Any) -> None:
    if not isinstance(value, list | tuple) or not value:
        raise ConfigException(
            f"TENSOR_SHAPE is {value!r}; it must be a tuple of sizes, such as (4, 1024, 768)"
        )
    for size in value:
        check_positive(size, "a size in TENSOR_SHAPE")


def _check_watchdog(value: Any) -> None:
    if value is False:
        return
    check_mapping(value, "watchdog", example="watchdog=dict(timeout=600), or False for none")
    check_keys(value, ("timeout", "notice", "action", "folder"), "watchdog")
    if value.get("timeout") is not None:
        check_number(value["timeout"], "watchdog.timeout", least=0)
    if "notice" in value:
        check_number(value["notice"], "watchdog.notice", least=0, positive=True)
    if value.get("action", "end") not in WATCHDOG_ACTIONS:
        raise ConfigException(
            f"watchdog.action is {value['action']!r}; it must be one of {', '.join(WATCHDOG_ACTIONS)}"
        )
    if not isinstance(value.get("folder", "."), str):
        raise ConfigException(f"watchdog.folder is {value['folder']!r}; it must be the path of a folder")


def check_matmul(value: Any) -> None:
    """Require one of the three libraries of float32 products.

    Raises:
        ConfigException: `value` is not "auto", "torch" or "onednn".
    """
    if value not in MATMULS:
        raise ConfigException(f"matmul is {value!r}; it must be one of {', '.join(map(repr, MATMULS))}")


def _check_recompute(value: Any) -> None:
    names = value if isinstance(value, list | tuple) else [value]
    if not isinstance(value, bool) and not all(isinstance(name, str) for name in names):
        raise ConfigException(f"recompute is {value!r}; it must be True, False or a list of module names")


def check_compile(value: Any) -> None:
    """Require what says whether, and with which options, a model is compiled.

    Raises:
        ConfigException: `value` is neither True, False nor a dict of options of `torch.compile`.
    """
    if isinstance(value, bool):
        return
    if not isinstance(value, Mapping):
        raise ConfigException(
            f"compile is {value!r}; it must be True, False or a dict of torch.compile's options, such as "
            "compile=dict(mode='reduce-overhead')"
        )
    given_by_us = ("model", "disable", "name")
    known = [name for name in signature(torch.compile).parameters if name not in given_by_us]
    check_keys(value, known, "compile")
    for key in ("fullgraph", "dynamic"):
        if value.get(key) is not None:
            check_bool(value[key], f"compile.{key}")


_FEATURES: Mapping[str, Callable[[Any], Any]] = {
    "max_ep_size": lambda value: check_positive(value, "max_ep_size"),
    "auto": _check_auto,
    "parallel": lambda value: None,  # read_layout and Layout.over check it, against the number of processes
    "fp16": _check_fp16,
    "gradient_accumulation": lambda value: check_positive(value, "gradient_accumulation"),
    "clip_grad_norm": lambda value: check_number(value, "clip_grad_norm", least=0),
    "gradient_handler": _check_handlers,
    "gradient_handlers": _check_handlers,
    "recompute": _check_recompute,
    "compile": check_compile,
    "fused_loss": lambda value: check_bool(value, "fused_loss"),
    "zero": _check_zero,
    "gemini": _check_gemini,
    "NUM_MICRO_BATCHES": lambda value: check_positive(value, "NUM_MICRO_BATCHES"),
    "NUM_CHUNKS": lambda value: check_positive(value, "NUM_CHUNKS"),
    "TENSOR_SHAPE": _check_shape,
    "watchdog": _check_watchdog,
    "debug": lambda value: check_bool(value, "debug"),
    "matmul": check_matmul,
}

FEATURE_KEYS = tuple(_FEATURES)
"""The names that the system reserves in a config."""
