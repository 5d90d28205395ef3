"""Random states per parallel mode.

Ranks that hold the same slice must draw the same numbers, ranks that hold different slices different ones.
Each mode has its own random state on every rank:

- GLOBAL: the same on all ranks; the state in force after launch, so that every rank builds the same model.
- DATA: differs along the data and pipeline axes, agrees along the tensor axes: dropout on an activation that
  the tensor-parallel ranks hold whole. In force once a model has been assembled.
- TENSOR: differs on every rank: dropout on an activation that the tensor-parallel ranks hold in slices.
- SEQUENCE, if there are both ranks that share sequences and ranks that share layers: differs along the
  data, pipeline and sequence axes, agrees along the tensor axes. In force then: the ranks that share a
  sequence hold different tokens. Without tensor axes it would equal TENSOR, which is in force.

The state for sequences starts on the first rank of a sequence as DATA does: attention takes its seeds from
there, and so drops the same weights on any number of ranks.

[Note: forks of the state in force]
A layer does not draw from the state of another mode: `torch.utils.checkpoint` restores torch's generators
alone, so recomputation would continue from the other mode's last state. It draws from a fork of the state in
force, seeded by a number derived from this state and by the coordinates of the rank along the axes where
ranks must differ. So the numbers differ along these axes and, if the state in force agrees, agree along all
others; and restoring torch's generators also restores the forks. The state in force advances by one draw for
each fork, so that the next fork differs; a layer with optional dropout advances it only if it has drawn,
since later draws of the user must equal those of one process. The number is a checksum of the state of
the CPU generator: it waits for no device, sends nothing, and needs no operator that returns a value, which
`torch.func.vmap` and fake tensors do not support. A fork is a mode of its own while it is in force, and its
parent is saved like any other mode: a `seed` block inside finds every mode, the parent as well, in its last
state.
"""

import ctypes
import functools
import hashlib
import random
import zlib
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar, cast

import numpy as np
import torch

from colossalai.context._mesh import Mesh
from colossalai.context._parallel_mode import ParallelMode
from colossalai.context._process import RandomStates, SeedPlace, State, process

P = ParamSpec("P")
R = TypeVar("R")


def seed_all_modes(seed: int, mesh: Mesh, tensor_axes: tuple[str, ...]) -> None:
    """Make the random states of a launched job and put GLOBAL in force."""
    reset_seeds()
    set_seed(seed)
    add_seed(ParallelMode.GLOBAL, seed)
    seed_layout_modes(seed, mesh, tensor_axes)
    set_mode(ParallelMode.GLOBAL)


def seed_layout_modes(seed: int, mesh: Mesh, tensor_axes: tuple[str, ...]) -> None:
    """Make the random states that depend on the place in the mesh; the state in force is not changed."""
    inner = (*(name for name in ("sp",) if name in mesh.axes), *tensor_axes)
    axes = ("dp", "pp", inner)
    dp_rank, pp_rank, tensor_rank = (mesh.axis_rank(axis) for axis in axes)
    dp_size, pp_size, tensor_size = (mesh.axis_size(axis) for axis in axes)
    data_seed = mix_seed(seed, "data", dp_rank, pp_rank)
    tensor_seed = mix_seed(seed, "tensor", dp_rank, pp_rank, tensor_rank)
    sp_size, sp_rank = mesh.axes.get("sp", 1), mesh.axis_rank("sp") if "sp" in mesh.axes else 0
    if 1 < sp_size < tensor_size:
        sequence_seed = mix_seed(seed, "sequence", dp_rank, pp_rank, sp_rank) if sp_rank else data_seed
        add_seed(ParallelMode.SEQUENCE, sequence_seed, overwrite=True)
    elif sp_size > 1 and sp_rank == 0:
        tensor_seed = data_seed
    add_seed(ParallelMode.DATA, data_seed, overwrite=True)
    add_seed(ParallelMode.TENSOR, tensor_seed, overwrite=True)
    process.random.expert_rank = mesh.axis_rank("ep")
    process.random.place = SeedPlace((dp_rank, pp_rank, tensor_rank), (dp_size, pp_size, tensor_size))


def set_seed(seed: int) -> None:
    """Seed Python's, numpy's and torch's generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def add_seed(mode: Hashable, seed: int, overwrite: bool = False) -> None:
    """Give a mode a random state that starts from `seed`; the state in force is not changed.

    Raises:
        ValueError: `mode` has a state already and `overwrite` is False.
    """
    if mode in process.random.states and not overwrite:
        raise ValueError(f"{mode} has a random state already: pass overwrite=True to replace it")
    fresh = fresh_state(seed)
    process.random.seeds[mode] = seed
    process.random.states[mode] = fresh
    if mode == process.random.current:
        set_generator_state(fresh)


def set_mode(mode: Hashable) -> None:
    """Put the random state of a mode in force, after saving the present one."""
    _require(mode)
    if mode == process.random.current:
        return
    sync_states()
    process.random.current = mode
    set_generator_state(process.random.states[mode])


def get_current_mode() -> Hashable | None:
    """Return the mode whose random state is in force; None before launch."""
    return process.random.current


@contextmanager
def seed(mode: Hashable) -> Iterator[None]:
    """Draw from the random state of a mode within a `with` block."""
    before = process.random.current
    set_mode(mode)
    try:
        yield
    finally:
        if before is not None:
            set_mode(before)


def with_seed(func: Callable[P, R], mode: Hashable) -> Callable[P, R]:
    """Return `func` with its draws from the random state of a mode."""

    @functools.wraps(func)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        with seed(mode):
            return func(*args, **kwargs)

    return wrapper


def get_seeds() -> dict[Hashable, int]:
    """Return the seed that each mode started from."""
    return dict(process.random.seeds)


def get_states() -> dict[Hashable, State]:
    """Return the present random state of each mode, by device type ("cpu", and the accelerator's)."""
    sync_states()
    return {mode: dict(state) for mode, state in process.random.states.items()}


def set_seed_states(mode: Hashable, state: Mapping[str, torch.Tensor]) -> None:
    """Replace the random state of a mode by one from `get_states`."""
    _require(mode)
    process.random.states[mode] = dict(state)
    if mode == process.random.current:
        set_generator_state(process.random.states[mode])


def sync_states() -> None:
    """Save the state of the generators as the state of the current mode."""
    if process.random.current is not None:
        process.random.states[process.random.current] = generator_state()


def random_state() -> dict[str, Any]:
    """Return every random state of this process (Python, numpy, torch, all modes), for `torch.save`."""
    assert process.random.current is None or isinstance(process.random.current, ParallelMode | str)
    return {
        "python": python_as_plain(random.getstate()),
        "numpy": numpy_as_plain(np.random.get_state(legacy=True)),
        "torch": generator_state(),
        "modes": {mode_name(mode): state for mode, state in get_states().items()},
        "current": mode_name(process.random.current),
        "seeds": {mode_name(mode): seed for mode, seed in process.random.seeds.items()},
        "place": list(process.random.place.ranks),
        "sizes": list(process.random.place.sizes),
    }


def python_as_plain(state: tuple[Any, ...]) -> list[Any]:
    """Return a state of `random` with its 625 numbers as one tensor."""
    version, words, gauss = state
    return [version, torch.tensor(words), gauss]


def numpy_as_plain(state: Any) -> list[Any]:
    """Return a state of numpy's legacy generator with its numbers as a tensor."""
    name, keys, position, has_gauss, gauss = cast(tuple[Any, ...], state)
    return [name, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, gauss]


def mode_name(mode: Hashable | None) -> str | None:
    """Return the name of a mode in saved states."""
    return mode.value if isinstance(mode, ParallelMode) else None if mode is None else str(mode)


def reset_seeds() -> None:
    """Drop all modes; the generators are not changed."""
    process.random = RandomStates()


def moe_set_seed(seed: int) -> None:
    """Seed the experts of the layers that are built afterwards.

    Also make a random state that differs across the ranks of an expert-parallel group (mode MOE_MODEL).
    """
    process.random.expert_seed = seed
    add_seed(ParallelMode.MOE_MODEL, mix_seed(seed, "expert", process.random.expert_rank), overwrite=True)


@contextmanager
def drawing_expert(layer: int, number: int) -> Iterator[None]:
    """Draw the values of an expert within the block; afterwards the generators are restored.

    The values depend on the seed of `moe_set_seed` and the two numbers, not on the rank of the expert.

    Args:
        layer: Number of the layer.
        number: Number of the expert among all of the layer.
    """
    kept = generator_state()
    torch.manual_seed(mix_seed(process.random.expert_seed, "expert", layer, number))
    try:
        yield
    finally:
        set_generator_state(kept)


@dataclass(eq=False)
class Fork:
    """The mode in force in a block that draws from a fork.

    Attributes:
        parent: The mode that was in force before.
        first: The first state of the fork, until its parent has advanced for it.
    """

    parent: Hashable
    first: State = field(default_factory=dict)


@contextmanager
def drawing_apart(*places: Hashable, only_if_drawn: bool = False) -> Iterator[None]:
    """Draw numbers within the block that differ from those of ranks at other places.

    See [Note: forks of the state in force]. Before a launch, this process is alone, and draws from torch's
    generators.

    Args:
        places: Coordinates of this rank along the axes where ranks must differ. Default: along all.
        only_if_drawn: Whether the state in force advances only if the block draws. It must be the same on all
            ranks along which that state has to agree.
    """
    parent = process.random.current
    if parent is None:
        yield
        return
    for other in tuple(process.random.states):  # saved by draw_together, and not at its end yet
        if isinstance(other, Fork) and other.parent == parent:
            _move_for(other)
    # Inlined: a compiler does not touch generators, but would trace a function, and warn about it.
    # Not `state.numpy()`: an operator, which a mode for fake tensors refuses. Checksums take a fraction of
    # the time of a digest, and mix_seed digests them.
    state = torch.default_generator.get_state()
    content = ctypes.string_at(state.data_ptr(), state.nbytes)
    number = zlib.crc32(content) << 32 | zlib.adler32(content)
    kind = "fork" if not only_if_drawn else "fork if drawn"
    seed_of_fork = mix_seed(number, kind, *map(str, places or process.random.place.ranks))
    if not only_if_drawn:
        torch.rand((), device="cpu")  # so that the next fork differs
    fork = Fork(parent)
    process.random.states[parent] = generator_state()
    process.random.states[fork] = {}
    process.random.current = fork
    _seed_generators(seed_of_fork)
    if only_if_drawn:
        fork.first = generator_state()
    try:
        yield
    finally:
        if process.random.current == fork:
            if fork.first:
                process.random.states[fork] = generator_state()
            process.random.current = parent
            set_generator_state(process.random.states[parent])
        else:  # draw_together, or the block itself, has saved the state of the fork
            set_mode(parent)
        _move_for(fork)
        process.random.states.pop(fork, None)


def _move_for(fork: Fork) -> None:
    """Advance the state in force, the parent's, by one draw if a fork has drawn, so that the next differs."""
    last = process.random.states.get(fork) or {}  # missing if states were loaded inside of the block
    for device, first in fork.first.items():
        end = last.get(device, first)
        # Compared as bytes: see `drawing_apart`.
        if ctypes.string_at(first.data_ptr(), first.nbytes) != ctypes.string_at(end.data_ptr(), end.nbytes):
            torch.rand((), device="cpu")
            fork.first = {}
            return


def draw_together() -> None:
    """Return to the state in force before `drawing_apart`, which has no effect from then on."""
    if process.random.current is not None:
        set_mode(_whole_mode())


@contextmanager
def drawing_together() -> Iterator[None]:
    """Draw within the block from the state in force before `drawing_apart`, if that is active."""
    if process.random.current is None:
        yield
        return
    with seed(_whole_mode()):
        yield


@contextmanager
def drawing_by_batch() -> Iterator[None]:
    """Draw numbers within the block that differ from those of ranks with other parts of the batch.

    That is the state in force, except before a model has been assembled, when all ranks draw the same.
    """
    with drawing_together():
        is_built = process.random.current != ParallelMode.GLOBAL
        with nullcontext() if is_built else drawing_apart(*process.random.place.ranks[:2]):
            yield


def _whole_mode() -> Hashable:
    """Return the mode that is in force outside of all forks."""
    mode = process.random.current
    while isinstance(mode, Fork):
        mode = mode.parent
    return mode


def _seed_generators(seed: int) -> None:
    """Seed the generators whose states `generator_state` returns, and not those of all devices."""
    torch.default_generator.manual_seed(seed)
    device = torch.accelerator.current_accelerator()
    if device is not None and torch.accelerator.is_available():
        torch.get_device_module(device).manual_seed(seed)


@contextmanager
def replay(mode: Hashable | None, states: Mapping[Hashable, State], generator: State) -> Iterator[None]:
    """Repeat the draws that followed a `snapshot` within the block; restore all states after it."""
    kept = snapshot()
    _restore(mode, states, generator)
    try:
        yield
    finally:
        _restore(*kept)


def snapshot() -> tuple[Hashable | None, dict[Hashable, State], State]:
    """Return the mode in force, the states of all modes and the state of the generators."""
    return process.random.current, get_states(), generator_state()


def _restore(mode: Hashable | None, states: Mapping[Hashable, State], generator: State) -> None:
    process.random.current, process.random.states = mode, dict(states)
    set_generator_state(generator)


def _require(mode: Hashable) -> None:
    if mode not in process.random.states:
        known = ", ".join(map(str, process.random.states)) or "none: launch has not been called"
        raise ValueError(f"no random state for {mode}; there is {known}. Make one with add_seed(mode, seed)")


def mix_seed(seed: int, *parts: str | int) -> int:
    """Derive a seed that is unrelated to the seed of any other parts."""
    digest = hashlib.blake2b(repr((seed, *parts)).encode(), digest_size=6).digest()
    return int.from_bytes(digest, "big")


def fresh_state(seed: int) -> State:
    """Return the state of torch's generators after seeding them; the state in force is not changed."""
    kept = generator_state()
    torch.manual_seed(seed)
    fresh = generator_state()
    set_generator_state(kept)
    return fresh


def generator_state() -> State:
    """Return the present state of torch's generators, by device type."""
    state = {"cpu": torch.get_rng_state()}
    device = torch.accelerator.current_accelerator()
    if device is not None and torch.accelerator.is_available():
        state[device.type] = torch.get_device_module(device).get_rng_state()
    return state


def set_generator_state(state: Mapping[str, torch.Tensor]) -> None:
    """Restore a state from `generator_state`; the generator of a device without an entry is not changed."""
    torch.set_rng_state(state["cpu"])
    device = torch.accelerator.current_accelerator()
    if device is not None and torch.accelerator.is_available() and device.type in state:
        torch.get_device_module(device).set_rng_state(state[device.type])
