"""The average of gradients over ranks, in flat buckets."""

from collections.abc import Iterable, Iterator
from typing import final

import torch
from torch import nn

from colossalai.communication import all_reduce
from colossalai.context import Axis
from colossalai.nn.parallel import EarlierMeans
from colossalai.tensor import GradientSync, gradient_sync

BUCKET_BYTES = 25 * 2**20


@final
class GradientAverage:
    """Replaces the gradients of trainable parameters by that of the mean loss over all replicas, in place.

    Args:
        replicas: The ranks that see different parts of the batch; nothing happens if there is one only.
    """

    def __init__(self, replicas: Axis) -> None:
        self._replicas = replicas
        self._means = EarlierMeans((), replicas)

    def __call__(self, params: Iterable[nn.Parameter]) -> None:
        """Average the gradients.

        One all-reduce for each bucket: as many bytes as that of the trainable parameters. A parameter that
        has no gradient on this rank (it was not used here) counts as zero, so that all ranks send the same.

        Args:
            params: The parameters, the same on all ranks.
        """
        if self._replicas.size == 1:
            return
        trainable = [param for param in params if param.requires_grad]
        self._means.track(trainable)
        for param in trainable:
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
            self._means.scale(param, param.grad)
        for sync, grads in _buckets(trainable, self._replicas):
            flat = torch.cat([grad.reshape(-1) for grad in grads])
            means = all_reduce(flat, sync.axis).div_(sync.divisor).split([grad.numel() for grad in grads])
            for grad, mean in zip(grads, means, strict=True):
                grad.copy_(mean.view_as(grad))
        for param in trainable:
            self._means.note(param)


def _buckets(
    params: Iterable[nn.Parameter], replicas: Axis
) -> Iterator[tuple[GradientSync, list[torch.Tensor]]]:
    """Yield gradients of one kind, in the order of the parameters, as many as fit in a bucket."""
    open_buckets: dict[tuple[torch.dtype, torch.device, GradientSync], list[torch.Tensor]] = {}
    for param in params:
        assert param.grad is not None
        sync = gradient_sync(param, replicas)
        kind = (param.grad.dtype, param.grad.device, sync)
        bucket = open_buckets.setdefault(kind, [])
        if bucket and sum(grad.nbytes for grad in bucket) + param.grad.nbytes > BUCKET_BYTES:
            yield sync, bucket
            bucket = open_buckets[kind] = []
        bucket.append(param.grad)
    yield from ((sync, bucket) for (_, _, sync), bucket in open_buckets.items())
