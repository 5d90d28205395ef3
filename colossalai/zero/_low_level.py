"""An optimizer of which each rank works on its slices, for a model under ZeRO or for its parameters alone."""

from collections.abc import Callable, Iterable, Mapping
from inspect import signature
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from colossalai.amp import (
    FullPrecision,
    LossScaler,
    NaiveFP16,
    OptimizerGroup,
    OptimizerWrapper,
    Precision,
    PureBF16,
)
from colossalai.logging import get_dist_logger
from colossalai.nn.parallel import check_row_caches, updates_after_step
from colossalai.tensor import row_cache_of, without_row_caches
from colossalai.zero._model import ZeroModel
from colossalai.zero._replicas import ZeroReplicas

PRECISIONS: Mapping[str, Precision] = {"bf16": PureBF16(), "fp16": NaiveFP16(), "fp32": FullPrecision()}
"""The precisions of a model under ZeRO, by name."""


class LowLevelZeroOptimizer(OptimizerWrapper):
    """An optimizer that works on this rank's slices of the parameters.

    Made from an optimizer alone, as here, it takes the parameters as they are: float16 and bfloat16 ones get
    float32 masters, and the model, to which it has no reference, is called as it is. Build the model first,
    on the device of the rank; call `backward(loss)` of this object. `zero_optim_wrapper` makes one for a
    model of `zero_model_wrapper`, which also casts the inputs and outputs of the model.

    Args:
        optimizer: Any optimizer; it is changed in place.
        initial_scale: First loss scale of float16 parameters; so are all up to `max_scale`.
        min_scale: The scale does not shrink below it.
        growth_factor: Factor of the scale after `growth_interval` steps without overflow.
        backoff_factor: Factor of the scale after overflows.
        growth_interval: Number of steps without overflow before the scale grows.
        hysteresis: Number of overflows since the last growth before the scale shrinks.
        max_scale: The scale does not grow above it.
        clip_grad_norm: Bound of the gradient norm over all ranks, to which every step clips; 0 for none.
        verbose: Log every change of the loss scale.
        reduce_bucket_size: Number of elements in a bucket of gradients.
        communication_dtype: The dtype in which gradients are sent; None: their own.
        overlap_communication: Average gradients while the backward runs.
        partition_grad: Cut gradients, too (stage 2).
        cpu_offload: Keep optimizer states and masters in host memory.
        forced_dtype: Cast the parameters to it: torch.float16 or torch.bfloat16; None: leave them.
        model: A result of `zero_model_wrapper`; it can have several optimizers, of different parameters.
            The options of the gradients and of the scale are the model's then, and left out here.
        norm_type: The p of the norm.
        scaler: The loss scaler, with the first optimizer of a `model`; the others share it.

    Raises:
        RuntimeError: The job has not been launched.
        ValueError: `optimizer` is wrapped already or cannot be cut, or an option is of the wrong type or out
            of range.
    """

    def __init__(  # noqa: PLR0913 - the documented options
        self,
        optimizer: Optimizer,
        initial_scale: float = 2.0**16,
        min_scale: float = 1.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        hysteresis: int = 2,
        max_scale: float = 2.0**24,
        clip_grad_norm: float = 0.0,
        verbose: bool = False,
        reduce_bucket_size: int = 1024 * 1024,
        communication_dtype: torch.dtype | None = None,
        overlap_communication: bool = False,
        partition_grad: bool = False,
        cpu_offload: bool = False,
        forced_dtype: torch.dtype | None = None,
        *,
        model: ZeroModel | None = None,
        norm_type: float = 2.0,
        scaler: LossScaler | None = None,
    ) -> None:
        options: dict[str, Any] = {
            "initial_scale": initial_scale,
            "min_scale": min_scale,
            "growth_factor": growth_factor,
            "backoff_factor": backoff_factor,
            "growth_interval": growth_interval,
            "hysteresis": hysteresis,
            "max_scale": max_scale,
            "verbose": verbose,
        }
        if not isinstance(optimizer, Optimizer) or isinstance(optimizer, OptimizerWrapper):
            raise ValueError(
                f"the optimizer is a {type(optimizer).__name__}; it must be a torch.optim.Optimizer that you "
                "built yourself"
            )
        if model is None:
            model = _model_of(
                optimizer,
                dtype=forced_dtype,
                stage=2 if partition_grad else 1,
                num_elements=reduce_bucket_size,
                communication_dtype=communication_dtype,
                overlap=overlap_communication,
                cpu_offload=cpu_offload,
            )
            scaler = scaler_of(model, options, defaults_of(LowLevelZeroOptimizer.__init__, options))
        else:
            options |= {
                "reduce_bucket_size": reduce_bucket_size,
                "communication_dtype": communication_dtype,
                "overlap_communication": overlap_communication,
                "partition_grad": partition_grad,
                "cpu_offload": cpu_offload,
                "forced_dtype": forced_dtype,
            }
            defaults = defaults_of(LowLevelZeroOptimizer.__init__, options)
            if taken := [name for name, value in options.items() if value != defaults[name]]:
                raise ValueError(
                    f"{', '.join(taken)}: the model comes from zero_model_wrapper, which has the options of "
                    "the gradients; make the optimizer with zero_optim_wrapper, which has those of the scale"
                )
        held = {param for group in optimizer.param_groups for param in group["params"]}
        check_row_caches(model.unwrap(), [optimizer], model.replicas)
        with without_row_caches(model.unwrap()):
            shards = model.data.optimizer_params(optimizer, model.masters)
        model.masters = model.masters.without(held)
        if model.first_optimizer is None:
            ranks = model.replicas.mesh.group(tuple(model.replicas.mesh.axes))
            updates = updates_after_step(model, model.replicas)
            group = OptimizerGroup(scaler, ranks=ranks, replicas=model.replicas, after_step=updates)
        else:
            group = model.first_optimizer.group
        super().__init__(
            optimizer,
            group=group,
            param_names={param: name for name, param in model.named_parameters()},
            masters=shards,
            before_step=model.precision.step_hooks(),
            max_norm=clip_grad_norm,
            norm_type=norm_type,
        )
        model.first_optimizer = model.first_optimizer or self


def _model_of(
    optimizer: Optimizer, *, dtype: torch.dtype | None, stage: int, num_elements: int, **options: Any
) -> ZeroModel:
    """Return a model that is nothing but the parameters of an optimizer."""
    params = {
        f"group{number}_param{place}": param
        for number, group in enumerate(optimizer.param_groups)
        for place, param in enumerate(group["params"])
    }
    for name, param in params.items():
        if not isinstance(param, nn.Parameter):
            raise ValueError(
                f"{name} of shape {tuple(param.shape)} is a tensor and no torch.nn.Parameter: give the "
                "optimizer the parameters() of the modules (the attribute `weight` of a cached embedding is "
                "its whole table)"
            )
    cast = [param for param in params.values() if row_cache_of(param) is None]
    dtypes = {param.dtype for param in cast} if dtype is None else {dtype}
    names = {torch.float16: "fp16", torch.bfloat16: "bf16"}
    if dtype is not None and dtype not in names:
        raise ValueError(f"forced_dtype is {dtype!r}; it must be torch.float16, torch.bfloat16 or None")
    if len(dtypes) > 1 and dtypes & set(names):
        raise ValueError(
            f"the parameters are {', '.join(sorted(map(str, dtypes)))}; cast the model, or give forced_dtype"
        )
    if type(num_elements) is not int or num_elements < 1:
        raise ValueError(
            f"reduce_bucket_size is {num_elements!r}; it must be a number of elements, from 1 on"
        )
    size = max((param.element_size() for param in cast), default=1)
    return ZeroModel(
        nn.ParameterDict(params),
        ZeroReplicas(stage=stage, bucket_cap_mb=num_elements * size / 2**20, **options),
        PRECISIONS[next((names[each] for each in dtypes if each in names), "fp32")],
    )


def scaler_of(model: ZeroModel, options: Mapping[str, Any], defaults: Mapping[str, Any]) -> LossScaler | None:
    """Return the loss scaler of a model's first optimizer, None for the others, which share that one.

    None, too, where the precision has no scale; options that were given all the same are named in the log.

    Raises:
        ValueError: The first optimizer of the model has another loss scale.
    """
    if not isinstance(model.precision, NaiveFP16):
        if useless := [name for name, value in options.items() if value != defaults[name]]:
            get_dist_logger().log_once(
                f"{', '.join(useless)}: no effect, only float16 (precision='fp16') has a loss scale",
                ranks=[0],
            )
        return None
    asked = NaiveFP16(**options)
    if model.first_optimizer is None:
        model.precision = asked
        return asked.make_scaler()
    if asked not in (model.precision, NaiveFP16(**defaults)):
        raise ValueError(
            f"an optimizer requires the loss scale {options}, but the first optimizer of this model has "
            f"another one, {model.precision}, and a model has one only: give the options with the first"
        )
    return None


def defaults_of(function: Callable[..., Any], names: Iterable[str]) -> dict[str, Any]:
    parameters = signature(function).parameters
    return {name: parameters[name].default for name in names}
