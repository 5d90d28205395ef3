"""Exact attention over a sequence that is cut over ranks: each rank takes some heads of the whole sequence.

DeepSpeed-Ulysses (Jacobs et al. 2023, 2309.14509). An all-to-all turns slices of the sequence with all heads
into whole sequences of 1/p of the heads, and another one turns the result back. Between them is attention as
in one process, so it may be a fused one.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention

from colossalai.communication import all_gather, all_to_all_forward_all_to_all_backward
from colossalai.context import Axis
from colossalai.nn.layer.sequence_parallel._dropout import draw_seed, numbered_lanes
from colossalai.nn.layer.sequence_parallel._order import Order, check_order, rank_by_rank
from colossalai.nn.layer.sequence_parallel._ring_attention import check_operands, ring_attention


def ulysses_attention(
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
) -> torch.Tensor:
    """Return softmax(scale q k^T) v of the whole sequence for this rank's queries, as `ring_attention` does.

    All ranks along the axis call it together, with the same shapes and options. The heads of a rank are
    attended to by `scaled_dot_product_attention`; dropout, and padding under a causal mask, take the tiles of
    ring attention, since their masks would otherwise have seq x seq elements.

    Bytes that a rank of p sends, for n bytes of q on a rank, and m of padding mask (0 without one): forward
    4 n (p - 1)/p + (p - 1) m, in two all-to-alls and one all-gather; backward 4 n (p - 1)/p in two
    all-to-alls.

    Args:
        q: Queries of this rank's sub-sequence.
        k: Its keys.
        v: Its values.
        axis: The ranks that share the sequence.
        causal: A query attends to its own and earlier positions only.
        key_padding_mask: This rank's slice of it, bool, True for a key that is masked. A query that
            sees no key has the result 0.
        dropout_p: Probability that a weight is dropped; pass 0 in evaluation. The mask is that of
            `ring_attention` from the same seed.
        scale: Factor of the scores; default 1 / sqrt(head_size).
        order: Which positions a rank holds. All ranks have the same work in either order; in "contiguous"
            nothing has to be reordered.
        tile_size: The most queries, and the most keys, of one tile, where there are tiles.
        lanes: As in `ring_attention`.

    Shape:
        q, k, v and the result (batch, heads, sub_seq, head_size); key_padding_mask (batch, sub_seq); lanes
        (batch, heads).

    Raises:
        ValueError: `q`, `k` and `v` differ in shape or dtype, a mask or `lanes` does not match them, an
            option is out of range, or the ranks do not divide the heads; before anything is sent.
    """
    check_operands("ulysses_attention", q, k, v, key_padding_mask, dropout_p, tile_size, lanes)
    check_order(order, q.shape[2])
    check_divides_heads(q.shape[1], axis.size)
    # One message for the three: (3, batch, heads, sub_seq, head) -> (3, batch, heads/p, seq, head)
    stacked = all_to_all_forward_all_to_all_backward(torch.stack((q, k, v)), axis, split_dim=2, gather_dim=3)
    padding = None if key_padding_mask is None else all_gather(key_padding_mask, 1, axis)  # (batch, seq)
    # The received parts are in the order of the ranks: position held[i] of the sequence at place i.
    held = rank_by_rank(stacked.shape[3], axis.size, order=order, device=q.device)
    if held is not None:
        in_order = held.argsort()
        stacked = stacked.index_select(3, in_order)
        padding = None if padding is None else padding.index_select(1, in_order)
    if dropout_p > 0.0 or (causal and padding is not None):
        all_lanes = numbered_lanes(*q.shape[:2], device=q.device) if lanes is None else lanes
        mixed = ring_attention(
            *stacked.unbind(0),
            axis=Axis(axis.name, (axis.mesh.rank,), axis.mesh),  # this rank alone: a ring of one
            causal=causal,
            key_padding_mask=padding,
            dropout_p=dropout_p,
            scale=scale,
            order="contiguous",
            tile_size=tile_size,
            lanes=all_lanes.chunk(axis.size, dim=1)[axis.rank],
            dropout_seed=draw_seed(axis, q.device) if dropout_p > 0.0 else 0,
        )
    else:
        mixed = _fused(*stacked.unbind(0), causal=causal, padding=padding, scale=scale)
    if held is not None:
        mixed = mixed.index_select(2, held)
    # (batch, heads/p, seq, head) -> (batch, heads, sub_seq, head)
    return all_to_all_forward_all_to_all_backward(mixed, axis, split_dim=2, gather_dim=1)


def check_divides_heads(num_heads: int, num_ranks: int) -> None:
    """Require that the ranks that share a sequence divide the heads that each of them has.

    Raises:
        ValueError: `num_ranks` does not divide `num_heads`.
    """
    if num_heads % num_ranks:
        raise ValueError(
            f"ulysses attention gives each of the {num_ranks} ranks that share a sequence some of the "
            f"{num_heads} heads (of a tensor-parallel rank), which they do not divide: choose a multiple of "
            f"{num_ranks} heads, fewer ranks, or attention='ring', which takes any number"
        )


def _fused(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    padding: torch.Tensor | None,
    scale: float | None,
) -> torch.Tensor:
    """Attend within whole sequences; `padding` is not given under a causal mask."""
    if padding is None:
        return scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)
    # A sample of padding alone has nothing to divide by: let it see everything, and make the result 0.
    blind = padding.all(dim=1, keepdim=True)
    visible = (~padding | blind)[:, None, None, :]  # (batch, 1, 1, seq)
    mixed = scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale)
    return mixed.masked_fill(blind[:, :, None, None], 0.0)
