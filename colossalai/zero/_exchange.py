"""The two collectives of ZeRO on a bucket: a mean of which each rank gets its section, and the way back.

[Note: the mean is taken where it is needed]
Each rank sends every other one that one's section (an all-to-all) and adds up what it gets, in float32 or
better, in the order of the ranks. That sends the bytes of a ring reduce-scatter, (n-1)/n of the bucket, and
rounds to a low precision once instead of at every hop; the result does not depend on where in a bucket a
parameter lies. It serves sections of different lengths as well. With gloo, whose reduce-scatter is an
all-reduce that throws most of its result away, it takes about half the time.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist

from colossalai.communication._ledger import is_timed, record
from colossalai.context import Axis
from colossalai.zero._layout import Bucket

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def start_mean(
    flat: torch.Tensor, bucket: Bucket, replicas: Axis, dtype: torch.dtype | None
) -> Callable[[], torch.Tensor]:
    """Begin to average a bucket; return what waits for it and returns this rank's section of the mean.

    Here gradients are divided by the number of replicas, once. See [Note: the mean is taken where it is
    needed].

    Args:
        flat: This rank's gradients; not to be touched before the end.
        bucket: Their layout.
        replicas: The ranks.
        dtype: What is sent; None: as the gradients are.
    """
    if replicas.size == 1:
        return lambda: flat
    sent = flat if dtype is None else flat.to(dtype)
    sizes = bucket.section_sizes
    own = sizes[replicas.rank]
    received = sent.new_empty(own * replicas.size)
    with record("reduce_scatter", replicas.name, sent, replicas.size):
        work = dist.all_to_all_single(
            received, sent, [own] * replicas.size, sizes, group=replicas.group, async_op=True
        )
        assert work is not None, "this rank is one of its group"
        if is_timed():
            work.wait()

    def finish() -> torch.Tensor:
        work.wait()
        wide = torch.promote_types(sent.dtype, torch.float32)
        return torch.sum(received.view(replicas.size, own), 0, dtype=wide).div_(replicas.size)

    return finish


def start_gather(flat: torch.Tensor, bucket: Bucket, replicas: Axis) -> Callable[[], None]:
    """Begin to fill a bucket with the sections of all ranks, each of which has its own in place."""
    if replicas.size == 1:
        return lambda: None
    own = bucket.section(flat, replicas.rank)
    if bucket.cuts_params:
        with record("all_gather", replicas.name, own, replicas.size):
            return _waiting_for([_all_gather(flat, own, group=replicas.group, async_op=True)])
    with record("broadcast", replicas.name, flat, replicas.size):  # sections of different lengths
        return _waiting_for(
            [
                dist.broadcast(bucket.section(flat, rank), src=source, group=replicas.group, async_op=True)
                for rank, source in enumerate(replicas.ranks)
                if bucket.section_sizes[rank] > 0
            ]
        )


def _waiting_for(works: list[dist.Work]) -> Callable[[], None]:
    def wait() -> None:
        for work in works:
            work.wait()

    if is_timed():  # so that its time is its own
        wait()
    return wait
