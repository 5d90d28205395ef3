"""Short questions about the launched job, and helpers for code that is the same on all ranks."""

import logging
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from colossalai.context import ParallelMode, global_context
from colossalai.logging import DistributedLogger, get_dist_logger
from colossalai.nn.parallel import broadcast_from_first
from colossalai.tensor import count_zero_grads, global_grad_norm, scale_grads, spec_of


def is_using_ddp() -> bool:
    """Whether there is more than one data-parallel rank."""
    return global_context.is_launched and global_context.data_parallel_size > 1


def is_using_pp() -> bool:
    """Whether there is more than one pipeline stage."""
    return global_context.is_launched and global_context.pipeline_parallel_size > 1


def is_using_sequence() -> bool:
    """Whether the job was launched with ranks that share sequences."""
    return global_context.is_launched and global_context.sequence_attention is not None


def is_dp_rank_0() -> bool:
    """Whether this is the first data-parallel rank of its group."""
    return not global_context.is_launched or global_context.is_first_rank(ParallelMode.DATA)


def is_tp_rank_0() -> bool:
    """Whether this is the first tensor-parallel rank of its group."""
    return not global_context.is_launched or global_context.is_first_rank(ParallelMode.TENSOR)


def is_no_pp_or_last_stage() -> bool:
    """Whether this rank sees the output of the model."""
    return not global_context.is_launched or global_context.is_pipeline_last_stage()


def print_rank_0(
    message: object,
    *values: object,
    logger: DistributedLogger | logging.Logger | None = None,
    sep: str = " ",
) -> None:
    """Write a message on global rank 0 only, through a logger.

    Args:
        message: The message.
        values: Further parts of it, as `print` takes them. The last one can be the logger.
        logger: A logger of `get_dist_logger`, or of the standard library; default: the former.
        sep: Put between the parts.

    Raises:
        ValueError: `logger` is of neither kind.
    """
    if logger is None and values and isinstance(values[-1], DistributedLogger | logging.Logger):
        *values, logger = values  # type: ignore[assignment]  # the documented second argument
    message = sep.join(map(str, (message, *values)))
    chosen = get_dist_logger() if logger is None else logger
    if isinstance(chosen, DistributedLogger):
        chosen.info(message, ranks=[0])
    elif not isinstance(chosen, logging.Logger):
        raise ValueError(f"logger is {logger!r}; it must be a logger, such as get_dist_logger() returns")
    elif not global_context.is_launched or global_context.get_global_rank() == 0:
        chosen.info(message)


def sync_model_param(model: nn.Module, parallel_mode: ParallelMode = ParallelMode.DATA) -> None:
    """Give all ranks of a mode the parameters and buffers of the first rank with the same slice."""
    broadcast_from_first(model, global_context.axis(parallel_mode))


def clip_grad_norm_fp32(
    parameters: Iterable[torch.Tensor] | torch.Tensor, max_norm: float, norm_type: float = 2.0
) -> torch.Tensor:
    """Scale gradients down so that their norm over all ranks, taken in float32, is at most `max_norm`.

    Args:
        parameters: Parameters, whole or sharded; the same on all ranks.
        max_norm: The bound, above 0.
        norm_type: The p of the p-norm; infinity for the largest absolute value.

    Returns:
        The norm before clipping.

    Raises:
        ValueError: `max_norm` is not above 0.
    """
    return clip_grad_norm(parameters, max_norm, norm_type)


def clip_grad_norm(
    parameters: Iterable[torch.Tensor] | torch.Tensor,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale gradients down as `clip_grad_norm_fp32` does, with the arguments of torch's `clip_grad_norm_`.

    Args:
        parameters: Parameters, whole or sharded; the same on all ranks.
        max_norm: The bound, above 0.
        norm_type: The p of the p-norm; infinity for the largest absolute value.
        error_if_nonfinite: Refuse a norm that is infinite or NaN; the gradients stay as they are then.

    Returns:
        The norm before clipping.

    Raises:
        ValueError: `max_norm` is not above 0.
        RuntimeError: The norm is not finite, with `error_if_nonfinite`.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm is {max_norm}; it must be above 0")
    params = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    norm = global_grad_norm(params, norm_type)
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(
            f"the norm of the gradients is {norm.item()}: leave out error_if_nonfinite to clip all the same"
        )
    scale_grads(params, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def count_zeros_fp32(parameters: Iterable[torch.Tensor] | torch.Tensor) -> int:
    """Return how many elements of the gradients are 0, over all ranks; collective.

    Args:
        parameters: Parameters, whole or sharded; the same on all ranks. Replicas count once.
    """
    return count_zero_grads([parameters] if isinstance(parameters, torch.Tensor) else list(parameters))


def is_model_parallel_parameter(param: torch.Tensor) -> bool:
    """Whether a rank holds only a part of a parameter because tensor parallelism cuts it."""
    spec = spec_of(param)
    return spec is not None and spec.local_shape != spec.shape


@contextmanager
def conditional_context(context_manager: AbstractContextManager[Any], enable: bool = True) -> Iterator[Any]:
    """Enter a context only if `enable`."""
    with context_manager if enable else nullcontext() as entered:
        yield entered


def ensure_path_exists(filename: str | Path) -> None:
    """Make the folder that a file of this name is in."""
    Path(filename).parent.mkdir(parents=True, exist_ok=True)
