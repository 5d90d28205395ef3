"""Random states of a process as plain values, to be saved with a training state and restored from one.

[Note: random states under another layout]
A training state has the random states of every rank, each with the place of the rank in the mesh. Under the
same layout, each rank restores its own. Under another one, a state is chosen for each mode by the axes on
which the mode depends (GLOBAL on none, DATA on `dp` and `pp`, TENSOR on all): a rank takes the state of the
rank that had the same coordinates along these; if there was none, it gets a new one, made from the seed of
the run, the coordinates and the step. So two ranks agree or differ as they should, and no rank repeats
numbers of an earlier step. A user-defined mode is identified by its first seed.
"""

import random
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from colossalai.context._parallel_mode import ParallelMode
from colossalai.context._process import SeedPlace, State, process
from colossalai.context._random import (
    fresh_state,
    generator_state,
    mix_seed,
    mode_name,
    numpy_as_plain,
    python_as_plain,
    random_state,
    set_generator_state,
)

# Number of a place's ranks on which a mode depends.
_NUM_AXES = {ParallelMode.GLOBAL: 0, ParallelMode.DATA: 2, ParallelMode.TENSOR: 3}

Saved = Mapping[str, Any]


def set_random_state(state: Saved) -> None:
    """Restore a state from `random_state`; modes that do not exist now are skipped."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist() if isinstance(words, torch.Tensor) else words), gauss))
    name, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    by_name = {mode_name(mode): mode for mode in process.random.states}
    for saved_name, mode_state in state["modes"].items():
        if saved_name in by_name:
            process.random.states[by_name[saved_name]] = dict(mode_state)
    if state["current"] in by_name:
        process.random.current = by_name[state["current"]]
    set_generator_state(state["torch"])


def is_of_this_place(state: Saved) -> bool:
    """Return whether a state has this place in a mesh of the same sizes, and the same devices."""
    return _is_of_this_place(state, generator_state())


def _is_of_this_place(state: Saved, present: State) -> bool:
    return state["torch"].keys() == present.keys() and _place(state) == process.random.place


def fitting_random_state(saved: Sequence[Saved], *, step: int) -> dict[str, Any]:
    """Return the state for `set_random_state` with which this process continues; the mode in force is kept.

    See [Note: random states under another layout].

    Args:
        saved: The states of all ranks of a run; this rank's is enough if it `is_of_this_place`.
        step: The step at which they were saved.
    """
    here = process.random.place
    own = random_state()
    twin = next((state for state in saved if _place(state).ranks == here.ranks), None)
    is_same_place = len(saved) == 1 and _is_of_this_place(saved[0], own["torch"])
    names = {mode: mode_name(mode) for mode in process.random.states}
    modes = {
        name: _of_mode(mode, name, saved, own["torch"], step=step, is_same_place=is_same_place)
        for mode, name in names.items()
    }
    # Generators outside of all modes start equal on all ranks: if they were still equal, they stay so.
    python = _of_all([state["python"] for state in saved], twin and twin["python"])
    numpy = _of_all([state["numpy"] for state in saved], twin and twin["numpy"])
    fresh = partial(mix_seed, _seed_of_run(saved), "rank", *here.ranks, "step", step)
    if process.random.current is None:
        torch_state = _complete(None if twin is None else twin["torch"], own["torch"], fresh)
    else:
        torch_state = modes[names[process.random.current]]
    return {
        **own,
        "python": python_as_plain(random.Random(fresh()).getstate()) if python is None else python,
        "numpy": _fresh_numpy(fresh()) if numpy is None else numpy,
        "torch": torch_state,
        "modes": modes,
    }


def say_other_layout(saved: Sequence[Saved], *, step: int) -> str:
    """Return a description of the effect of `fitting_random_state` under another layout."""
    before, now = _place(saved[0]).sizes, process.random.place.sizes
    going_on = 1
    for size_before, size_now in zip(before, now, strict=True):
        going_on *= min(size_before, size_now)
    total = now[0] * now[1] * now[2]
    rest = total - going_on
    text = (
        f"it was saved on {len(saved)} ranks ({_layout(before)}), this job has {_layout(now)}: the random "
        f"states of {going_on} of {total} ranks go on"
    )
    return f"{text}, those of the other {rest} are new, from the seed and step {step}" if rest else text


def _of_mode(
    mode: Hashable,
    name: str | None,
    saved: Sequence[Saved],
    present: State,
    *,
    step: int,
    is_same_place: bool,
) -> State:
    """Return the state of a mode on this rank; see `_complete` for `present`."""
    holders = [state for state in saved if name in state["modes"]]
    parts: tuple[Any, ...] = (process.random.seeds[mode],)
    if is_same_place:
        found = next(iter(holders), None)
    elif mode in _NUM_AXES:
        along = process.random.place.ranks[: _NUM_AXES[mode]]
        found = next((one for one in holders if _place(one).ranks[: len(along)] == along), None)
        parts = (_seed_of_run(saved), str(name), *along)
    else:
        found = next((one for one in holders if one.get("seeds", {}).get(name) == parts[0]), None)
    seed = partial(mix_seed, *parts, "step", step)
    return _complete(None if found is None else found["modes"][name], present, seed)


def _complete(
    state: Mapping[str, torch.Tensor] | None, present: State, make_seed: Callable[[], int]
) -> State:
    """Return a state with an entry for each device of `present`; missing ones are new."""
    found = dict(state or {})
    return found if found.keys() >= present.keys() else {**fresh_state(make_seed()), **found}


def _of_all(values: Sequence[Any], of_twin: Any) -> Any:
    """Return the value of the rank with the same place, else the common value of all ranks, else None."""
    if of_twin is not None:
        return of_twin
    return values[0] if all(_is_same(value, values[0]) for value in values) else None


def _is_same(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, list | tuple):
        return all(map(_is_same, first, second))
    return bool(first == second)


def _seed_of_run(saved: Sequence[Saved]) -> int:
    """Return the seed of a run's launch; this job's if it was not launched."""
    found = saved[0].get("seeds", {}).get(ParallelMode.GLOBAL.value)
    return int(process.random.seeds.get(ParallelMode.GLOBAL, 0) if found is None else found)


def _place(state: Saved) -> SeedPlace:
    dp_rank, pp_rank, tensor_rank = state.get("place", (0, 0, 0))
    dp_size, pp_size, tensor_size = state.get("sizes", (1, 1, 1))
    return SeedPlace((dp_rank, pp_rank, tensor_rank), (dp_size, pp_size, tensor_size))


def _layout(sizes: tuple[int, int, int]) -> str:
    return f"data x pipeline x tensor = {sizes[0]} x {sizes[1]} x {sizes[2]}"


def _fresh_numpy(seed: int) -> list[Any]:
    return numpy_as_plain(np.random.RandomState(seed % 2**32).get_state(legacy=True))
