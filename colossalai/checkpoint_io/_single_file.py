"""Single-file checkpoint of the Engine: model, optimizer, scheduler and epoch in one torch file.

It is a dictionary: `epoch`, `model` (a state dict), and if they were given `optimizer` (by parameter name)
and `lr_scheduler`.
"""

from collections.abc import Collection
from os import PathLike
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from colossalai.checkpoint_io._collective import called_by_all_ranks, on_every_rank
from colossalai.checkpoint_io._model import (
    MODEL,
    ModelLoadPlan,
    local_model_state,
    plan_model_loading,
)
from colossalai.checkpoint_io._optimizer import OptimizerLoadPlan, plan_optimizer_loading
from colossalai.checkpoint_io._optimizer_state import (
    OPTIMIZER,
    local_optimizer_state,
    named_parameters,
    opened,
)
from colossalai.checkpoint_io._save_plan import gather_states
from colossalai.checkpoint_io._state import NamedModel, names_elsewhere
from colossalai.checkpoint_io.formats import Stateful, read_plain, state_of, write_torch_states
from colossalai.checkpoint_io.resharding import plain, with_own_memory
from colossalai.checkpoint_io.storage import DEFAULT_BUFFER_MB, atomic_file, listed, staged
from colossalai.tensor import as_memory


@called_by_all_ranks("save", "a checkpoint")
@as_memory()
def save_checkpoint(
    file: str | Path,
    epoch: int,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    lr_scheduler: Stateful | None = None,
    *,
    buffer_size: float = DEFAULT_BUFFER_MB,
) -> None:
    """Save a model, optimizer and scheduler in one file; collective: every rank calls it, rank 0 writes.

    Args:
        file: The file.
        epoch: The epoch that is finished.
        model: The model.
        optimizer: An optimizer of parameters of the model.
        lr_scheduler: The scheduler of its learning rate.
        buffer_size: The most memory, in MB (1024 * 1024 bytes), that saving takes on a rank.

    Raises:
        ValueError: The optimizer holds parameters that are not the model's, or a state is not plain.
        OSError: The file cannot be written; on all ranks. An earlier file is kept.
    """
    _check(file, model, optimizer, "save_checkpoint(file, epoch, model, optimizer, lr_scheduler)")
    if type(epoch) is not int:
        raise ValueError(f"epoch is {epoch!r}; it must be an integer: save_checkpoint(file, epoch, model)")
    with opened(optimizer, loads=False) as raw:
        _save(file, epoch, model, raw, lr_scheduler, buffer_size=buffer_size)


def _check(file: Any, model: Any, optimizer: Any, form: str) -> None:
    """Refuse arguments in another order."""
    if not isinstance(file, str | PathLike):
        raise ValueError(f"file is {file!r:.80}; it must be a path: {form}")
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is {model!r:.80}; it must be a torch.nn.Module: {form}")
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise ValueError(f"optimizer is {optimizer!r:.80}; it must be a torch.optim.Optimizer: {form}")


def _save(
    file: str | Path,
    epoch: int,
    model: nn.Module,
    optimizer: Optimizer | None,
    lr_scheduler: Stateful | None,
    *,
    buffer_size: float,
) -> None:
    named = NamedModel.of(model)
    local = {MODEL: local_model_state(named)}
    if optimizer is not None:
        local[OPTIMIZER] = local_optimizer_state(optimizer, named.parameter_names())
    states = dict(zip(local, gather_states(*local.values())[0], strict=True))
    content: dict[str, Any] = {"epoch": epoch}
    if lr_scheduler is not None:
        content["lr_scheduler"] = plain(lr_scheduler.state_dict(), at="lr_scheduler")
    with staged(atomic_file, file, num_bytes=sum(state.nbytes for state in states.values())) as write:
        content |= {kind.part: kind.join(state) for kind, state in states.items()}
        # Collective: ranks with boxes that the writer lacks send them, block by block.
        write_torch_states(write, content, states.values(), buffer_size=buffer_size)


@called_by_all_ranks("load", "a checkpoint")
@as_memory()
def load_checkpoint(
    file: str | Path,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    lr_scheduler: Stateful | None = None,
    strict: bool = True,
    *,
    allow_pickle: bool = False,
) -> int:
    """Load a file of `save_checkpoint`; collective: every rank calls it and copies its own slices.

    Args:
        file: The file.
        model: The model to overwrite.
        optimizer: The optimizer to overwrite, if wanted.
        lr_scheduler: The scheduler to overwrite, if wanted.
        strict: Raise if the model and its weights do not match; otherwise load the matching values and warn.
        allow_pickle: Run the code that the file can contain, if it cannot be restored without: only for a
            file from a trusted source.

    Returns:
        The epoch that was saved.

    Raises:
        ValueError: The file is damaged, lacks a part that is wanted, or has other names or shapes; nothing
            was overwritten.
        OSError: The file cannot be read.
    """
    _check(file, model, optimizer, "load_checkpoint(file, model, optimizer, lr_scheduler)")
    with opened(optimizer, loads=True) as raw:
        return _load(Path(file), model, raw, lr_scheduler, strict=strict, allow_pickle=allow_pickle)


def _load(
    path: Path,
    model: nn.Module,
    optimizer: Optimizer | None,
    lr_scheduler: Stateful | None,
    *,
    strict: bool,
    allow_pickle: bool,
) -> int:
    named = NamedModel.of(model)
    names = named.parameter_names()

    def own_names() -> list[Collection[str]]:
        params = named_parameters(optimizer, names) if optimizer is not None else {}
        return [named.values, params]

    models, optimizers = names_elsewhere(own_names)
    source = str(path)

    def plan() -> tuple[dict[str, Any], ModelLoadPlan, OptimizerLoadPlan | None]:
        content = read_plain(path, mapped=True, allow_pickle=allow_pickle)
        wanted = {"epoch": True, MODEL.part: True, OPTIMIZER.part: optimizer, "lr_scheduler": lr_scheduler}
        missing = [part for part, want in wanted.items() if want is not None and part not in content]
        if missing:
            raise ValueError(f"{path} holds no {listed(missing)}; there is {listed(map(str, content))}")
        stored = MODEL.join(state_of(content[MODEL.part], MODEL))
        weights = plan_model_loading(named, stored, source=source, strict=strict, elsewhere=models)
        if optimizer is None:
            return content, weights, None
        state = OPTIMIZER.join(state_of(content[OPTIMIZER.part], OPTIMIZER))
        updates = plan_optimizer_loading(optimizer, state, names, source=source, elsewhere=optimizers)
        return content, weights, updates

    # Everything is read and compared here; if one rank cannot go on, none has overwritten anything.
    content, weights, updates = on_every_rank(plan)
    with weights.noted():
        on_every_rank(weights.apply)
    if updates is not None:
        on_every_rank(updates.apply)
    if lr_scheduler is not None:
        lr_scheduler.load_state_dict(with_own_memory(content["lr_scheduler"]))
    epoch: int = content["epoch"]
    return epoch
