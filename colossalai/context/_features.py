"""The feature keys of a config, in one table: check, field of the plan, and names in other libraries.

All other keys are hyper-parameters of the user and are not changed; a name that looks like a misspelt feature
key gets a warning. Settings that depend on several keys are in `colossalai.runtime`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from inspect import signature
from typing import Any, Protocol

import torch

from colossalai._lazy import JOB_PARTS, find_name
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

MATMULS = ("auto", "torch", "onednn")
"""Libraries that can multiply float32 matrices on CPU; "auto" measures which is faster."""


def check_config(config: Config, world_size: int) -> Layout:
    """Check every feature key of a config and return the layout of the mesh.

    Raises:
        ConfigException: A feature has an unknown key, a value of the wrong type or out of range, or a
            misspelt name.
    """
    given = {key: feature for key, feature in FEATURES.items() if config.get(key) is not None}
    for key, feature in given.items():
        feature.check(config[key])
    _refuse_two_bounds(config)
    for key, feature in given.items():
        if feature.fixed_by_auto and "auto" in given:
            raise ConfigException(
                f"the config has both auto and {key}: the plan determines {feature.fixed_by_auto}, and its "
                f"predictions depend on that, so leave {key} out, or leave auto out"
            )
    if config.get("gradient_handler") is not None and config.get("gradient_handlers") is not None:
        raise ConfigException(
            "the config has both gradient_handler and gradient_handlers: keep one of the two spellings"
        )
    for key, value in config.items():
        _look_for_misspelt_feature(key, value)
    return read_layout(config.get("parallel")).over(world_size)


class JobPlan(Protocol):
    """The parts of a Colossal-Auto plan that a job uses; the plan's class is on a higher floor."""

    def layout_over(self, world_size: int) -> Layout:
        """Return the layout of the ranks.

        Raises:
            ConfigException: `world_size` differs from the number of ranks of the plan.
        """

    def runtime_plan(self) -> Any:
        """Return the plan that `colossalai.runtime` carries out."""


def auto_plan_of(config: Config) -> JobPlan | None:
    """Return the plan in `auto` of a checked config, given as a value or a path; None without one.

    Raises:
        ConfigException: `auto.plan` cannot be read, or is not a plan.
    """
    if config.get("auto") is None:
        return None
    try:
        plan: JobPlan = _part("given_plan")(config["auto"]["plan"])
    except ValueError as error:
        raise ConfigException(f"auto.plan: {error}") from error
    return plan


def plan_fields(config: Config) -> dict[str, Any]:
    """Return the fields of a plan that are determined by a single key of a checked config each."""
    return {
        feature.plan_field: config[key] if feature.read is None else feature.read(config[key])
        for key, feature in FEATURES.items()
        if feature.plan_field and config.get(key) is not None
    }


def _part(name: str) -> Any:
    return find_name("colossalai", JOB_PARTS, name)


def _check_auto(value: Any) -> None:
    if not isinstance(value, Mapping):  # the repr of a plan would fill pages of a message
        raise ConfigException(f"auto is a {type(value).__name__}; it must be a dict: auto=dict(plan=...)")
    check_keys(value, ("plan",), "auto")
    if value.get("plan") is None:
        raise ConfigException("auto has no plan: write auto=dict(plan='plan.json'), or give an AutoPlan")


def _refuse_two_bounds(config: Config) -> None:
    """Refuse different bounds of the gradient norm, which is also an option of naive AMP and Gemini."""
    bounds = {
        "clip_grad_norm": config.get("clip_grad_norm"),
        "fp16.clip_grad_norm": (config.get("fp16") or {}).get("clip_grad_norm"),
        "gemini.max_norm": (config.get("gemini") or {}).get("max_norm"),
    }
    given = [(name, bound) for name, bound in bounds.items() if bound]
    for name, bound in given:
        if bound != given[0][1]:
            raise ConfigException(
                f"{given[0][0]} is {given[0][1]}, and {name} {bound}: the gradients are clipped once, so "
                "leave one of them out"
            )


def _look_for_misspelt_feature(key: Any, value: Any) -> None:
    """Warn of a user's key that could be meant as a feature; refuse one with a valid value for that feature.

    Raises:
        ConfigException: `key` is nearly the name of a feature, and `value` is valid for it.
    """
    if key in FEATURE_KEYS or not str(key).isidentifier():
        return
    if key in OTHER_NAMES:
        if value is not None and value is not False:
            get_dist_logger().log_once(
                f"config key {key!r} is not a feature and has no effect here: write {OTHER_NAMES[key]} if it "
                "is meant as one",
                ranks=[0],
            )
        return
    in_lower_case = {known.lower(): known for known in FEATURE_KEYS}
    match = in_lower_case.get(str(key).lower()) or nearest(key, FEATURE_KEYS, cutoff=0.87)
    if match is None or value is None:
        return
    if _accepts_value(match, value):
        raise ConfigException(
            f"config key {key!r} is not a feature and would have no effect; did you mean {match!r}? A key of "
            "your own needs another name"
        )
    get_dist_logger().log_once(f"config key {key!r} is not a feature; did you mean {match!r}?", ranks=[0])


def _accepts_value(feature: str, value: Any) -> bool:
    """Return whether a value is valid for a feature."""
    try:
        FEATURES[feature].check(value)
        if feature == "parallel":
            read_layout(value)
    except ConfigException:
        return False
    return True


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
    """Require a setting of `torch.compile`: True, False, or its options.

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


def _names(example: str, *names: str) -> Mapping[str, str]:
    """Return the names of a feature in other libraries, with the line that selects it here."""
    return dict.fromkeys(names, example)


@dataclass(frozen=True, kw_only=True)
class ConfigFeature:
    """A key of a config that selects a feature.

    Attributes:
        check: Raises a `ConfigException` for a wrong value.
        plan_field: Field of `colossalai.runtime.Plan` for the value; "" if it takes several keys.
        read: Returns the value of that field; None: the value in the config.
        fixed_by_auto: Part of a job that a plan of Colossal-Auto determines by this key, so that a config
            cannot have both; "" if the plan leaves the feature open.
        other_names: Names of the feature in DeepSpeed, Lightning, Accelerate, Megatron and transformers, each
            with the line that selects it here.
    """

    check: Callable[[Any], Any]
    plan_field: str = ""
    read: Callable[[Any], Any] | None = None
    fixed_by_auto: str = ""
    other_names: Mapping[str, str] = field(default_factory=dict)


FEATURES: Mapping[str, ConfigFeature] = {
    "auto": ConfigFeature(check=_check_auto),
    "parallel": ConfigFeature(
        check=lambda value: None,  # by `read_layout` and `Layout.over`, with the number of processes
        plan_field="layout",
        read=read_layout,
        fixed_by_auto="the sizes of the mesh",
        other_names={
            **_names(
                "parallel=dict(pipeline=2)",
                *("pipeline", "pipeline_parallel", "pipeline_parallel_size", "pp_size"),
                "pipeline_model_parallel_size",
            ),
            **_names(
                "parallel=dict(tensor=dict(size=2, mode='1d'))",
                *("tensor", "tensor_parallel", "tensor_parallel_size", "tensor_model_parallel_size"),
                *("tp_size", "model_parallel_size"),
            ),
            **_names(
                "parallel=dict(moe=2)",
                *("ep_size", "expert_parallel_size", "expert_model_parallel_size", "expert_parallel", "moe"),
            ),
            **_names("parallel=dict(data=4)", "data_parallel_size", "dp_size", "data_parallel"),
            **_names("parallel=dict(...), zero=dict(...)", "strategy"),
        },
    ),
    "max_ep_size": ConfigFeature(
        check=lambda value: check_positive(value, "max_ep_size"), fixed_by_auto="the sizes of the mesh"
    ),
    "fp16": ConfigFeature(
        check=lambda value: _part("precision_of_config")(value),
        fixed_by_auto="the precision",
        other_names=_names(
            "fp16=dict(mode=AMP_TYPE.TORCH), or AMP_TYPE.BF16,",
            *("amp", "amp_config", "amp_type", "use_amp", "bf16", "precision", "mixed_precision"),
            "half_precision",
        ),
    ),
    "gradient_accumulation": ConfigFeature(
        check=lambda value: check_positive(value, "gradient_accumulation"),
        plan_field="accumulation_steps",
        other_names=_names(
            "gradient_accumulation=4",
            *("gradient_accumulation_steps", "accumulate_grad_batches", "accumulation_steps", "accumulation"),
            *("grad_accumulation", "grad_accumulation_steps", "gradient_accumulation_size", "grad_accum"),
            *("grad_accum_steps", "accumulate_gradients"),
        ),
    ),
    "clip_grad_norm": ConfigFeature(
        check=lambda value: check_number(value, "clip_grad_norm", least=0),
        plan_field="clip_grad_norm",
        other_names=_names(
            "clip_grad_norm=1.0",
            *("clip_grad", "clip_norm", "gradient_clipping", "grad_clip_norm", "grad_clip", "grad_norm_clip"),
            *("gradient_clip_val", "gradient_clip", "gradient_clip_norm", "max_grad_norm", "max_norm"),
            *("clip_grad_by_norm", "clip_gradients"),
        ),
    ),
    "gradient_handler": ConfigFeature(
        check=_check_handlers,
        plan_field="gradient_handlers",
        read=tuple,
        fixed_by_auto="how gradients are made equal",
        other_names=_names("gradient_handlers=[dict(type='MyHandler')]", *("grad_handlers", "grad_handler")),
    ),
    "gradient_handlers": ConfigFeature(
        check=_check_handlers,
        plan_field="gradient_handlers",
        read=tuple,
        fixed_by_auto="how gradients are made equal",
    ),
    "recompute": ConfigFeature(
        check=_check_recompute,
        plan_field="recompute",
        fixed_by_auto="what is recomputed",
        other_names=_names(
            "recompute=True",
            *("gradient_checkpointing", "activation_checkpointing", "activation_checkpoint", "checkpointing"),
            *("grad_checkpoint", "recompute_activations", "use_checkpoint"),
        ),
    ),
    "compile": ConfigFeature(check=check_compile, plan_field="compile"),
    "fused_loss": ConfigFeature(
        check=lambda value: check_bool(value, "fused_loss"),
        plan_field="fused_loss",
        other_names=_names(
            "fused_loss=True",
            *("use_liger_kernel", "use_liger", "fused_linear_cross_entropy", "fused_cross_entropy"),
        ),
    ),
    "zero": ConfigFeature(
        check=_check_zero,
        fixed_by_auto="the stage of ZeRO",
        other_names=_names(
            "zero=dict(stage=1), 2 or 3,",
            *("zero_optimization", "zero_stage", "zero_config", "fsdp", "fsdp_config"),
        ),
    ),
    "gemini": ConfigFeature(
        check=lambda value: _part("gemini_of_config")(value), fixed_by_auto="the stage of ZeRO"
    ),
    "NUM_MICRO_BATCHES": ConfigFeature(
        check=lambda value: check_positive(value, "NUM_MICRO_BATCHES"),
        fixed_by_auto="how a pipeline is run",
        other_names=_names(
            "NUM_MICRO_BATCHES=8",
            *("num_microbatches", "num_micro_batches", "microbatches", "num_micro_batch"),
        ),
    ),
    "NUM_CHUNKS": ConfigFeature(
        check=lambda value: check_positive(value, "NUM_CHUNKS"),
        fixed_by_auto="how a pipeline is run",
        other_names=_names("NUM_CHUNKS=2", "num_chunks", "num_model_chunks"),
    ),
    "TENSOR_SHAPE": ConfigFeature(
        check=_check_shape,
        fixed_by_auto="how a pipeline is run",
        other_names=_names("TENSOR_SHAPE=(4, 1024, 768)", "tensor_shape"),
    ),
    "watchdog": ConfigFeature(check=_check_watchdog),
    "debug": ConfigFeature(check=lambda value: check_bool(value, "debug")),
    "matmul": ConfigFeature(check=check_matmul),
}
"""The keys of a config that the system reserves."""

FEATURE_KEYS = tuple(FEATURES)
OTHER_NAMES: Mapping[str, str] = {
    name: example for feature in FEATURES.values() for name, example in feature.other_names.items()
}
"""Names of features in other libraries, with the line that selects each here."""
