"""Checkpoints of `colossalai.initialize`: one file for model, optimizer and scheduler."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from colossalai import checkpoint_io
from colossalai.cluster import gather_values
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
        state_dict: That of this rank's stage, with the names of the whole model: tensors and plain values.

    Returns:
        The entries of all stages, in their order, on the first stage, those of other stages on the host; an
        empty dict on other stages.

    Raises:
        ValueError: A value of some stage is neither a tensor nor plain; on all stages.
    """
    if not global_context.is_launched or global_context.pipeline_parallel_size == 1:
        return dict(state_dict)
    axis = global_context.axis(ParallelMode.PIPELINE)
    group = global_context.get_cpu_group(ParallelMode.PIPELINE)
    own = [
        (name, True, (tuple(value.shape), value.dtype))
        if isinstance(value, torch.Tensor)
        else (name, False, value)
        for name, value in state_dict.items()
    ]
    stages = gather_values(own, group)
    # One tensor at a time, which the first stage waits for.
    if axis.rank > 0:
        for value in state_dict.values():
            if isinstance(value, torch.Tensor) and value.numel() > 0:
                # gloo sends only contiguous tensors.
                dist.send(value.detach().cpu().contiguous(), axis.ranks[0], group=group)
        return {}
    whole = dict(state_dict)
    for source, entries in zip(axis.ranks[1:], stages[1:], strict=True):
        for name, is_tensor, content in entries:
            if is_tensor:
                shape, dtype = content
                whole[name] = torch.empty(shape, dtype=dtype)
                if whole[name].numel() > 0:
                    dist.recv(whole[name], source, group=group)
            else:
                whole[name] = content
    return whole


def _raw_model(model: nn.Module) -> nn.Module:
    return model.unwrap() if isinstance(model, ModelWrapper) else model
