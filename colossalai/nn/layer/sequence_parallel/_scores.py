"""Ring self-attention in its two products (Li et al. 2021, 2105.13120).

Each rank of the sequence axis holds the queries, keys and values of its sub-sequence. Keys, then values, go
round the ring; a rank that sees all of them has whole rows of scores, (sub_seq, seq), and of probabilities.
With n bytes of one operand on a rank and p ranks: forward (p - 1) n sent, backward 2 (p - 1) n.
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from colossalai.communication import RingSum, ring_blocks
from colossalai.context import Axis, ParallelMode, global_context


class RingQK(torch.autograd.Function):
    """Scores of this rank's queries against the keys of all ranks.

    `RingQK.apply(sub_q, sub_k, batch_size, num_attention_heads, sub_seq_length)` returns Q K^T, not scaled.

    Shape:
        sub_q, sub_k (batch * heads, sub_seq, head_size); result (batch * heads, sub_seq, seq), in the order
        of the whole sequence.
    """

    @staticmethod
    def forward(
        ctx: Any,
        sub_q: torch.Tensor,
        sub_k: torch.Tensor,
        batch_size: int,
        num_attention_heads: int,
        sub_seq_length: int,
        axis: Axis | None = None,
    ) -> torch.Tensor:
        """Send the keys round.

        Args:
            ctx: Of autograd.
            sub_q: This rank's queries.
            sub_k: This rank's keys.
            batch_size: Number of samples.
            num_attention_heads: Number of heads.
            sub_seq_length: Number of positions on a rank.
            axis: The ring; default: the SEQUENCE axis of the launched job.

        Raises:
            ValueError: The shape of `sub_q` or `sub_k` does not match the numbers.
        """
        ctx.axis = axis = _ring(axis)
        rows = batch_size * num_attention_heads
        _check("RingQK", "sub_q", sub_q, (rows, sub_seq_length, sub_q.shape[-1]))
        _check("RingQK", "sub_k", sub_k, tuple(sub_q.shape))
        ctx.save_for_backward(sub_q, sub_k)
        scores = sub_q.new_empty(rows, sub_seq_length, axis.size * sub_seq_length)
        with _own_dtype(sub_q):
            for owner, (keys,) in ring_blocks([sub_k], axis):
                _columns(scores, owner, sub_seq_length).copy_(sub_q @ keys.transpose(1, 2))
        return scores

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Send the keys round again, and sums of their gradients behind them."""
        sub_q, sub_k = ctx.saved_tensors
        grad_q, sums = torch.zeros_like(sub_q, dtype=_sum_dtype(sub_q)), RingSum(ctx.axis)
        with _own_dtype(sub_q):
            for owner, (keys,) in ring_blocks([sub_k], ctx.axis):
                columns = _columns(grad, owner, sub_k.shape[1])
                grad_q.add_(columns @ keys)
                sums.add((columns.transpose(1, 2) @ sub_q).to(grad_q.dtype))
        (grad_k,) = sums.finish()
        return grad_q.to(sub_q.dtype), grad_k.to(sub_k.dtype), None, None, None, None


class RingAV(torch.autograd.Function):
    """Sum of the values of all ranks, weighted by this rank's rows of probabilities.

    `RingAV.apply(attention_score, sub_v, batch_size, num_attention_heads, attention_head_size,
    sub_seq_length)` returns A V.

    Shape:
        attention_score (batch * heads, sub_seq, seq), sub_v (batch * heads, sub_seq, head_size); result
        (batch * heads, sub_seq, head_size).
    """

    @staticmethod
    def forward(
        ctx: Any,
        attention_score: torch.Tensor,
        sub_v: torch.Tensor,
        batch_size: int,
        num_attention_heads: int,
        attention_head_size: int,
        sub_seq_length: int,
        axis: Axis | None = None,
    ) -> torch.Tensor:
        """Send the values round.

        Args:
            ctx: Of autograd.
            attention_score: This rank's rows of probabilities.
            sub_v: This rank's values.
            batch_size: Number of samples.
            num_attention_heads: Number of heads.
            attention_head_size: Size of a head.
            sub_seq_length: Number of positions on a rank.
            axis: The ring; default: the SEQUENCE axis of the launched job.

        Raises:
            ValueError: The shape of `attention_score` or `sub_v` does not match the numbers.
        """
        ctx.axis = axis = _ring(axis)
        rows = batch_size * num_attention_heads
        _check("RingAV", "sub_v", sub_v, (rows, sub_seq_length, attention_head_size))
        _check(
            "RingAV", "attention_score", attention_score, (rows, sub_seq_length, axis.size * sub_seq_length)
        )
        ctx.save_for_backward(attention_score, sub_v)
        context = torch.zeros_like(sub_v, dtype=_sum_dtype(sub_v))
        with _own_dtype(sub_v):
            for owner, (values,) in ring_blocks([sub_v], axis):
                context.add_(_columns(attention_score, owner, sub_seq_length) @ values)
        return context.to(sub_v.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Send the values round again, and sums of their gradients behind them."""
        probabilities, sub_v = ctx.saved_tensors
        grad_probabilities, sums = torch.empty_like(probabilities), RingSum(ctx.axis)
        with _own_dtype(sub_v):
            for owner, (values,) in ring_blocks([sub_v], ctx.axis):
                columns = _columns(probabilities, owner, sub_v.shape[1])
                _columns(grad_probabilities, owner, sub_v.shape[1]).copy_(grad @ values.transpose(1, 2))
                sums.add((columns.transpose(1, 2) @ grad).to(_sum_dtype(sub_v)))
        (grad_v,) = sums.finish()
        return grad_probabilities, grad_v.to(sub_v.dtype), None, None, None, None, None


def _ring(axis: Axis | None) -> Axis:
    return global_context.axis(ParallelMode.SEQUENCE) if axis is None else axis


def _columns(scores: torch.Tensor, owner: int, sub_seq: int) -> torch.Tensor:
    """Return the part of rows of scores that belongs to the keys of a rank."""
    return scores.narrow(-1, owner * sub_seq, sub_seq)


def _sum_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Sums over ranks are in float32 or better."""
    return torch.promote_types(tensor.dtype, torch.float32)


def _own_dtype(tensor: torch.Tensor) -> torch.autocast:
    """The products are computed in the type of the operands, in the backward as in the forward."""
    return torch.autocast(tensor.device.type, enabled=False)


def _check(who: str, name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{who}: {name} has shape {tuple(tensor.shape)}; it must be {shape}")
