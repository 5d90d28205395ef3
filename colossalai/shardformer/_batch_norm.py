"""Batch norms over replicas: mean and variance are those of the whole batch, wherever its parts are.

[Note: statistics of a sharded batch]
A rank with n_r values of a channel finds their mean m_r and variance v_r. Of n = sum n_r values together

    m = sum (n_r / n) m_r,    v = sum (n_r / n) (v_r + (m_r - m)^2)        (Chan, Golub and LeVeque, 1979)

which cancels nothing, as a difference of sums of squares would. So the ranks gather (m_r, v_r, n_r), one
message for a layer, and each computes the same m and v from them. With y = w h + b and h = (x - m) / s the
gradient of the sum of the losses of all ranks is (1502.03167, section 3)

    dx = w / s (dy - (sum dy) / n - h (sum dy h) / n)

with both sums over all ranks: one more message. dw = sum dy h and db = sum dy stay local, like all
gradients of parameters until the data method averages them. A whole activation is processed by torch's own
kernel of a batch norm in evaluation, with m and v as the statistics.

[Note: repeated forward of a batch]
If activations are recomputed, the backward runs a forward again, on the same batch. All ranks do so alike, so
they gather again; but running statistics must not move a second time, nor may the batch be counted twice.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from colossalai.communication import all_gather, all_reduce, outside_graphs
from colossalai.context import Axis, is_in_backward
from colossalai.shardformer._channels import BATCH_NORMS
from colossalai.shardformer._layers import put_before
from colossalai.shardformer._registry import parts_of


def sync_batch_norms(model: nn.Module, replicas: Axis) -> int:
    """Let every batch norm of a model take its statistics over all replicas in training, in place.

    Of C channels on this rank, 2C + 1 numbers of at least 32 bits are gathered in the forward, and 2C are
    summed in the backward. In evaluation nothing is sent; a batch norm without running statistics takes those
    of its own part of the batch then.

    Args:
        model: The model, or a stage of it; its layers may have been cut by channels.
        replicas: The ranks that see different parts of the batch; with one of them nothing is changed.

    Returns:
        The number of batch norms.

    Raises:
        ValueError: `model` has a batch norm whose class has a forward of its own. Nothing has been changed
            then.
    """
    norms: list[tuple[str, nn.Module]] = [
        (name, part) for name, part in parts_of(model) if isinstance(part, BATCH_NORMS)
    ]
    for name, norm in norms:
        if type(norm).forward is not nn.modules.batchnorm._BatchNorm.forward:
            raise ValueError(
                f"sync_batch_norm: {name!r} is a {type(norm).__module__}.{type(norm).__qualname__}, with a "
                "forward of its own, which computes its statistics by itself: take torch's batch norm, or "
                "leave sync_batch_norm out"
            )
    for _, norm in norms if replicas.size > 1 else ():
        put_before(ReplicaBatchNorm, norm)
        vars(norm)["replicas"] = replicas
    return len(norms)


def follow_batches_once(model: nn.Module) -> list[Callable[[], None]]:
    """Let batch norms whose forward is recomputed leave running statistics alone the second time, in place.

    See [Note: repeated forward of a batch].

    Args:
        model: The model, or a stage of it; batch norms over replicas do so by themselves.

    Returns:
        A function for each batch norm that was changed, which takes the change back.
    """
    norms = [part for _, part in parts_of(model) if isinstance(part, (*BATCH_NORMS, nn.SyncBatchNorm))]
    chosen: list[nn.Module] = [norm for norm in norms if not isinstance(norm, ReplicaBatchNorm)]
    return [put_before(FollowsBatchOnce, norm) for norm in chosen]


class FollowsBatchOnce(nn.Module):
    """Put before the class of a batch norm; see [Note: repeated forward of a batch]."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the batch."""
        normalize = outside_graphs(self._normalize_again_or_not) if self.training else super().forward
        normalized: Tensor = normalize(x)
        return normalized

    def _normalize_again_or_not(self, x: Tensor) -> Tensor:
        normalize = super().forward
        if not is_in_backward():
            first: Tensor = normalize(x)
            return first
        kept = dict(self._buffers)
        # Updates go to copies, which are discarded; the forward may be overridden by a user's class.
        self._buffers.update({name: each if each is None else each.clone() for name, each in kept.items()})
        try:
            again: Tensor = normalize(x)
            return again
        finally:
            self._buffers.update(kept)


class ReplicaBatchNorm(nn.Module):
    """Put before the class of a batch norm; see [Note: statistics of a sharded batch].

    Attributes:
        replicas: The ranks.
    """

    replicas: Axis
    eps: float
    momentum: float | None
    weight: nn.Parameter | None
    bias: nn.Parameter | None
    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None
    _check_input_dim: Callable[[Tensor], None]  # of torch's batch norms

    def forward(self, x: Tensor) -> Tensor:
        """Normalize this rank's part of the batch, (batch, channels, ...)."""
        normalize = outside_graphs(self._normalize) if self.training else super().forward
        normalized: Tensor = normalize(x)
        return normalized

    def _normalize(self, x: Tensor) -> Tensor:
        self._check_input_dim(x)
        dtype = torch.promote_types(x.dtype, torch.float32)
        weight, bias = (None if each is None else each.to(dtype) for each in (self.weight, self.bias))
        y, mean, variance, count = _Normalization.apply(x, weight, bias, self.eps, self.replicas)
        # See [Note: repeated forward of a batch].
        if self.running_mean is not None and not is_in_backward():
            self._follow(mean, variance, count)
        normalized: Tensor = y
        return normalized

    @torch.no_grad()
    def _follow(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        """Move the running statistics, which are equal on all ranks, as these are computed alike on them."""
        assert self.running_mean is not None, "who calls has looked"
        assert self.running_var is not None, "torch has both or none"
        assert self.num_batches_tracked is not None, "torch has all three or none"
        self.num_batches_tracked.add_(1)
        factor: Tensor | float | None = self.momentum
        if factor is None:  # the mean over all batches
            factor = 1.0 / self.num_batches_tracked.to(self.running_mean.dtype)
        unbiased = variance * (count / (count - 1.0).clamp(min=1.0))
        self.running_mean.mul_(1.0 - factor).add_(mean * factor)
        self.running_var.mul_(1.0 - factor).add_(unbiased * factor)


class _Normalization(torch.autograd.Function):
    """(x - m) / sqrt(v + eps) * weight + bias, and m, v and the number of values, which have no gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, axis: Axis
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        mean, variance, count = _statistics(wide, axis)
        y = torch.empty_like(wide)
        if wide.numel():
            y = torch.native_batch_norm(wide, weight, bias, mean, variance, False, 0.0, eps)[0]
        ctx.save_for_backward(x, weight, mean, variance, count)  # x as it came, in its 16 bits
        ctx.eps, ctx.axis = eps, axis
        ctx.mark_non_differentiable(mean, variance, count)
        return y.to(x.dtype), mean, variance, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, weight, mean, variance, count = ctx.saved_tensors
        wide, dy = x.to(mean.dtype), dy.to(mean.dtype)
        inverse = (variance + ctx.eps).rsqrt()
        dw, db = torch.zeros_like(mean), torch.zeros_like(mean)
        if wide.numel():  # sum dy h and sum dy over this rank's part
            _, dw, db = torch.ops.aten.native_batch_norm_backward(
                dy, wide, weight, mean, variance, mean, inverse, False, ctx.eps, [False, True, True]
            )
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad  # the same on all ranks
        own = (dw if needs_weight else None, db if needs_bias else None, None, None)
        if not needs_x:
            return None, *own
        sum_dy, sum_dy_h = all_reduce(torch.stack([db, dw]), ctx.axis)
        scale = inverse if weight is None else inverse * weight
        slope = -scale * inverse * sum_dy_h / count
        offset = -scale * sum_dy / count - slope * mean
        along = (-1, *[1] * (x.dim() - 2))  # the channels are dimension 1
        dx = torch.addcmul(offset.view(along), wide, slope.view(along)).addcmul_(dy, scale.view(along))
        return dx.to(x.dtype), *own


def _statistics(x: Tensor, axis: Axis) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean and variance of each channel over all ranks, and the number of values of a channel.

    Args:
        x: (batch, channels, ...), this rank's part, which may have no samples.
        axis: The ranks.
    """
    num_channels = x.shape[1]
    own = x.new_zeros(2, num_channels)
    if x.numel() and x.device.type == "cpu":
        own = torch.stack(torch.batch_norm_update_stats(x, None, None, 0.0))  # 4 to 10 times as fast there
    elif x.numel():
        own = torch.stack(torch.var_mean(x, [0, *range(2, x.dim())], correction=0)[::-1])
    num_own = own.new_full((1,), x.numel() // num_channels)
    ranks = all_gather(torch.cat([own.flatten(), num_own])[None], 0, axis)  # (ranks, 2 * channels + 1)
    means, variances, counts = ranks.split([num_channels, num_channels, 1], dim=1)
    count = counts.sum()
    share = counts / count
    mean = (share * means).sum(0)
    variance = (share * (variances + (means - mean).square())).sum(0)
    return mean, variance, count
