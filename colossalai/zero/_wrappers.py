"""ZeRO for a model and its optimizers without Booster and without a config.

model = zero_model_wrapper(model, zero_stage=2)
optimizer = zero_optim_wrapper(model, optimizer)
optimizer.backward(loss)
optimizer.step()

`LowLevelZeroOptimizer(optimizer, ...)` does it for an optimizer alone.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from colossalai.amp import (
    FullPrecision,
    LossScaler,
    Masters,
    NaiveFP16,
    OptimizerWrapper,
    Precision,
    PureBF16,
    apply_precision,
)
from colossalai.context import Axis, global_context
from colossalai.logging import get_dist_logger
from colossalai.nn.parallel import AppliedDataMethod
from colossalai.zero._replicas import ZeroReplicas

_PRECISIONS: dict[str, Precision] = {"bf16": PureBF16(), "fp16": NaiveFP16(), "fp32": FullPrecision()}


class ZeroModel(nn.Module):
    """What `zero_model_wrapper` returns. Names and attributes are those of the model that was given.

    Args:
        raw: The model that was given.
        data: The method, applied to the same in a precision.
        replicas: The ranks over which optimizers are cut.
        masters: Float32 masters that no optimizer has taken yet.
        precision: The precision.
    """

    def __init__(
        self,
        raw: nn.Module,
        *,
        data: AppliedDataMethod,
        replicas: Axis,
        masters: Masters,
        precision: Precision,
    ) -> None:
        super().__init__()
        self.module = data.module
        self.data = data
        self.replicas = replicas
        self.masters = masters
        self.precision = precision
        self.first_optimizer: LowLevelZeroOptimizer | None = None
        object.__setattr__(self, "_raw", raw)  # not a sub-module: its parameters are those of `module`

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_raw" not in self.__dict__:
                raise
            return getattr(self._raw, name)

    def unwrap(self) -> nn.Module:
        """Return the model that was given."""
        raw: nn.Module = self.__dict__["_raw"]
        return raw

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model."""
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within the block, backwards add to gradients; with stage 1 they send nothing."""
        self.data.set_sync(enabled=False)
        try:
            yield
        finally:
            self.data.set_sync(enabled=True)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state of the model that was given, under its own names."""
        return self.unwrap().state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load a state into the model that was given."""
        return self.unwrap().load_state_dict(*args, **kwargs)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Return the parameters under the names of the model that was given."""
        return self.unwrap().named_parameters(prefix, recurse, remove_duplicate)


class LowLevelZeroOptimizer(OptimizerWrapper):
    """An optimizer that works on this rank's slices of the parameters.

    Made from an optimizer alone, as here, it takes the parameters as they are: float16 and bfloat16 ones get
    float32 masters, and the model, which it does not know, is called as it is. Build the model first, on the
    device of the rank; call `backward(loss)` of this object. `zero_optim_wrapper` makes one for a model that
    went through `zero_model_wrapper`, which also casts what goes into the model and comes out of it.

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
        model: What `zero_model_wrapper` returned; it may have several optimizers, of different parameters.
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
                overlap_communication=overlap_communication,
                cpu_offload=cpu_offload,
            )
            scaler = _scaler_of(model, options, _defaults(LowLevelZeroOptimizer.__init__, options))
        else:
            options |= {
                "reduce_bucket_size": reduce_bucket_size,
                "communication_dtype": communication_dtype,
                "overlap_communication": overlap_communication,
                "partition_grad": partition_grad,
                "cpu_offload": cpu_offload,
                "forced_dtype": forced_dtype,
            }
            defaults = _defaults(LowLevelZeroOptimizer.__init__, options)
            if taken := [name for name, value in options.items() if value != defaults[name]]:
                raise ValueError(
                    f"{', '.join(taken)}: the model comes from zero_model_wrapper, which has the options of "
                    "the gradients; make the optimizer with zero_optim_wrapper, which has those of the scale"
                )
        held = {param for group in optimizer.param_groups for param in group["params"]}
        shards = model.data.stand_ins(optimizer, model.masters)
        model.masters = model.masters.without(held)
        super().__init__(
            optimizer,
            scaler=scaler,
            group=model.replicas.mesh.group(tuple(model.replicas.mesh.axes)),
            replicas=model.replicas,
            param_names={param: name for name, param in model.named_parameters()},
            masters=shards,
            before_step=model.precision.before_step,
            max_norm=clip_grad_norm,
            norm_type=norm_type,
            beside=model.first_optimizer,
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
    dtypes = {param.dtype for param in params.values()} if dtype is None else {dtype}
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
    size = max((param.element_size() for param in params.values()), default=1)
    return zero_model_wrapper(
        nn.ParameterDict(params),
        stage,
        precision=next((names[each] for each in dtypes if each in names), "fp32"),
        bucket_cap_mb=num_elements * size / 2**20,
        **options,
    )


def zero_model_wrapper(
    model: nn.Module,
    zero_stage: int = 1,
    gemini_config: dict[str, Any] | None = None,
    *,
    precision: str = "bf16",
    bucket_cap_mb: float = 25.0,
    overlap_communication: bool = True,
    communication_dtype: torch.dtype | None = None,
    cpu_offload: bool = False,
) -> ZeroModel:
    """Prepare a model for ZeRO over the data-parallel ranks; call it before `zero_optim_wrapper`.

    Args:
        model: The model; it is moved to the device of this rank and changed in place.
        zero_stage: 1 cuts optimizer states, 2 also gradients.
        gemini_config: For stage 3, which is not there yet.
        precision: "bf16" or "fp16": all in that precision, with float32 masters; "fp32": as the model is.
        bucket_cap_mb: Size of a bucket of gradients in MB (1024 * 1024 bytes).
        overlap_communication: Average gradients while the backward runs.
        communication_dtype: The dtype in which gradients are sent; None: their own.
        cpu_offload: Keep optimizer states and masters in host memory.

    Raises:
        RuntimeError: The job has not been launched.
        ValueError: `zero_stage` is not 1 or 2, `gemini_config` is given, `precision` is unknown, another
            option is out of range, or a parameter has no values yet.
    """
    if zero_stage == 3:
        raise ValueError("zero_stage is 3, which is not there yet: use TorchFSDPPlugin, or stage 1 or 2")
    if gemini_config is not None:
        raise ValueError(f"gemini_config is for stage 3, and zero_stage is {zero_stage}: leave it out")
    if precision not in _PRECISIONS:
        raise ValueError(f"precision is {precision!r}; it must be one of {list(_PRECISIONS)}")
    for name, param in model.named_parameters():
        if param.is_meta:
            raise ValueError(
                f"{name} of shape {tuple(param.shape)} has no values yet: call "
                "LazyInitContext.materialize(model) before zero_model_wrapper"
            )
    data = ZeroReplicas(
        stage=zero_stage,
        bucket_cap_mb=bucket_cap_mb,
        overlap=overlap_communication,
        communication_dtype=communication_dtype,
        cpu_offload=cpu_offload,
    )
    device = global_context.device
    mesh = global_context.mesh
    replicas = mesh.axis(mesh.batch_axes)  # those that share a sequence hold the same weights
    model.to(device)
    chosen = _PRECISIONS[precision]
    masters = chosen.convert_model(model, float32_grads=data.allows_float32_grads(replicas))
    computing = apply_precision(model, chosen, device.type)
    applied = data.apply(computing, blocks=[], replicas=replicas, device=device)
    masters.start_equal(replicas)
    return ZeroModel(model, data=applied, replicas=replicas, masters=masters, precision=chosen)


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
        model: What `zero_model_wrapper` returned.
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
        ValueError: `model` has not been through `zero_model_wrapper`, `optimizer` cannot be cut, or an option
            is out of range, or differs from that of the model's first optimizer.
    """
    if not isinstance(model, ZeroModel):
        raise ValueError(
            f"the model is a {type(model).__name__}: pass what zero_model_wrapper(model, ...) returned"
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
    scaler = _scaler_of(model, options, _defaults(zero_optim_wrapper, options))
    return LowLevelZeroOptimizer(
        optimizer, model=model, scaler=scaler, clip_grad_norm=max_norm, norm_type=norm_type
    )


def _scaler_of(
    model: ZeroModel, options: Mapping[str, Any], defaults: Mapping[str, Any]
) -> LossScaler | None:
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
            f"an optimizer asks for the loss scale {options}, but the first optimizer of this model has "
            f"another one, {model.precision}, and a model has one only: give the options with the first"
        )
    return None


def _defaults(function: Callable[..., Any], names: Iterable[str]) -> dict[str, Any]:
    parameters = signature(function).parameters
    return {name: parameters[name].default for name in names}
