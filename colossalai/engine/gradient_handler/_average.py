"""The average of gradients over ranks, in flat buckets."""

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from colossalai.communication import all_reduce
from colossalai.context import Axis

BUCKET_BYTES = 25 * 2**20


def average_gradients(params: Iterable[nn.Parameter], axis: Axis) -> None:
    """Replace the gradients of trainable parameters by their mean over the ranks of an axis, in place.

    One all-reduce for each bucket: as many bytes as that of the trainable parameters. A parameter that has no
    gradient on this rank (it was not used here) counts as zero, so that all ranks send the same.

    Args:
        params: The parameters, the same on all ranks.
        axis: The ranks; nothing happens if there is one only.
    """
    if axis.size == 1:
        return
    for grads in _buckets(params):
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        means = all_reduce(flat, axis).div_(axis.size).split([grad.numel() for grad in grads])
        for grad, mean in zip(grads, means, strict=True):
            grad.copy_(mean.view_as(grad))


def _buckets(params: Iterable[nn.Parameter]) -> Iterator[list[torch.Tensor]]:
    """Yield gradients of one type and device, in the order of the parameters, as many as fit in a bucket."""
    open_buckets: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for param in params:
        if not param.requires_grad:
            continue
        param.grad = torch.zeros_like(param) if param.grad is None else param.grad
        kind = (param.grad.dtype, param.grad.device)
        bucket = open_buckets.setdefault(kind, [])
        if bucket and sum(grad.nbytes for grad in bucket) + param.grad.nbytes > BUCKET_BYTES:
            yield bucket
            bucket = open_buckets[kind] = []
        bucket.append(param.grad)
    yield from open_buckets.values()
