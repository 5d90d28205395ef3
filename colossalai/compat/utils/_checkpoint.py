"""Checkpoints of the config door: one file for model, optimizer and scheduler."""

from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from colossalai import checkpoint_io
from colossalai.context import names_arguments
from colossalai.runtime import ModelWrapper


@names_arguments
def save_checkpoint(
    file: str | Path,
    epoch: int,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    lr_scheduler: Any = None,
) -> None:
    """Save a model and what trains it to one file; every rank calls it, rank 0 writes.

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
    """Load what `save_checkpoint` saved and return the epoch; the parallel plan may be another one.

    Args:
        file: The file.
        model: The model, or the engine's.
        optimizer: Its optimizer, or the engine's.
        lr_scheduler: A scheduler.
        strict: Whether missing and unexpected names are errors.
        allow_pickle: Run the code that the file may hold, if it cannot be restored without: only for a file
            from somebody whom you trust.
    """
    return checkpoint_io.load_checkpoint(
        file, _raw_model(model), optimizer, lr_scheduler, strict=strict, allow_pickle=allow_pickle
    )


def _raw_model(model: nn.Module) -> nn.Module:
    return model.unwrap() if isinstance(model, ModelWrapper) else model
