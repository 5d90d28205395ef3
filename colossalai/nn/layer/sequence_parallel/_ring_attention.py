"""Exact attention over a sequence that is cut over ranks: the blocks of keys and values go round a ring.

Ring attention (Liu et al. 2023, 2310.01889) with online softmax. The tiles and the formulas are in `_tiles`,
the order of the sequence that balances the causal mask in `_order`.
"""

import math
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from colossalai.communication import RingSum, ring_blocks
from colossalai.context import Axis
from colossalai.nn.layer.sequence_parallel._dropout import draw_seed
from colossalai.nn.layer.sequence_parallel._order import Order, check_order
from colossalai.nn.layer.sequence_parallel._tiles import Backward, Forward, Rules, ScoreBlock


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    axis: Axis,
    causal: bool = False,
    key_padding_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    order: Order = "zigzag",
    tile_size: int = 512,
    lanes: torch.Tensor | None = None,
    dropout_seed: int | torch.Tensor | None = None,
) -> torch.Tensor:
    """Return softmax(scale q k^T) v of the whole sequence for this rank's queries.

    All ranks along the axis call it together, with the same shapes and options. No rank ever holds more
    scores than those of one tile; for the backward it keeps q, k, v, the result and one number for each
    query, and computes the scores again. Sums are in float32 or better.

    Bytes that a rank of p sends, for n elements of k on a rank, e bytes each, a = max(e, 4), and m bytes of
    padding mask (0 without one): forward (p - 1) (2 n e + m), backward (p - 1) (2 n e + m + 2 n a). Each
    transfer overlaps the computation of a block.

    Args:
        q: Queries of this rank's sub-sequence.
        k: Its keys.
        v: Its values.
        axis: The ranks that share the sequence.
        causal: A query attends to its own and earlier positions only; tiles that are wholly masked are
            skipped.
        key_padding_mask: This rank's slice of it, bool, True for a key that is masked. A query that
            sees no key has the result 0.
        dropout_p: Probability that a weight is dropped; pass 0 in evaluation. The mask is a function of one
            seed for all ranks along the axis, and of sample, head and the two positions: it does not depend
            on the number of ranks, the order or the size of a tile.
        scale: Factor of the scores; default 1 / sqrt(head_size).
        order: Which positions a rank holds: "contiguous", or "zigzag" (`zigzag_split`), which gives all
            ranks the same work under a causal mask.
        tile_size: The most queries, and the most keys, of one tile.
        lanes: Integers that identify samples and heads in dropout masks if q has a part of them only,
            because tensor parallelism cuts them; default: they are counted.
        dropout_seed: The seed of the mask, the same on all ranks along the axis; default: it is drawn.

    Shape:
        q, k, v and the result (batch, heads, sub_seq, head_size); key_padding_mask (batch, sub_seq); lanes
        (batch, heads).

    Raises:
        ValueError: `q`, `k` and `v` differ in shape or dtype, a mask or `lanes` does not match them, or an
            option is out of range; before anything is sent.
    """
    check_operands("ring_attention", q, k, v, key_padding_mask, dropout_p, tile_size, lanes)
    sub_seq, head_size = q.shape[-2:]
    check_order(order, sub_seq)
    if dropout_seed is None:
        dropout_seed = draw_seed(axis, q.device) if dropout_p > 0.0 else 0
    rules = Rules(
        order=order,
        axis_rank=axis.rank,
        axis_size=axis.size,
        sub_seq=sub_seq,
        tile_size=tile_size,
        causal=causal,
        scale=1.0 / math.sqrt(head_size) if scale is None else scale,
        dropout_p=dropout_p,
        dropout_seed=dropout_seed,
        lanes=lanes,
    )
    result: torch.Tensor = _RingAttention.apply(q, k, v, key_padding_mask, axis, rules)
    return result


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        padding: torch.Tensor | None,
        axis: Axis,
        rules: Rules,
    ) -> torch.Tensor:
        with torch.autocast(q.device.type, enabled=False):
            sums = Forward(_accumulating(q), rules)
            for owner, tensors in ring_blocks(_travelling(k, v, padding), axis):
                sums.add(_block(*tensors), owner)
            out, logsumexp = sums.finish()
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, padding, out, logsumexp)
        ctx.axis, ctx.rules = axis, rules
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, padding, out, logsumexp = ctx.saved_tensors
        with torch.autocast(q.device.type, enabled=False):
            mine = Backward(_accumulating(q), _accumulating(grad), _accumulating(out), logsumexp, ctx.rules)
            home = RingSum(ctx.axis)
            for owner, tensors in ring_blocks(_travelling(k, v, padding), ctx.axis):
                home.add(*mine.add(_block(*tensors), owner))
            grad_k, grad_v = home.finish()
        return mine.grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), None, None, None


def _travelling(k: torch.Tensor, v: torch.Tensor, padding: torch.Tensor | None) -> list[torch.Tensor]:
    return [k, v] if padding is None else [k, v, padding]


def _block(k: torch.Tensor, v: torch.Tensor, padding: torch.Tensor | None = None) -> ScoreBlock:
    return ScoreBlock(_accumulating(k), _accumulating(v), padding)


def _accumulating(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in float32 or better."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def check_operands(
    who: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    padding: torch.Tensor | None,
    dropout_p: float,
    tile_size: int,
    lanes: torch.Tensor | None,
) -> None:
    """Check the operands of an attention over cut sequences, before anything is sent.

    Raises:
        ValueError: `q`, `k` and `v` differ in shape or dtype, `padding` or `lanes` does not match them, or
            `dropout_p` or `tile_size` is out of range.
    """
    found = [(tuple(tensor.shape), tensor.dtype) for tensor in (q, k, v)]
    if q.dim() != 4 or found[1:] != found[:1] * 2:
        raise ValueError(
            f"{who}: q, k, v are {found}; they must have one shape (batch, heads, sub_seq, "
            "head_size) and one type"
        )
    if padding is not None and (padding.dtype != torch.bool or padding.shape != (q.shape[0], q.shape[2])):
        raise ValueError(
            f"{who}: key_padding_mask is {padding.dtype} of shape {tuple(padding.shape)}; it must "
            f"be bool of shape (batch, sub_seq) = {(q.shape[0], q.shape[2])}, this rank's slice"
        )
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"{who}: dropout_p is {dropout_p}; it must be at least 0 and below 1")
    if tile_size < 1:
        raise ValueError(f"{who}: tile_size is {tile_size}; it must be at least 1")
    if lanes is not None and (lanes.dtype != torch.int64 or lanes.shape != q.shape[:2]):
        raise ValueError(
            f"{who}: lanes is {lanes.dtype} of shape {tuple(lanes.shape)}; it must be int64 of shape (batch, "
            f"heads) = {tuple(q.shape[:2])}"
        )
