"""One rank of a job of any size, in this process: layouts, plans and bytes without other ranks."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from colossalai.core import global_context as gpc


@contextmanager
def fake_job(config: Mapping[str, Any], num_ranks: int, rank: int = 0) -> Iterator[None]:
    """Launch a rank of a job whose collectives return at once; what they receive has any value.

    Args:
        config: The config of the job.
        num_ranks: How many ranks it has.
        rank: Which one this process is.
    """
    gpc.load_config(config)
    try:
        gpc.init_parallel_groups(rank=rank, world_size=num_ranks, device=torch.device("cpu"))
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
        gpc.init_own_groups()
        yield
    finally:
        gpc.destroy()
