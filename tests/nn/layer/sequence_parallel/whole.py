"""Attention in one process over whole sequences, and how far ranks that share them are from it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import colossalai
from colossalai.context import Axis, ParallelMode
from colossalai.core import global_context as gpc
from colossalai.nn.layer.sequence_parallel import own_positions

BATCH, SEQ, HEAD = 2, 16, 5
PADDINGS = (None, "some", "all of a sample", "what a query sees")


def launch(size: int, attention: str = "ring") -> Axis:
    """Launch a job in which so many ranks share a sequence; return their axis."""
    config = {"parallel": {"sequence": {"size": size, "attention": attention}}}
    colossalai.launch_from_torch(config, verbose=False)
    return gpc.axis(ParallelMode.SEQUENCE)


def whole_tensors(heads: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Return queries, keys, values and a gradient: (batch, heads, seq, head)."""
    generator = torch.Generator().manual_seed(7)
    shape = (BATCH, heads, SEQ, HEAD)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(4)]


def padding_of(kind: str | None) -> Tensor:
    """Return which keys are hidden: (batch, seq)."""
    mask = torch.zeros(BATCH, SEQ, dtype=torch.bool)
    if kind == "some":
        mask[0, 11:] = True
        mask[1, 2:4] = True
    if kind == "all of a sample":
        mask[1] = True
        mask[0, :3] = True
    if kind == "what a query sees":  # under a causal mask
        mask[0, :3] = True
    return mask


def error_of(
    attend: Callable[..., Tensor],
    axis: Axis,
    *,
    heads: int,
    order: Any,
    causal: bool,
    padding: str | None,
    scale: float | None,
    **options: Any,
) -> float:
    """Return the largest distance of output and gradients of this rank from those in one process."""
    mine = own_positions(SEQ, axis, order=order)
    q, k, v, grad = whole_tensors(heads)
    whole = [tensor.requires_grad_() for tensor in (q, k, v)]
    visible = torch.ones(SEQ, SEQ, dtype=torch.bool)
    visible = (visible.tril() if causal else visible) & ~padding_of(padding)[:, None, None]
    expected = scaled_dot_product_attention(*whole, attn_mask=visible, scale=scale)
    expected.backward(grad)
    inputs = [tensor.detach()[:, :, mine].requires_grad_() for tensor in (q, k, v)]
    mask = None if padding is None else padding_of(padding)[:, mine]
    options = {"causal": causal, "key_padding_mask": mask, "order": order, "scale": scale, **options}
    out = attend(*inputs, axis=axis, **options)
    out.backward(grad[:, :, mine])
    wanted = [expected.detach(), *(tensor.grad for tensor in whole)]
    found = [out.detach(), *(tensor.grad for tensor in inputs)]
    errors = [(a - b[:, :, mine]).abs().max() for a, b in zip(found, wanted, strict=True)]
    return torch.stack(errors).max().item()  # which keeps a NaN, as Python's max does not
