"""Random states under another layout: who agreed still agrees, who differed differs, nothing repeats."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from colossalai.context import (
    Mesh,
    ParallelMode,
    add_seed,
    fitting_random_state,
    is_of_this_place,
    random_state,
    reset_seeds,
    say_other_layout,
    seed,
    set_mode,
    set_random_state,
)
from colossalai.context._random import seed_all_modes

pytestmark = pytest.mark.unit

DATA, TENSOR, GLOBAL = ParallelMode.DATA, ParallelMode.TENSOR, ParallelMode.GLOBAL
Sizes = tuple[int, int, int]


@pytest.fixture(autouse=True)
def own_random_state() -> Iterator[None]:
    kept = random_state()
    yield
    reset_seeds()
    set_random_state(kept)


def be_rank(rank: int, sizes: Sizes, run_seed: int = 1024) -> None:
    """Make this process a freshly launched rank."""
    axes = dict(zip(("edp", "pp", "tp"), sizes, strict=True))
    mesh = Mesh({"ep": 1, **axes}, rank=rank, views={"dp": ("edp", "ep")})
    seed_all_modes(run_seed, mesh, ("tp",))
    set_mode(DATA)


def draw() -> dict[Any, float]:
    drawn: dict[Any, float] = {}
    for mode in (GLOBAL, DATA, TENSOR):
        with seed(mode):
            drawn[mode] = torch.rand((), dtype=torch.float64).item()
    return drawn | {"python": random.random(), "numpy": float(np.random.rand())}


def saved_by(sizes: Sizes) -> tuple[list[Any], list[Any], list[Any]]:
    """Return what each rank drew before it saved its state, the state, and what it drew afterwards."""
    before, states, after = [], [], []
    for rank in range(sizes[0] * sizes[1] * sizes[2]):
        be_rank(rank, sizes)
        before.append(draw())
        states.append(random_state())
        after.append(draw())
    return before, states, after


def resumed_by(sizes: Sizes, states: list[Any], run_seed: int = 7) -> list[Any]:
    """Return what each rank of a new job, launched with another seed, draws."""
    drawn = []
    for rank in range(sizes[0] * sizes[1] * sizes[2]):
        be_rank(rank, sizes, run_seed)
        set_random_state(fitting_random_state(states, step=5))
        drawn.append(draw())
    return drawn


def test_the_same_layout_goes_on_exactly() -> None:
    _, states, after = saved_by((2, 1, 2))
    for rank, state in enumerate(states):
        be_rank(rank, (2, 1, 2), 7)
        assert is_of_this_place(state)
        assert not any(is_of_this_place(other) for other in states if other is not state)
        set_random_state(fitting_random_state([state], step=5))
        assert draw() == after[rank]


@pytest.mark.parametrize(
    ("old", "new"),
    [((1, 1, 1), (4, 1, 1)), ((2, 1, 2), (4, 1, 1)), ((4, 1, 1), (1, 2, 2)), ((2, 1, 2), (2, 2, 2)),
     ((2, 2, 2), (2, 1, 1)), ((1, 1, 4), (2, 1, 2))],
)  # fmt: skip
def test_another_layout(old: Sizes, new: Sizes) -> None:
    before, states, after = saved_by(old)
    drawn = resumed_by(new, states)
    places = [
        divmod(rank, new[2]) for rank in range(len(drawn))
    ]  # number of the slice of the data, and of the tensor
    old_places = [(divmod(rank // old[2], old[1]), rank % old[2]) for rank in range(len(before))]
    assert len({values[GLOBAL] for values in drawn}) == 1
    assert drawn[0][GLOBAL] == after[0][GLOBAL]
    assert len({values[TENSOR] for values in drawn}) == len(drawn)
    for (slice_number, _), values in zip(places, drawn, strict=True):
        of_slice = {
            other[DATA] for (number, _), other in zip(places, drawn, strict=True) if number == slice_number
        }
        assert of_slice == {values[DATA]}
    assert len({values[DATA] for values in drawn}) == new[0] * new[1]
    earlier = {value for values in before for value in values.values()}
    assert not earlier & {value for values in drawn for value in values.values()}
    for (slice_number, tensor_rank), values in zip(places, drawn, strict=True):
        place = (divmod(slice_number, new[1]), tensor_rank)
        if place in old_places:
            assert values == after[old_places.index(place)]


def test_what_started_equal_on_all_ranks_stays_equal() -> None:
    _, states, after = saved_by((2, 1, 1))
    assert {values["numpy"] for values in resumed_by((4, 1, 1), states)} == {after[0]["numpy"]}
    be_rank(1, (2, 1, 1))
    random.seed(99)  # a rank of its own mind
    states[1] = random_state()
    assert len({values["python"] for values in resumed_by((4, 1, 1), states)}) == 4


def test_a_mode_of_the_user_is_known_by_its_seed() -> None:
    states, expected = [], []
    for rank in range(2):
        be_rank(rank, (2, 1, 1))
        add_seed("mine", 50 + rank)
        with seed("mine"):
            torch.rand(3)
        states.append(random_state())
        with seed("mine"):
            expected.append(torch.rand(()).item())
    found = []
    for own_seed in (51, 50, 52):
        be_rank(0, (3, 1, 1))
        add_seed("mine", own_seed)
        set_random_state(fitting_random_state(states, step=5))
        with seed("mine"):
            found.append(torch.rand(()).item())
    assert found[:2] == [expected[1], expected[0]]
    assert found[2] != torch.rand((), generator=torch.Generator().manual_seed(52)).item()


def test_a_second_resume_draws_anew() -> None:
    _, states, _ = saved_by((1, 1, 1))
    drawn = []
    for step in (5, 6):
        be_rank(1, (2, 1, 1))
        set_random_state(fitting_random_state(states, step=step))
        drawn.append(draw()[DATA])
    assert drawn[0] != drawn[1]


def test_the_mode_in_force_stays() -> None:
    _, states, after = saved_by((1, 1, 1))
    be_rank(0, (1, 1, 2))
    set_mode(TENSOR)
    set_random_state(fitting_random_state(states, step=5))
    assert torch.rand((), dtype=torch.float64).item() == after[0][TENSOR]


def test_it_is_said_in_words() -> None:
    _, states, _ = saved_by((2, 1, 1))
    be_rank(0, (4, 1, 2))
    text = say_other_layout(states, step=5)
    assert "saved on 2 ranks (data x pipeline x tensor = 2 x 1 x 1), this job has data" in text
    assert "this job has data x pipeline x tensor = 4 x 1 x 2" in text
    assert "of 2 of 8 ranks go on, those of the other 6 are new, from the seed and step 5" in text
