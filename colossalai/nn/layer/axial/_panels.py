"""Attention along many rows with one bias, whose scores are computed for a panel of rows at a time."""

# [Note: scores in panels]
# Attention along each of n rows of n pairs has heads * n**3 scores, next to which its inputs, dim * n**2, are
# small. No fused kernel of torch has a gradient of the bias, and the plain form saves the scores of all rows
# for the backward. Here the scores of as many rows as fit `_LARGEST_PANEL` exist at a time, in the cache of a
# processor; the backward computes them again, one more product next to six, and adds the gradient of the bias
# over panels. Saved are the arguments and the result.
#
# A compiler would unroll the loop over panels, whose number also depends on the sizes. It is given the plain
# form, in which it fuses and recomputes by its own rules.

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

_LARGEST_PANEL = {"cpu": 1 << 20}  # number of scores, in all heads
_LARGEST_PANEL_OF_ACCELERATORS = 1 << 26


def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, mask: Tensor | None) -> Tensor:
    """Return the attention of positions to those of their row.

    Args:
        query: (batch, rows, heads, n, head_dim).
        key: The same shape.
        value: The same shape.
        bias: (batch, heads, n, n), added to the scores of each row.
        mask: (batch, rows, n): positions that exist, as keys, and -1 for padding. In a row without any, all
            but the padding are used: a softmax over nothing has no value.

    Returns:
        The shape of `query`.
    """
    if mask is not None:
        exists = mask > 0
        exists = exists | (mask >= 0) & ~exists.any(-1, keepdim=True)
        if mask.dtype != torch.bool:  # rows of padding alone
            exists = exists | ~exists.any(-1, keepdim=True)
        mask = exists[:, :, None, None, :]  # (batch, rows, 1, 1, n)
    output: Tensor
    if bias is not None and not torch.compiler.is_compiling():
        output = _PanelAttention.apply(query, key, value, bias.to(query.dtype), mask)
        return output
    scores = None if mask is None else mask.expand(*query.shape[:-1], -1)
    if bias is not None:
        scores = _with_mask(bias.unsqueeze(1), mask).to(query.dtype).expand(*query.shape[:-1], -1)
    # Fused kernels of torch are for four dimensions.
    shape = query.shape[:2]
    scores = None if scores is None else scores.flatten(0, 1)
    query, key, value = query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1)
    output = F.scaled_dot_product_attention(query, key, value, scores)
    return output.reshape(*shape, *output.shape[1:])


def _with_mask(scores: Tensor, mask: Tensor | None) -> Tensor:
    return scores if mask is None else scores.masked_fill(~mask, float("-inf"))


class _PanelAttention(torch.autograd.Function):
    """Attention with a bias of all rows. See [Note: scores in panels]."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor, mask: Tensor | None
    ) -> Tensor:
        output = torch.empty_like(query)
        for panel in _panels(query):
            scores = _with_mask(bias[panel[0]], None if mask is None else mask[panel])
            scores = scores.expand(*query[panel].shape[:-1], -1)  # (rows, heads, n, n)
            output[panel] = F.scaled_dot_product_attention(query[panel], key[panel], value[panel], scores)
        ctx.save_for_backward(query, key, value, bias, mask, output)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, None]:
        query, key, value, bias, mask, output = ctx.saved_tensors
        # Sums and exponentials are of float32 or better, products of the dtype of the inputs.
        exact = torch.promote_types(query.dtype, torch.float32)
        scale = query.shape[-1] ** -0.5
        grad_query, grad_key, grad_value = (torch.empty_like(x) for x in (query, key, value))
        grad_bias = torch.zeros_like(bias, dtype=exact)
        for panel in _panels(query):
            scores = (query[panel] @ key[panel].mT).to(exact).mul_(scale).add_(bias[panel[0]])
            weights = _with_mask(scores, None if mask is None else mask[panel]).softmax(-1)
            grad_value[panel] = weights.to(query.dtype).mT @ grad_output[panel]
            # The gradient of a softmax: weights * (grad - sum of weights * grad); the sum is also that of
            # grad_output * output, which is smaller.
            grad = (grad_output[panel] @ value[panel].mT).to(exact)
            grad -= (grad_output[panel].to(exact) * output[panel]).sum(-1, keepdim=True)
            grad *= weights
            grad_bias[panel[0]] += grad.sum(0)
            grad_scores = grad.mul_(scale).to(query.dtype)
            grad_query[panel] = grad_scores @ key[panel]
            grad_key[panel] = grad_scores.mT @ query[panel]
        return grad_query, grad_key, grad_value, grad_bias.to(bias.dtype), None


def _panels(query: Tensor) -> Iterator[tuple[int, slice]]:
    """Yield samples and slices of their rows (at least one), whose scores fit a panel."""
    batch, num_rows, num_heads, n, _ = query.shape
    largest = _LARGEST_PANEL.get(query.device.type, _LARGEST_PANEL_OF_ACCELERATORS)
    size = max(1, largest // max(1, num_heads * n * n))
    for sample in range(batch):
        for start in range(0, num_rows, size):
            yield sample, slice(start, start + size)
