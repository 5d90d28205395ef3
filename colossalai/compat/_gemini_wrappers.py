"""Gemini without Booster and without a config: the documented classes.

model = GeminiDDP(model, device=get_current_device(), placement_policy="cpu")
optimizer = GeminiAdamOptimizer(model, lr=1e-3, initial_scale=2**5)
optimizer.backward(loss)
optimizer.step()

They are `ZeroModel` and `LowLevelZeroOptimizer` with other arguments.
"""

import inspect
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from colossalai._not_landed import refuse_name
from colossalai.compat.chunk import GeminiManager
from colossalai.context import UnknownArgumentError, names_arguments
from colossalai.logging import get_dist_logger
from colossalai.nn.optimizer import HybridAdam
from colossalai.nn.parallel import AppliedDataMethod
from colossalai.zero import LowLevelZeroOptimizer, ZeroModel, check_device, defaults_of, scaler_of
from colossalai.zero.gemini import MB, GeminiOptions, handle_of, ordinary_copy

_CPU = torch.device("cpu")


class GeminiDDP(ZeroModel):
    """A model in chunks: each rank holds a section of every chunk, which is gathered where it is used.

    Any model, as it is. Outside of a forward or a backward, parameters are read and written inside
    `with model.gathered():`. Make the optimizer by `GeminiAdamOptimizer(model, ...)`, or give one of your own
    to `ZeroOptimizer` or `zero_optim_wrapper`; call its `backward(loss)`.

    Args:
        module: The model; it is changed in place.
        device: Its compute device: `get_current_device()`, which is also the default.
        placement_policy: Placement of sections and optimizer states: "cuda" on the compute device, "cpu" on
            the host except for chunks in use, "const" within `memory_budget` on the device, "auto" by the
            trace of the first iteration, "nvme" as that, plus disk.
        pin_memory: Pin sections in host memory; no effect without an accelerator.
        force_outputs_fp32: Outputs are float32 in any precision; with "fp16" and "bf16" they always are.
        strict_ddp_mode: Refuse parameters that tensor parallelism has cut.
        search_range_mb: Range of chunk sizes above `min_chunk_size_mb`, in MB of 2**20 elements.
        hidden_dim: The step between sizes, in elements; default 1024.
        min_chunk_size_mb: The least size of a chunk, in MB of 2**20 elements; a smaller model has one chunk.
        memstats: Not taken: the first iteration is recorded.
        verbose: Log the parameters of each chunk.
        precision: "fp16" and "bf16": all in that precision, with float32 masters; "fp32": as the model is.
        memory_budget: Bytes that a rank can take on the compute device; None: its free memory, on a CPU no
            bound.
        host_budget: Bytes that model data may take in host memory; None: no bound.
        offload_dir: Folder of the disk tier.
        whole_modules: Names of modules as in `model.named_modules()`, or classes, that all ranks gather at
            their entry, since ranks can differ inside, such as experts chosen by data. All enter them
            equally often; not in a pipeline.

    Raises:
        RuntimeError: The job has not been launched.
        ValueError: An option is unknown, of the wrong type or out of range, `device` is not this rank's, or
            `module` is prepared already, has a parameter without values, or cannot be put into chunks.
    """

    @names_arguments
    def __init__(  # noqa: PLR0913 - the documented options
        self,
        module: nn.Module,
        device: torch.device | str | int | None = None,
        placement_policy: str = "cpu",
        pin_memory: bool = False,
        force_outputs_fp32: bool = False,
        strict_ddp_mode: bool = False,
        search_range_mb: float = 32,
        hidden_dim: int | None = None,
        min_chunk_size_mb: float = 32,
        memstats: Any = None,
        verbose: bool = False,
        *,
        precision: str = "fp16",
        memory_budget: int | None = None,
        host_budget: int | None = None,
        offload_dir: str | os.PathLike[str] | None = None,
        whole_modules: Sequence[str | type[nn.Module]] = (),
    ) -> None:
        check_device(device)
        options = GeminiOptions(
            device=device,
            placement_policy=placement_policy,
            precision=precision,
            pin_memory=pin_memory,
            force_outputs_fp32=force_outputs_fp32,
            strict_ddp_mode=strict_ddp_mode,
            search_range_mb=search_range_mb,
            hidden_dim=hidden_dim,
            min_chunk_size_mb=min_chunk_size_mb,
            memstats=memstats,
            memory_budget=memory_budget,
            host_budget=host_budget,
            offload_dir=offload_dir,
            whole_modules=whole_modules,
        )
        super().__init__(module, options.method(), options.make_precision())
        if verbose:
            _log_chunks(module)


class ZeroDDP(ZeroModel):
    """A model in chunks, whose sizes and policy come in a `GeminiManager`; see `GeminiDDP`.

    Args:
        module: The model; it is changed in place.
        gemini_manager: Sizes and placement of chunks.
        pin_memory: See `GeminiDDP`, as for all that follows.
        force_outputs_fp32: Likewise.
        strict_ddp_mode: Likewise.
        precision: Likewise.
        memory_budget: Likewise.
        host_budget: Likewise.
        offload_dir: Likewise.
        whole_modules: Likewise.

    Raises:
        RuntimeError: The job has not been launched.
        ValueError: `gemini_manager` is not a `GeminiManager`, or something is wrong as for `GeminiDDP`.
    """

    @names_arguments
    def __init__(
        self,
        module: nn.Module,
        gemini_manager: GeminiManager,
        pin_memory: bool = False,
        force_outputs_fp32: bool = False,
        strict_ddp_mode: bool = False,
        *,
        precision: str = "fp16",
        memory_budget: int | None = None,
        host_budget: int | None = None,
        offload_dir: str | os.PathLike[str] | None = None,
        whole_modules: Sequence[str | type[nn.Module]] = (),
    ) -> None:
        if not isinstance(gemini_manager, GeminiManager):
            raise ValueError(
                f"gemini_manager is a {type(gemini_manager).__name__}: give GeminiManager(placement_policy, "
                "chunk_manager), or take GeminiDDP, which needs none"
            )
        options = GeminiOptions(
            placement_policy=gemini_manager.placement_policy,
            precision=precision,
            pin_memory=pin_memory,
            force_outputs_fp32=force_outputs_fp32,
            strict_ddp_mode=strict_ddp_mode,
            memory_budget=memory_budget,
            host_budget=host_budget,
            offload_dir=offload_dir,
            whole_modules=whole_modules,
        )
        chunks = gemini_manager.chunk_manager
        method = replace(options.method(), sizes=chunks.sizes, filters_outliers=chunks.filters_outliers)
        super().__init__(module, method, options.make_precision())


class ZeroOptimizer(LowLevelZeroOptimizer):
    """An optimizer of a model in chunks; call its `backward(loss)` and `step()`.

    Args:
        optim: Any optimizer, which is changed in place; a model may have several, of different parameters.
        module: A result of `GeminiDDP`, `ZeroDDP` or `zero_model_wrapper`.
        gpu_margin_mem_ratio: The part of the free device memory that optimizer states take, from the second
            step on; no effect without an accelerator, where states have all that is free.
        initial_scale: First loss scale of precision "fp16"; so are all up to `max_scale`.
        min_scale: The scale does not shrink below it.
        growth_factor: Factor of the scale after `growth_interval` steps without overflow.
        backoff_factor: Factor of the scale after overflows.
        growth_interval: Number of steps without overflow before the scale grows.
        hysteresis: Number of overflows since the last growth before the scale shrinks.
        max_scale: The scale does not grow above it.
        clipping_norm: Bound of the gradient norm over all ranks, to which every step clips; 0 for none.
        norm_type: The p of that norm.
        verbose: Log every change of the loss scale.

    Raises:
        ValueError: `module` is not such a result, `optim` cannot be cut, has a parameter
            that another optimizer of the model has, or puts states on disk as `module` does, or an option is
            out of range.
    """

    def __init__(  # noqa: PLR0913 - the documented options
        self,
        optim: Optimizer,
        module: ZeroModel,
        gpu_margin_mem_ratio: float = 0.0,
        initial_scale: float = 2.0**32,
        min_scale: float = 1.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
        max_scale: float = 2.0**32,
        clipping_norm: float = 0.0,
        norm_type: float = 2.0,
        verbose: bool = False,
    ) -> None:
        options = {
            "initial_scale": initial_scale,
            "min_scale": min_scale,
            "growth_factor": growth_factor,
            "backoff_factor": backoff_factor,
            "growth_interval": growth_interval,
            "hysteresis": hysteresis,
            "max_scale": max_scale,
            "verbose": verbose,
        }
        _check_is_zero_model(module)
        GeminiOptions(gpu_margin_mem_ratio=gpu_margin_mem_ratio)  # checks the range
        super().__init__(
            optim,
            model=module,
            scaler=scaler_of(module, options, defaults_of(ZeroOptimizer.__init__, options)),
            clip_grad_norm=clipping_norm,
            norm_type=norm_type,
        )
        if gpu_margin_mem_ratio:
            data: Any = module.data
            data.set_state_margin(gpu_margin_mem_ratio)


class GeminiAdamOptimizer(ZeroOptimizer):
    """`HybridAdam` for a model in chunks.

    Args:
        model: A result of `GeminiDDP`, `ZeroDDP` or `zero_model_wrapper`.
        options: Keywords of `HybridAdam` (`lr`, `betas`, `weight_decay`, `nvme_offload_fraction`, ...), and
            of `ZeroOptimizer` (`initial_scale`, `clipping_norm`, ...).

    Raises:
        ValueError: An option is unknown to both or out of range, or `model` is not such a result.
    """

    def __init__(self, model: ZeroModel, **options: Any) -> None:
        _check_is_zero_model(model)
        of_optimizer = _keywords(HybridAdam, skip=("model_params",))
        of_zero = _keywords(ZeroOptimizer, skip=("optim", "module"))
        known = (*of_optimizer, *of_zero)
        if unknown := [name for name in options if name not in known]:
            raise UnknownArgumentError(
                f"GeminiAdamOptimizer has no argument {unknown[0]!r}; it has {', '.join(known)}"
            )
        optimizer = HybridAdam(
            model.parameters(), **{name: value for name, value in options.items() if name in of_optimizer}
        )
        super().__init__(
            optimizer, model, **{name: value for name, value in options.items() if name in of_zero}
        )


def get_static_torch_model(
    zero_ddp_model: nn.Module,
    device: torch.device | str | int = _CPU,
    dtype: torch.dtype | None = torch.float32,
    only_rank_0: bool = True,
) -> nn.Module:
    """Return an ordinary copy of a model in chunks, with whole values; all ranks call it.

    The chunks are gathered one after the other. Nothing of the copy is shared with the model.

    Args:
        zero_ddp_model: A result of `GeminiDDP`, `ZeroDDP` or `zero_model_wrapper`, or the model inside.
        device: Device of the copy.
        dtype: Of its floating tensors; None: as they are.
        only_rank_0: Whether global rank 0 alone gets values; the copies of the others are on the meta device.

    Raises:
        ValueError: `zero_ddp_model` is another wrapper, `device` is none or `dtype` is not a floating one.
    """
    if not isinstance(zero_ddp_model, nn.Module):
        raise ValueError(f"the model is a {type(zero_ddp_model).__name__}; it must be a torch.nn.Module")
    raw = zero_ddp_model.unwrap() if isinstance(zero_ddp_model, ZeroModel) else zero_ddp_model
    if any(isinstance(value, AppliedDataMethod) for value in vars(raw).values()):
        raise ValueError(f"the model is a {type(raw).__name__}: pass the result of its unwrap()")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"dtype is {dtype!r}; it must be a floating one such as torch.float32, or None")
    return ordinary_copy(
        raw,
        device=torch.device(device),
        dtype=dtype,
        is_wanted=not only_rank_0 or not dist.is_initialized() or dist.get_rank() == 0,
    )


def _keywords(function: type, *, skip: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for name in inspect.signature(function).parameters if name not in skip)


def _check_is_zero_model(model: object) -> None:
    if not isinstance(model, ZeroModel):
        raise ValueError(
            f"the model is a {type(model).__name__}: pass the result of GeminiDDP(model, ...), "
            "ZeroDDP(model, ...) or zero_model_wrapper(model, ...)"
        )


def _log_chunks(module: nn.Module) -> None:
    """Log the parameters of each chunk, on rank 0."""
    params_of: dict[int, list[str]] = {}
    chunks = {}
    for name, param in module.named_parameters():
        chunk = handle_of(param).chunk
        chunks[chunk.number] = chunk
        params_of.setdefault(chunk.number, []).append(name)
    for number, names in sorted(params_of.items()):
        layout = chunks[number].layout
        get_dist_logger().info(
            f"chunk {number}: {len(names)} parameters, {names[0]} to {names[-1]}, {layout.numel / MB:.2f} MB "
            f"of 2**20 elements, cut over {layout.axis.size} ranks",
            ranks=[0],
        )


if not TYPE_CHECKING:
    __getattr__ = partial(refuse_name, "colossalai.nn.parallel.data_parallel")  # PEP 562: missing names
__path__: list[str] = []  # as a package, so that the import of a missing name uses the finder
