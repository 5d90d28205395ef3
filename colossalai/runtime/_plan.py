"""The plan: which methods a model is trained with, and with which options. Both doors produce one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from colossalai.amp import FullPrecision, Precision, precision_of
from colossalai.context import Config, ConfigException
from colossalai.context._features import precision_mode
from colossalai.logging import get_dist_logger
from colossalai.nn.parallel import DataMethod, FullySharded, Replicated, Unsynchronized

_PIPELINE_KEYS = ("NUM_MICRO_BATCHES", "NUM_CHUNKS", "TENSOR_SHAPE")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Which methods a model is trained with.

    Attributes:
        data: How the replicas along `dp` are kept equal.
        precision: The precision of forward and backward.
        recompute: Parts that are checkpointed: True for the model's blocks, or names of sub-modules.
        accumulation_steps: Number of microbatches that make one optimizer step.
        clip_grad_norm: Bound of the gradient norm; 0 for none.
        gradient_handlers: One dict for each gradient handler, with its registered `type`.
    """

    data: DataMethod = field(default_factory=Replicated)
    precision: Precision = field(default_factory=FullPrecision)
    recompute: bool | Sequence[str] = False
    accumulation_steps: int = 1
    clip_grad_norm: float = 0.0
    gradient_handlers: tuple[Mapping[str, Any], ...] = ()

    @staticmethod
    def from_config(config: Config) -> "Plan":
        """Return the plan that the feature keys of a config say.

        Raises:
            ConfigException: A feature has not landed yet.
        """
        _warn_of_what_has_no_effect(config)
        handlers = config.get("gradient_handler") or config.get("gradient_handlers") or ()
        recompute = config.get("recompute") or False
        return Plan(
            data=_data_method(config.get("zero"), handlers),
            precision=_precision(config.get("fp16")),
            recompute=(recompute,) if isinstance(recompute, str) else recompute,
            accumulation_steps=config.get("gradient_accumulation") or 1,
            clip_grad_norm=config.get("clip_grad_norm") or 0.0,
            gradient_handlers=tuple(handlers),
        )


def _precision(fp16: Mapping[str, Any] | None) -> Precision:
    if fp16 is None:
        return FullPrecision()
    options = {key: value for key, value in fp16.items() if key != "mode"}
    try:
        return precision_of(precision_mode(fp16["mode"]), options)
    except ValueError as error:
        raise ConfigException(str(error)) from error


def _data_method(zero: Mapping[str, Any] | None, handlers: Sequence[Any]) -> DataMethod:
    if zero is None:
        return Unsynchronized() if handlers else Replicated()
    stage = zero.get("stage", 1)
    if stage != 3:
        raise ConfigException(f"zero stage {stage} is not there yet: stage 3 (sharded parameters) is")
    if handlers:
        raise ConfigException("zero makes the gradients equal itself: remove the gradient handlers")
    return FullySharded(cpu_offload=zero.get("cpu_offload", False))


def _warn_of_what_has_no_effect(config: Config) -> None:
    for key in _PIPELINE_KEYS:
        if config.get(key) is not None:
            get_dist_logger().log_once(f"config key {key} has no effect: there is no pipeline", ranks=[0])
