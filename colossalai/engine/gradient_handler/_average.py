"""The average of gradients over ranks, in flat buckets."""

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from colossalai.communication import all_reduce
from colossalai.context import Axis
from colossalai.tensor import GradientSync, gradient_sync

BUCKET_BYTES = 25 * 2**20


def average_gradients(params: Iterable[nn.Parameter], replicas: Axis) -> None:
    """Replace the gradients of trainable parameters by that of the mean loss over all replicas, in place.

    One all-reduce for each bucket: as many bytes as that of the trainable parameters. A parameter that has no
    gradient on this rank (it was not used here) counts as zero, so that all ranks send the same.

    Args:
        params: The parameters, the same on all ranks.
        replicas: The ranks that see different parts of the batch; nothing happens if there is one only.
    """
    if replicas.size == 1:
        return
    for sync, grads in _buckets(params, replicas):
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        means = all_reduce(flat, sync.axis).div_(sync.divisor).split([grad.numel() for grad in grads])
        for grad, mean in zip(grads, means, strict=True):
            grad.copy_(mean.view_as(grad))


def _buckets(
    params: Iterable[nn.Parameter], replicas: Axis
) -> Iterator[tuple[GradientSync, list[torch.Tensor]]]:
    """Yield gradients of one kind, in the order of the parameters, as many as fit in a bucket."""
    open_buckets: dict[tuple[torch.dtype, torch.device, GradientSync], list[torch.Tensor]] = {}
    for param in params:
        if not param.requires_grad:
            continue
        param.grad = torch.zeros_like(param) if param.grad is None else param.grad
        sync = gradient_sync(param, replicas)
        kind = (param.grad.dtype, param.grad.device, sync)
        bucket = open_buckets.setdefault(kind, [])
        if bucket and sum(grad.nbytes for grad in bucket) + param.grad.nbytes > BUCKET_BYTES:
            yield sync, bucket
            bucket = open_buckets[kind] = []
        bucket.append(param.grad)
    yield from ((sync, bucket) for (_, _, sync), bucket in open_buckets.items())
