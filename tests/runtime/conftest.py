"""A mesh of one rank."""

import pytest
import torch

from colossalai.context import Mesh


@pytest.fixture
def mesh(tmp_path):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield Mesh({"dp": 1}, rank=0)
    torch.distributed.destroy_process_group()
