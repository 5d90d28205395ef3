"""Checkpoints of the config door: one file for model, optimizer and scheduler."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from colossalai import checkpoint_io
from colossalai.context import ParallelMode, global_context, names_arguments
from colossalai.runtime import ModelWrapper


@names_arguments
def save_checkpoint(
    file: str | Path,
    epoch: int,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    lr_scheduler: Any = None,
) -> None:
    """Save a model, optimizer and scheduler to one file; every rank calls it, rank 0 writes.

    Args:
        file: The file.
        epoch: Number of the epoch, returned by `load_checkpoint`.
        model: The model, or the engine's.
        optimizer: Its optimizer, or the engine's.
        lr_scheduler: A scheduler.
    """
    checkpoint_io.save_checkpoint(file, epoch, _raw_model(model), optimizer, lr_scheduler)


@names_arguments
def load_checkpoint(
    file: str | Path,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    lr_scheduler: Any = None,
    strict: bool = True,
    *,
    allow_pickle: bool = False,
) -> int:
    """Load a file of `save_checkpoint` and return the epoch; the parallel plan can be another one.

    Args:
        file: The file.
        model: The model, or the engine's.
        optimizer: Its optimizer, or the engine's.
        lr_scheduler: A scheduler.
        strict: Whether missing and unexpected names are errors.
        allow_pickle: Run the code that the file can contain, if it cannot be restored without: only for a
            file from a trusted source.
    """
    return checkpoint_io.load_checkpoint(
        file, _raw_model(model), optimizer, lr_scheduler, strict=strict, allow_pickle=allow_pickle
    )


def gather_pipeline_parallel_state_dict(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state dicts of all stages as one, on the first stage; collective along the pipeline.

    Args:
        state_dict: That of this rank's stage, with the names of the whole model.

    Returns:
        The entries of all stages, in their order, on the first stage; on others an empty dict.
    """
    if not global_context.is_launched or global_context.pipeline_parallel_size == 1:
        return dict(state_dict)
    axis = global_context.axis(ParallelMode.PIPELINE)
    gathered: list[Any] | None = [None] * axis.size if axis.rank == 0 else None
    group = global_context.get_cpu_group(ParallelMode.PIPELINE)
    # Every stage sends its entries to the first one, which waits for all of them.
    dist.gather_object(dict(state_dict), gathered, dst=axis.ranks[0], group=group)
    return {name: value for stage in gathered or () for name, value in stage.items()}


def _raw_model(model: nn.Module) -> nn.Module:
    return model.unwrap() if isinstance(model, ModelWrapper) else model
