"""A mesh of one rank, and its random states."""

from collections.abc import Iterator

import pytest
import torch

from colossalai.context import Mesh, random_state, reset_seeds, set_random_state
from colossalai.context._random import seed_all_modes


@pytest.fixture
def mesh(tmp_path):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield Mesh({"dp": 1, "pp": 1}, rank=0)
    torch.distributed.destroy_process_group()


@pytest.fixture
def launched() -> Iterator[None]:
    """Seed the random states of a job of one rank, for the test."""
    kept = random_state()
    mesh = Mesh({"edp": 1, "ep": 1, "pp": 1, "tp": 1}, rank=0, views={"dp": ("edp", "ep")})
    seed_all_modes(3, mesh, ("tp",))
    yield
    reset_seeds()
    set_random_state(kept)
