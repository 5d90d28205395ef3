"""Training states: model, optimizer, scheduler, random states, position in the data, in a folder per step.

    step-00000120/
        model/  optimizer/            sharded folders: a file for each rank, and an index
        parts.pt                      lr_scheduler, dataloader, scaler, the caller's own values
        random/00000-of-00002.pt      the random states of each rank
        manifest.json                 sizes and checksums of all of these

A folder is written under a hidden name, synced and renamed into place, so a process that is killed at any
moment leaves the previous training state or the new one. The newest complete one is found by content.
"""

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from colossalai.checkpoint_io._collective import (
    COLLECTIVE,
    called_by_all_ranks,
    from_writer,
    global_rank,
    num_ranks,
    on_every_rank,
    on_writer,
    results,
)
from colossalai.checkpoint_io._model import (
    MODEL,
    ModelLoadPlan,
    local_model_state,
    plan_model_loading,
)
from colossalai.checkpoint_io._optimizer import OptimizerLoadPlan, plan_optimizer_loading
from colossalai.checkpoint_io._optimizer_state import (
    OPTIMIZER,
    ParamNames,
    local_optimizer_state,
    named_parameters,
    opened,
)
from colossalai.checkpoint_io._retention import (
    CheckedState,
    candidates,
    check_state,
    make_way,
    newest_complete,
    refuse_lost,
    step_folder,
)
from colossalai.checkpoint_io._save_plan import SavePlan, gather_states, in_host_memory, write_training_state
from colossalai.checkpoint_io._state import Kind, NamedModel, names_elsewhere
from colossalai.checkpoint_io.formats import Stateful, read_plain, share_out
from colossalai.checkpoint_io.resharding import plain
from colossalai.checkpoint_io.storage import (
    DEFAULT_BUFFER_MB,
    MANIFEST,
    SMALL_FILE,
    Manifest,
    block_size,
    damage_named,
    folder_lock,
    host_copies,
    listed,
    random_file,
    read_block_size,
    start_save,
    wait_for_saves,
)
from colossalai.context import (
    fitting_random_state,
    is_of_this_place,
    random_state,
    say_other_layout,
    set_random_state,
)
from colossalai.logging import get_dist_logger
from colossalai.tensor import as_memory


@dataclass(kw_only=True)
class TrainingState:
    """The parts of a run that are saved together. Parts that are None are neither saved nor loaded.

    Attributes:
        model: The raw module, which may be sharded.
        optimizer: The optimizer, raw or wrapped.
        param_names: The names of its parameters; those of `model` if not given.
        lr_scheduler: The scheduler.
        dataloader: The position in the data. The state of rank 0 is saved and given to all ranks.
        scaler: The loss scale of mixed precision.
        extra: Plain values of the caller's own: epoch, best loss, ...
        config: The options of the run, kept for people to read.
    """

    model: nn.Module
    optimizer: Optimizer | None = None
    param_names: ParamNames | None = None
    lr_scheduler: Stateful | None = None
    dataloader: Stateful | None = None
    scaler: Stateful | None = None
    extra: Mapping[str, object] = field(default_factory=dict)
    config: Mapping[str, object] = field(default_factory=dict)

    @property
    def small_parts(self) -> dict[str, Stateful]:
        """The parts other than model and optimizer that have a state."""
        parts = {"lr_scheduler": self.lr_scheduler, "dataloader": self.dataloader, "scaler": self.scaler}
        return {name: part for name, part in parts.items() if part is not None}


@called_by_all_ranks("save", "a training state")
@as_memory()
def save_training_state(
    folder: str | Path,
    state: TrainingState,
    *,
    step: int,
    keep_last: int = 2,
    save_async: bool = False,
    buffer_size: float = DEFAULT_BUFFER_MB,
) -> Path:
    """Save a training state as `folder/step-<step>` and remove older ones; collective.

    Every rank writes its own part, so all ranks must see the folder. When the call returns, everything is on
    disk; with `save_async` everything has been copied to host memory, and a thread writes it. A state that
    was saved at the same step before is replaced.

    Args:
        folder: The folder of a run's training states; made if it is not there.
        state: The state to save, along with the random states of every rank.
        step: The number of steps done.
        keep_last: Number of training states to keep in `folder`, in the order of saving.
        save_async: Write in the background. The next save waits for this one. An error is raised by the next
            step of the optimizer, the next save, or `wait_for_saves`, whichever comes first.
        buffer_size: The most memory, in MB of 1024 * 1024 bytes, that writing takes on a rank in addition to
            the state; with `save_async` also in addition to the copy in host memory.

    Returns:
        The path of the training state; with `save_async` it may not be there yet.

    Raises:
        ValueError: A value in `state` cannot be saved, an option is out of range, another job saves into the
            folder, or its path holds files that are not a training state.
        OSError: The training state cannot be written; on all ranks. The last `keep_last` ones stay.
    """
    if step < 0:
        raise ValueError(f"step={step} must be at least 0")
    if keep_last < 1:
        raise ValueError(f"keep_last={keep_last} must be at least 1: the one that is being saved stays")
    most = block_size(buffer_size)
    wait_for_saves()
    rank = global_rank()
    path = Path(folder) / step_folder(step)
    with folder_lock() as take_lock:

        def prepare() -> None:
            if rank == 0:
                take_lock(path.parent)
                make_way(path)

        with opened(state.optimizer, loads=False) as raw:
            plan = _save_plan(
                path,
                replace(state, optimizer=raw),
                prepare,
                step=step,
                keep_last=keep_last,
                rank=rank,
                most=most,
            )
            if not save_async:
                write_training_state(plan, COLLECTIVE)
                return path
            # When all ranks have their copies, training can change the originals.
            staged = on_every_rank(lambda: in_host_memory(plan, host_copies()))
        start_save(partial(write_training_state, staged), name=str(path), watch=state.optimizer)
    return path


def latest_training_state(folder: str | Path) -> Path | None:
    """Return the newest complete training state in a folder, None if there is none; collective.

    A state is complete if all of its files match its manifest; the newest is the last saved one. A damaged
    one is named in a warning and skipped. Saves in the background are waited for.

    Raises:
        OSError: The folder cannot be read.
    """
    wait_for_saves()
    folder = Path(folder)
    names = from_writer(partial(candidates, folder))
    newest = newest_complete(folder, names, COLLECTIVE, rank=global_rank(), num_ranks=num_ranks())
    return None if newest is None else newest.path


@called_by_all_ranks("load", "a training state")
@as_memory()
def load_training_state(
    path: str | Path, state: TrainingState, *, buffer_size: float = DEFAULT_BUFFER_MB
) -> dict[str, object]:
    """Load a training state into the objects of `state`; collective.

    The number of ranks and the way the model is cut may be others than when it was saved. Under the same
    layout the random states go on exactly; under another one those of ranks with the same place in the mesh
    do, and the others get new ones, made from the seed of the run and the step.

    Args:
        path: A result of `save_training_state` or `latest_training_state`.
        state: The objects to load into. Parts that are None are left out, `extra` is ignored.
        buffer_size: The most memory, in MB, that loading takes on a rank in addition to the state.

    Returns:
        The `extra` values that were saved, and "step".

    Raises:
        ValueError: The training state is damaged, lacks a part, or has other names or shapes; nothing was
            overwritten.
        OSError: The training state cannot be read.
    """
    wait_for_saves()  # `path` can be a save in the background
    most = read_block_size(buffer_size)
    with opened(state.optimizer, loads=True) as raw:
        return _load(Path(path), replace(state, optimizer=raw), None, most)


@called_by_all_ranks("load", "the newest training state")
@as_memory()
def resume_training_state(
    folder: str | Path, state: TrainingState, *, buffer_size: float = DEFAULT_BUFFER_MB
) -> dict[str, object] | None:
    """Load the newest complete training state of a folder, or a single one; collective.

    Args:
        folder: The folder passed to `save_training_state`, or a result of it.
        state: The objects to load into; see `load_training_state`.
        buffer_size: See `load_training_state`.

    Returns:
        The result of `load_training_state`; None if the folder does not exist or holds no training state.

    Raises:
        ValueError: All training states are damaged, the one at `folder` has no manifest, or the newest
            complete one lacks a part or has other names or shapes.
        OSError: The training state cannot be read; also if the path names a single one that does not
            exist.
    """
    wait_for_saves()
    most = read_block_size(buffer_size)
    path = Path(folder)
    names = from_writer(lambda: None if (path / MANIFEST).is_file() else candidates(path))
    if names is None:  # on all ranks: the path is a training state itself
        return load_training_state(path, state, buffer_size=buffer_size)
    newest = newest_complete(path, names, COLLECTIVE, rank=global_rank(), num_ranks=num_ranks(), most=most)
    if newest is None:
        on_writer(partial(refuse_lost, path))
        return None
    with opened(state.optimizer, loads=True) as raw:
        return _load(newest.path, replace(state, optimizer=raw), newest, most)


def random_files() -> dict[str, dict[str, object]]:
    """Return the random states of all ranks, by the name of the file that each goes to; collective."""
    states = results(lambda: plain(random_state(), at="random state"))
    return {random_file(rank, len(states)): state for rank, state in enumerate(states)}


def _save_plan(
    path: Path,
    state: TrainingState,
    prepare: Callable[[], None],
    *,
    step: int,
    keep_last: int,
    rank: int,
    most: int,
) -> SavePlan:
    """Return the plan of a save: which rank writes which shards; collective.

    Args:
        path: The training state.
        state: Its parts; the optimizer is the raw one.
        prepare: Is called on every rank, before any rank writes.
        step: See `SavePlan`.
        keep_last: See `SavePlan`.
        rank: See `SavePlan`.
        most: See `SavePlan`.
    """
    model = NamedModel.of(state.model)
    local = {MODEL.part: local_model_state(model)}
    if state.optimizer is not None:
        names = model.parameter_names() if state.param_names is None else state.param_names
        local[OPTIMIZER.part] = local_optimizer_state(state.optimizer, names)
    small: dict[str, Any] = {}

    def small_parts() -> object:
        prepare()
        parts = {name: part.state_dict() for name, part in state.small_parts.items()}
        small.update(plain({**parts, "extra": state.extra}, at="training state"))
        return plain(random_state(), at="random state")

    # The one exchange of the plan. Rank 0 writes its own small parts, and the random states of all ranks.
    found, random_states = gather_states(*local.values(), values=small_parts)
    states, count = dict(zip(local, found, strict=True)), len(random_states)
    return SavePlan(
        path=path,
        step=step,
        keep_last=keep_last,
        states=states,
        shares={name: share_out(flat, count) for name, flat in states.items()},
        small_files={
            SMALL_FILE: small,
            **{random_file(rank, count): each for rank, each in enumerate(random_states)},
        },
        config=json.loads(json.dumps(dict(state.config), default=str)),
        rank=rank,
        most=most,
    )


def _load(path: Path, state: TrainingState, checked: CheckedState | None, most: int) -> dict[str, Any]:
    """Compare a training state with the objects of `state`, then overwrite them; collective.

    Args:
        path: The training state.
        state: The objects to load into; its optimizer is the raw one.
        checked: The training state, if its checksums have been compared.
        most: The most bytes that are read at once.
    """
    model = NamedModel.of(state.model)
    names = model.parameter_names() if state.param_names is None else state.param_names

    def own_names() -> list[Collection[str]]:
        named = named_parameters(state.optimizer, names) if state.optimizer is not None else {}
        return [model.values, named]

    elsewhere = names_elsewhere(own_names)
    # Everything is read and compared here; if one rank cannot go on, none has overwritten anything.
    plan = on_every_rank(lambda: _load_plan(path, state, model, names, checked, elsewhere, most))
    for name, part in state.small_parts.items():
        part.load_state_dict(plan.content[name])
    with plan.weights.noted():
        on_every_rank(plan.apply)
    set_random_state(plan.random)
    if plan.note:
        get_dist_logger().info(f"loaded {path}: {plan.note}", ranks=[0])
    return {**plan.content["extra"], "step": plan.manifest.step}


@dataclass(frozen=True)
class _LoadPlan:
    """A training state that was compared with the objects to load it into."""

    manifest: Manifest
    content: dict[str, Any]
    weights: ModelLoadPlan
    updates: OptimizerLoadPlan | None
    random: dict[str, Any]
    note: str

    def apply(self) -> None:
        """Overwrite the model and the optimizer; no communication."""
        self.weights.apply()
        if self.updates is not None:
            self.updates.apply()


def _load_plan(
    path: Path,
    state: TrainingState,
    model: NamedModel,
    names: ParamNames,
    checked: CheckedState | None,
    elsewhere: list[frozenset[str]],
    most: int,
) -> _LoadPlan:
    """Read and compare everything on this rank, and overwrite nothing."""
    if checked is None:
        checked = check_state(path, part=global_rank(), num_parts=num_ranks(), most=most)
    content = read_plain(path / SMALL_FILE)
    missing = [name for name in state.small_parts if name not in content]
    if state.optimizer is not None and OPTIMIZER.part not in checked.indices:
        missing.append(OPTIMIZER.part)
    if missing:
        raise ValueError(f"{path} holds no {listed(missing)}: leave that out to load the rest")
    updates = None
    if state.optimizer is not None:
        updates = plan_optimizer_loading(
            state.optimizer,
            _stored(checked, OPTIMIZER),
            names,
            source=str(path),
            elsewhere=elsewhere[1],
        )
    random, note = _random_state_of(path, checked.manifest)
    return _LoadPlan(
        manifest=checked.manifest,
        content=content,
        weights=plan_model_loading(
            model, _stored(checked, MODEL), source=str(path), strict=True, elsewhere=elsewhere[0]
        ),
        updates=updates,
        random=random,
        note=note,
    )


def _stored(checked: CheckedState, kind: Kind) -> Mapping[str, object]:
    """Return the content of a sharded folder; its tree is compared with its tensors."""
    state = checked.indices[kind.part].state()
    with damage_named(checked.path / kind.part):
        return kind.join(state)


def _random_state_of(folder: Path, manifest: Manifest) -> tuple[dict[str, Any], str]:
    """Return the random state of this rank, and a log line if the layout is another one.

    Raises:
        ValueError: A file is damaged.
        OSError: A file cannot be read.
    """
    count = manifest.num_ranks
    if count == num_ranks():
        own = read_plain(folder / random_file(global_rank(), count))
        if is_of_this_place(own):
            return fitting_random_state([own], step=manifest.step), ""
    saved = [read_plain(folder / random_file(rank, count)) for rank in range(count)]
    return fitting_random_state(saved, step=manifest.step), say_other_layout(saved, step=manifest.step)
