"""Random states per mode: kept apart, saved and restored bit for bit."""

import io
import math
import random
import warnings

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode

from colossalai.context import (
    Mesh,
    ParallelMode,
    add_seed,
    draw_together,
    drawing_apart,
    drawing_together,
    get_current_mode,
    get_seeds,
    get_states,
    moe_set_seed,
    random_state,
    reset_seeds,
    seed,
    set_mode,
    set_random_state,
    set_seed_states,
    with_seed,
)
from colossalai.context._random import seed_all_modes

pytestmark = pytest.mark.unit
M = ParallelMode


@pytest.fixture(autouse=True)
def launched():
    kept = random_state()
    seed_all_modes(
        1024, Mesh({"edp": 2, "ep": 2, "pp": 1, "tp": 1}, rank=1, views={"dp": ("edp", "ep")}), ("tp",)
    )
    yield
    reset_seeds()
    set_random_state(kept)


def test_a_mode_goes_on_where_it_was_left():
    with seed(M.TENSOR):
        first = torch.rand(2)
    inside = torch.rand(2)
    with seed(M.TENSOR):
        second = torch.rand(2)
    set_mode(M.TENSOR)
    reset_seeds()
    torch.manual_seed(0)
    seed_all_modes(
        1024, Mesh({"edp": 2, "ep": 2, "pp": 1, "tp": 1}, rank=1, views={"dp": ("edp", "ep")}), ("tp",)
    )
    assert torch.equal(torch.rand(2), inside)
    with seed(M.TENSOR):
        assert torch.equal(torch.rand(4), torch.cat([first, second]))


def test_the_mode_is_put_back_also_after_an_error():
    def fail():
        with seed(M.TENSOR):
            raise KeyError(get_current_mode())

    with pytest.raises(KeyError, match="TENSOR"):
        fail()
    assert get_current_mode() == M.GLOBAL
    assert with_seed(get_current_mode, M.DATA)() == M.DATA


def test_a_fork_is_drawn_again_where_the_state_in_force_is_and_only_there():
    def draw():
        with drawing_apart():
            inside = torch.rand(2).tolist()
        return inside, torch.rand(2).tolist()

    set_mode(M.DATA)
    kept = torch.get_rng_state()
    first, second = draw(), draw()
    assert len({tuple(part) for parts in (first, second) for part in parts}) == 4
    torch.set_rng_state(kept)  # all that torch.utils.checkpoint restores
    assert (draw(), draw()) == (first, second)
    assert set(get_states()) == set(get_seeds())


def test_a_fork_ends_with_an_error():
    set_mode(M.DATA)
    kept = torch.get_rng_state()
    with drawing_apart():
        pass
    after = torch.get_rng_state()
    torch.set_rng_state(kept)

    def stop():
        with drawing_apart():
            torch.rand(3)
            raise KeyError

    with pytest.raises(KeyError):
        stop()
    assert get_current_mode() == M.DATA
    assert torch.equal(torch.get_rng_state(), after)


def test_what_is_drawn_together_in_a_fork_comes_from_the_state_in_force():
    set_mode(M.DATA)
    kept = torch.get_rng_state()
    with drawing_apart():
        pass
    expected = torch.rand(7)
    torch.set_rng_state(kept)
    with drawing_apart():
        apart = torch.rand(2)
        with drawing_together():
            assert torch.equal(torch.rand(2), expected[:2])
        with seed(M.DATA), drawing_together():
            assert torch.equal(torch.rand(2), expected[2:4])
        assert not torch.equal(torch.rand(2), apart)
        draw_together()
        assert torch.equal(torch.rand(2), expected[4:6])
    assert torch.equal(torch.rand(1), expected[6:])


def test_forks_under_transforms_and_of_fake_tensors():
    set_mode(M.DATA)

    def dropped(x):
        with drawing_apart():
            return torch.nn.functional.dropout(x)

    found = torch.func.vmap(dropped, randomness="different")(torch.ones(2, 40))
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(found, torch.func.vmap(dropped, randomness="different")(torch.ones(2, 40)))
    assert torch.func.grad(lambda x: dropped(x).sum())(torch.ones(40)).count_nonzero() > 0
    kept = torch.get_rng_state()
    with FakeTensorMode() as mode:
        dropped(mode.from_tensor(torch.ones(3)))
    assert torch.equal(torch.get_rng_state(), kept)


@pytest.mark.parametrize("only_if_drawn", [False, True])
def test_a_compiler_does_not_look_into_forks(only_if_drawn):
    set_mode(M.DATA)

    def dropped(x):
        hidden = x + 1
        with drawing_apart(only_if_drawn=only_if_drawn):
            hidden = torch.nn.functional.dropout(hidden)
        return hidden + 1

    start, x = random_state(), torch.ones(40)
    expected = [dropped(x), dropped(x)]
    set_random_state(start)
    compiled = torch.compile(dropped, backend="eager")
    torch._dynamo.utils.warn_once_cache.clear()
    with warnings.catch_warnings(action="error"):
        assert all(torch.equal(compiled(x), of_eager) for of_eager in expected)


def test_a_fork_that_draws_nothing_can_leave_the_state_in_force():
    set_mode(M.DATA)
    kept = torch.get_rng_state()
    with drawing_apart(only_if_drawn=True):
        draw_together()
    with drawing_apart(only_if_drawn=True), drawing_apart(only_if_drawn=True):
        pass
    assert torch.equal(torch.get_rng_state(), kept)

    def numbers():
        found = []
        with drawing_apart(only_if_drawn=True):
            with drawing_apart(only_if_drawn=True):
                found.append(torch.rand(2))
            found.append(torch.rand(2))
            draw_together()
            for only_if_drawn in (True, False):  # while the fork before has not ended
                with drawing_apart(only_if_drawn=only_if_drawn):
                    found.append(torch.rand(2))
            found.append(torch.rand(2))
        with drawing_apart(only_if_drawn=True):
            found.append(torch.rand(2))
        return [tuple(each.tolist()) for each in found]

    drawn = numbers() + numbers()
    assert len({*drawn}) == len(drawn)
    assert not torch.equal(torch.get_rng_state(), kept)
    torch.set_rng_state(kept)
    assert numbers() + numbers() == drawn


@pytest.mark.parametrize("places", [(), (1,)])
def test_forks_differ_by_place(places):
    set_mode(M.GLOBAL)
    drawn = set()
    for rank in range(2):
        reset_seeds()
        seed_all_modes(
            7, Mesh({"edp": 1, "ep": 1, "pp": 1, "tp": 2}, rank=rank, views={"dp": ("edp", "ep")}), ("tp",)
        )
        with drawing_apart(*places):
            drawn.add(torch.rand(()).item())
    assert len(drawn) == 2 - len(places)


def test_states_come_back():
    set_mode(M.DATA)
    states = get_states()
    drawn = torch.rand(3)
    set_seed_states(M.DATA, states[M.DATA])
    assert torch.equal(torch.rand(3), drawn)


def test_everything_survives_a_file():
    set_mode(M.DATA)
    torch.rand(5)
    file = io.BytesIO()
    torch.save(random_state(), file)
    file.seek(0)

    def draw():
        with seed(M.TENSOR):
            of_tensor = torch.rand(2).tolist()
        return torch.rand(2).tolist(), of_tensor, random.random(), np.random.rand(), get_current_mode()

    drawn = draw()
    set_mode(M.GLOBAL)
    draw()
    set_random_state(torch.load(file, weights_only=True))
    assert draw() == drawn


def test_seeds_are_kept_and_not_replaced_by_accident():
    with pytest.raises(ValueError, match="overwrite=True"):
        add_seed(M.DATA, 3)
    add_seed("mine", 3)
    assert get_seeds()["mine"] == 3
    with pytest.raises(ValueError, match="no random state for yours"):
        set_mode("yours")


def test_adding_a_seed_draws_nothing():
    expected = with_seed(lambda: torch.rand(2), M.DATA)()
    set_seed_states(M.DATA, get_states()[M.DATA])
    kept = get_states()[M.GLOBAL]
    add_seed("other", 5)
    assert torch.equal(get_states()[M.GLOBAL]["cpu"], kept["cpu"])
    assert expected.shape == (2,)


def test_experts_differ():
    moe_set_seed(42)
    here = get_seeds()[M.MOE_MODEL]
    seed_all_modes(
        1024, Mesh({"edp": 2, "ep": 2, "pp": 1, "tp": 1}, rank=0, views={"dp": ("edp", "ep")}), ("tp",)
    )
    moe_set_seed(42)
    assert get_seeds()[M.MOE_MODEL] != here


def first_draws(axes):
    """Return, for each rank of a mesh, its first number of SEQUENCE (None without it), TENSOR and DATA."""
    drawn = []
    for rank in range(math.prod(axes.values())):
        reset_seeds()
        seed_all_modes(
            7, Mesh({"edp": 1, "ep": 1, "pp": 1, **axes}, rank=rank, views={"dp": ("edp", "ep")}), ("tp",)
        )
        found = []
        for mode in (M.SEQUENCE, M.TENSOR, M.DATA):
            if mode in get_seeds():
                with seed(mode):
                    found.append(torch.rand(()).item())
            else:
                found.append(None)
        drawn.append(tuple(found))
    return drawn


def test_ranks_that_share_sequences_and_layers_have_a_state_of_their_own():
    a, b, c, d = first_draws({"sp": 2, "tp": 2})  # a and b share the first half of a sequence
    assert a[0] == b[0] != c[0] == d[0]
    assert len({tensor for _, tensor, _ in (a, b, c, d)}) == 4
    assert a[2] == b[2] == c[2] == d[2]
    of_sequence, of_layers = first_draws({"sp": 2, "tp": 1}), first_draws({"sp": 1, "tp": 2})
    assert of_sequence[1] == of_layers[1]  # one is called TENSOR as the other
    for first in (a, (of_sequence[0][1],)):  # attention draws for the sequence as one process would
        assert first[0] == a[2]
    assert of_layers[0][1] != of_layers[0][2]
    assert all(sequence is None for sequence, *_ in of_sequence)
