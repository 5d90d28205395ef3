"""Fields of a plan that depend on several keys of a config: data method, precision, pipeline, clipping.

Fields that depend on a single key are in the table of features (`colossalai.context`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from colossalai.amp import FullPrecision, Precision, precision_of_config
from colossalai.context import Config, ConfigException, plan_fields
from colossalai.logging import get_dist_logger
from colossalai.nn.parallel import Bucketed, DataMethod, FullySharded, Replicated, Unsynchronized
from colossalai.pipeline import PipelineOptions
from colossalai.runtime._compatibility import refuse_pairs
from colossalai.zero import ZeroReplicas
from colossalai.zero.gemini import GeminiOptions, gemini_of_config

_PIPELINE_KEYS = ("NUM_MICRO_BATCHES", "NUM_CHUNKS", "TENSOR_SHAPE")


def fields_of_config(config: Config, pipeline: PipelineOptions | None = None) -> dict[str, Any]:
    """Return the fields of the plan of a config.

    Args:
        config: The config.
        pipeline: Options of the pipeline, for a caller that replaces those of the config.

    Raises:
        ValueError: A feature has a wrong value, or two features exclude each other.
    """
    if pipeline is None:
        pipeline = _pipeline_options(config)
    else:
        _refuse_pipeline_keys(config)
    if pipeline is None:
        _warn_of_keys_without_effect(config)
    fields = plan_fields(config)
    gemini = None if config.get("gemini") is None else gemini_of_config(config["gemini"])
    handlers = fields.get("gradient_handlers", ())
    return {
        **fields,
        "data": _data_method_of(config, gemini, handlers, in_pipeline=pipeline is not None),
        "precision": _precision_of(config, gemini),
        "pipeline": pipeline,
        **_clipping_of(config, gemini),
    }


def _precision_of(config: Config, gemini: GeminiOptions | None) -> Precision:
    fp16 = config.get("fp16")
    has_mode = fp16 is not None and fp16.get("mode") is not None
    if gemini is not None and not has_mode:
        return gemini.make_precision()
    if gemini is not None and "precision" in config["gemini"]:
        raise ConfigException(
            "fp16 and gemini both set a precision: leave one of fp16 and gemini.precision out"
        )
    return FullPrecision() if fp16 is None else precision_of_config(fp16)


def _clipping_of(config: Config, gemini: GeminiOptions | None) -> dict[str, float]:
    """Return bound and p of the gradient norm, which are also documented options of naive AMP and Gemini."""
    bound = config.get("clip_grad_norm") or (config.get("fp16") or {}).get("clip_grad_norm") or 0.0
    if gemini is None:
        return {"clip_grad_norm": bound}
    return {"clip_grad_norm": bound or gemini.max_norm, "clip_norm_type": gemini.norm_type}


def _pipeline_options(config: Config) -> PipelineOptions | None:
    parallel = config.get("parallel") or {}
    pipeline = parallel.get("pipeline") or 1
    written: Mapping[str, Any] = pipeline if isinstance(pipeline, Mapping) else {"size": pipeline}
    if (written.get("size") or 1) == 1:
        return None
    if config.get("NUM_MICRO_BATCHES") is None:
        raise ConfigException(
            "a pipeline cuts every batch into microbatches: add NUM_MICRO_BATCHES to the config (four times "
            f"the number of stages, {4 * written['size']}, keeps most of the ranks busy)"
        )
    shape = config.get("TENSOR_SHAPE")
    return PipelineOptions(
        num_microbatches=config["NUM_MICRO_BATCHES"],
        num_chunks=config.get("NUM_CHUNKS"),
        schedule=written.get("schedule"),
        partition=written.get("partition"),
        tensor_shape=None if shape is None else tuple(shape),
        batch_dim=written.get("batch_dim"),
        loss_reduction=written.get("loss_reduction"),
    )


def _refuse_pipeline_keys(config: Config) -> None:
    pipeline = (config.get("parallel") or {}).get("pipeline")
    written: Mapping[str, Any] = pipeline if isinstance(pipeline, Mapping) else {}
    for key in ("batch_dim", "loss_reduction"):
        if written.get(key) is not None:
            raise ConfigException(
                f"parallel.pipeline.{key} is {written[key]!r}, and the schedule that initialize is given "
                f"determines the run of batches: take {key} out of the config, and pass it there"
            )


def _data_method_of(
    config: Config, gemini: GeminiOptions | None, handlers: Sequence[Any], *, in_pipeline: bool
) -> DataMethod:
    zero = config.get("zero")
    if gemini is not None:
        if zero is not None:
            raise ConfigException(
                "zero and gemini both cut the model over the ranks: leave zero out (gemini is stage 3)"
            )
        if any(handler.get("type") != "ZeROGradientHandler" for handler in handlers):
            raise ConfigException("gemini makes the gradients equal itself: remove the gradient handlers")
        return gemini.method(in_pipeline=in_pipeline)
    if zero is None:
        return Unsynchronized() if any(map(_averages, handlers)) else data_method(0, in_pipeline=in_pipeline)
    stage = zero.get("stage", 1)
    refuse_pairs([f"ZeRO {stage}", *(["pipeline"] if in_pipeline else [])])
    if any(handler.get("type") != "ZeROGradientHandler" for handler in handlers):
        raise ConfigException(
            "zero makes the gradients equal itself: remove the gradient handlers (ZeROGradientHandler, which "
            "only waits for it, may stay)"
        )
    return data_method(stage, in_pipeline=in_pipeline, cpu_offload=zero.get("cpu_offload", False))


def data_method(zero_stage: int, *, in_pipeline: bool, cpu_offload: bool = False) -> DataMethod:
    """Return the data method of a stage of ZeRO.

    Args:
        zero_stage: 0 for replicas, 1 to 3.
        in_pipeline: Whether the model is cut into stages.
        cpu_offload: Whether sharded tensors are in host memory.
    """
    if zero_stage == 3:
        return FullySharded(cpu_offload=cpu_offload)
    if zero_stage > 0:
        return ZeroReplicas(stage=zero_stage, cpu_offload=cpu_offload)
    return Bucketed() if in_pipeline else Replicated()


def _averages(handler: Mapping[str, Any]) -> bool:
    """Return whether a handler averages gradients over the replicas, as a data method would."""
    return handler.get("type") not in ("PipelineSharedModuleGradientHandler", "ZeROGradientHandler")


def _warn_of_keys_without_effect(config: Config) -> None:
    for key in _PIPELINE_KEYS:
        if config.get(key) is not None:
            get_dist_logger().log_once(f"config key {key} has no effect: there is no pipeline", ranks=[0])
