"""Process groups made by their members alone, under a name that the members agree on.

[Note: names of groups]
Members meet in the store under the name of the group. torch derives the name from the members and from how
many groups this process has made so far. Where some ranks have made one more (the two ends of a pipeline that
share an embedding, say), they and the others would wait for each other under different names, for ever. So
the name here says the members and nothing else of this process.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed import distributed_c10d

from colossalai.cluster._watchdog_sections import section


def make_group(ranks: Sequence[int], *, purpose: str, backend: str | None = None) -> dist.ProcessGroup:
    """Make the process group of some ranks; its members call this, and nobody else.

    Args:
        ranks: The members, by global rank. Another order is another group.
        purpose: Tells groups of the same members apart.
        backend: The communication library; default: that of the job.
    """
    name = f"{purpose}:{'-'.join(map(str, ranks))}"
    with section(f"making the process group {name}"), _name_for_groups(name):
        group = dist.new_group(list(ranks), backend=backend, use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup), f"this rank is not one of {list(ranks)}"
    return group


@contextmanager
def _name_for_groups(name: str) -> Iterator[None]:
    """Let torch call the group that is made within the block by a name; see [Note: names of groups]."""
    original = getattr(distributed_c10d, "_process_group_name", None)
    if original is None:  # another torch, which names groups in another way
        yield
        return
    taken = set(distributed_c10d._world.pg_names.values())
    number = next(number for number in range(len(taken) + 1) if f"{name}#{number}" not in taken)
    distributed_c10d._process_group_name = lambda *_args, **_kwargs: distributed_c10d.GroupName(
        f"{name}#{number}"
    )
    try:
        yield
    finally:
        distributed_c10d._process_group_name = original
