"""Training states: saving all parts of a run in a folder, and resuming it, for Engine and Booster.

The parts are model, optimizer, scheduler, loss scale, random states, and the position in the data.
`colossalai.checkpoint_io` writes them; this module collects them from an assembled model and optimizer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeGuard

from torch import nn
from torch.optim import Optimizer

from colossalai.amp import OptimizerWrapper
from colossalai.checkpoint_io import (
    LoadReport,
    Stateful,
    TrainingState,
    load_model,
    resume_training_state,
    save_model,
    save_training_state,
)
from colossalai.context import Mesh
from colossalai.logging import get_dist_logger
from colossalai.runtime._plan import Plan
from colossalai.runtime._wrapper import ModelWrapper


@dataclass(frozen=True, kw_only=True)
class Run:
    """The parts of a run that are saved and loaded together; None is skipped.

    Attributes:
        model: The model, boosted, initialized or as it was given.
        optimizer: Its optimizer, likewise.
        lr_scheduler: A scheduler of the optimizer.
        dataloader: A loader with a position.
        settings: The result of `settings_of`, for readers.
        is_in_window: Whether there are gradients of a part of an accumulation window.
    """

    model: nn.Module
    optimizer: Optimizer | None = None
    lr_scheduler: Stateful | None = None
    dataloader: Stateful | None = None
    settings: Mapping[str, object] = field(default_factory=dict)
    is_in_window: bool = False


@dataclass(frozen=True)
class Resumed:
    """Position at which a run resumes.

    Attributes:
        step: The number of completed steps, as saved.
        epoch: Epoch of the next batch, from 0; None if it was not given.
        extra: The caller's own values.
    """

    step: int
    epoch: int | None
    extra: dict[str, Any]


def save_run(
    folder: str | Path,
    run: Run,
    *,
    step: int,
    epoch: int | None = None,
    extra: Mapping[str, object] | None = None,
    save_async: bool = False,
    keep_last: int = 2,
    every: int = 1,
    buffer_size: float = 512,
) -> Path | None:
    """Save a run as `folder/step-<step>`, if `every` divides `step`; collective.

    Args:
        folder: The folder of the run's training states.
        run: The run.
        step: The number of completed steps.
        epoch: Epoch of the next batch, from 0. Default: the loader's.
        extra: Plain values of the caller's own.
        save_async: Return when everything is copied to host memory, and write in the background.
        keep_last: Number of training states to keep in the folder.
        every: Save only if `step` is a multiple.
        buffer_size: Largest buffer for writing on a rank, in MB, in addition to the saved tensors.

    Returns:
        The path of the training state; None if it was not saved.

    Raises:
        ValueError: `step`, `every`, `keep_last` or another option is out of range, a value cannot be saved,
            or an accumulation window is open.
        OSError: The training state cannot be written; on all ranks. The last `keep_last` ones remain.
    """
    _check_options(step=step, epoch=epoch, extra=extra, every=every, keep_last=keep_last)
    if step % every:
        return None
    is_in_no_sync = isinstance(run.model, ModelWrapper) and run.model.is_in_no_sync
    if run.is_in_window or is_in_no_sync:
        raise ValueError(
            f"step {step} is within an accumulation window, whose gradients are not saved: save after "
            "optimizer.step(), or where engine.step() has returned True, and outside of no_sync; count these "
            "steps"
        )
    state = _training_state(run)
    state.extra = {"epoch": _epoch_of(run.dataloader) if epoch is None else epoch, "extra": dict(extra or {})}
    return save_training_state(
        folder, state, step=step, keep_last=keep_last, save_async=save_async, buffer_size=buffer_size
    )


def _check_options(*, step: object, epoch: object, extra: object, every: object, keep_last: object) -> None:
    """Refuse options of another type or out of range, before a rank begins to write."""
    for name, value, least in (("step", step, 0), ("every", every, 1), ("keep_last", keep_last, 1)):
        if type(value) is not int or value < least:
            raise ValueError(f"{name} is {value!r}; it must be an integer of at least {least}")
    if epoch is not None and (type(epoch) is not int or epoch < 0):
        raise ValueError(f"epoch is {epoch!r}; it must be an integer of at least 0, or None for the loader's")
    if extra is not None and not isinstance(extra, Mapping):
        raise ValueError(
            f"extra is {extra!r:.80}; it must be a dict of plain values, such as {{'best_loss': 0.3}}"
        )


def resume_run(folder: str | Path, run: Run, *, buffer_size: float = 512) -> Resumed | None:
    """Load the newest complete training state of a folder, or a given one; collective.

    Gradients are cleared.

    Args:
        folder: The folder, or a path that `save_run` returned.
        run: The parts to overwrite.
        buffer_size: Largest buffer for loading on a rank, in MB, in addition to the loaded tensors.

    Returns:
        Position of the run; None if there is no training state, and nothing has been changed.

    Raises:
        ValueError: All training states in `folder` are damaged, or the newest complete one lacks a part or
            has other names or shapes; nothing was overwritten.
        OSError: The training state cannot be read.
    """
    found: dict[str, Any] | None = resume_training_state(
        folder, _training_state(run), buffer_size=buffer_size
    )
    if found is None:
        return None
    if run.optimizer is not None:
        run.optimizer.zero_grad()
    return Resumed(found["step"], found.get("epoch"), found.get("extra", {}))


def settings_of(plan: Plan, mesh: Mesh, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a run as plain values: the ranks, the plan in full, the config as written."""
    return {"mesh": dict(mesh.axes), "plan": _readable(plan), "config": _readable(config)}


def with_position(dataloader: object) -> Stateful | None:
    """Return a loader if it has a position, else None, with one line in the log."""
    if dataloader is None or _knows_position(dataloader):
        return dataloader
    get_dist_logger().log_once(
        f"training states will not hold the position in the data: {type(dataloader).__name__} has none, "
        "colossalai.utils.get_dataloader makes a loader with one",
        ranks=[0],
    )
    return None


def _training_state(run: Run) -> TrainingState:
    if run.dataloader is not None and not _knows_position(run.dataloader):
        raise ValueError(
            f"the dataloader, a {type(run.dataloader).__name__}, has no state_dict and load_state_dict: "
            "plugin.prepare_dataloader and colossalai.utils.get_dataloader make a loader with a position; "
            "or leave it out"
        )
    optimizer = run.optimizer
    return TrainingState(
        model=run.model.unwrap() if isinstance(run.model, ModelWrapper) else run.model,
        optimizer=optimizer,
        lr_scheduler=run.lr_scheduler,
        dataloader=run.dataloader,
        scaler=optimizer.scaler if isinstance(optimizer, OptimizerWrapper) else None,
        config=run.settings,
    )


def _knows_position(dataloader: object) -> TypeGuard[Stateful]:
    return all(callable(getattr(dataloader, name, None)) for name in ("state_dict", "load_state_dict"))


def _epoch_of(dataloader: Stateful | None) -> int | None:
    epoch = None if dataloader is None else dataloader.state_dict().get("epoch")
    return epoch if isinstance(epoch, int) else None


def _readable(value: Any) -> Any:
    """Return options as values for JSON; an object as its class and its fields."""
    if is_dataclass(value) and not isinstance(value, type):
        options = {each.name: _readable(getattr(value, each.name)) for each in fields(value) if each.repr}
        return {"type": type(value).__name__, **options}
    if isinstance(value, Mapping):
        return {str(key): _readable(item) for key, item in value.items()}
    if isinstance(value, str | int | float | None):
        return value
    if isinstance(value, Sequence):
        return [_readable(item) for item in value]
    return str(value)


def save_moe_model(model: nn.Module, save_path: str | Path) -> None:
    """Save a model with all its experts in one file; every rank calls it, rank 0 writes.

    It is `save_model` by its documented name: the file loads under any expert-parallel size, and in one
    process by `load_state_dict`.

    Args:
        model: The model, boosted, initialized or as it was given.
        save_path: The file.

    Raises:
        OSError: The file cannot be written; on all ranks. An earlier file is not lost.
    """
    save_model(_raw(model), save_path)


def load_moe_model(model: nn.Module, load_path: str | Path) -> LoadReport:
    """Load a model with experts; every rank calls it and reads its own experts.

    Args:
        model: The model, boosted, initialized or as it was given.
        load_path: A file of `save_moe_model` or `save_model`.

    Returns:
        The report of names that did not fit, which is empty.

    Raises:
        ValueError: `load_path` is damaged, or its names or shapes are not the model's; nothing was
            overwritten.
        OSError: The file cannot be read.
    """
    return load_model(_raw(model), load_path)


def _raw(model: nn.Module) -> nn.Module:
    return model.unwrap() if isinstance(model, ModelWrapper) else model
