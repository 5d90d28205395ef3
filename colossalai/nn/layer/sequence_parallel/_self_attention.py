"""Self-attention of a transformer whose input is cut along the sequence (Li et al. 2021, 2105.13120)."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from colossalai.context import ParallelMode, drawing_apart, global_context
from colossalai.logging import get_dist_logger
from colossalai.nn.layer.sequence_parallel._attentions import ATTENTIONS, RING
from colossalai.nn.layer.sequence_parallel._scores import RingAV, RingQK

MaskFunction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(scores, mask) -> scores in which masked elements are very small."""


class SharesSequence(nn.Module):
    """A module that attends to sequences which the ranks of the SEQUENCE axis share; abstract."""


class TransformerSelfAttentionRing(SharesSequence):
    """Multi-head self-attention over the SEQUENCE axis, with whole rows of scores.

    The ranks hold consecutive sub-sequences. Scores are an input of a mask function of the user's own, so
    whole rows of them, (sub_seq, seq), are held; `ring_attention` holds none, and takes padding and causal
    masks.

    Args:
        hidden_size: Size of a hidden state.
        num_attention_heads: Number of heads, a divisor of `hidden_size`.
        attention_dropout: Probability that a weight of the attention is dropped.
        attention_mask_func: Called with the scores (batch, heads, sub_seq, seq) and the mask.
        layer_number: Number of this layer, from 1.
        apply_query_key_layer_scaling: Divide the scores by `layer_number` in the product and multiply by it
            in the softmax, which is then in float32: no overflow in float16, the same result.
        convert_fp16_to_fp32_in_softmax: Mask and softmax in float32.
        attn_mask_type: No effect: the mask decides. It chose a fused kernel.
        masked_softmax_fusion: No effect: there is no fused kernel to choose.
        fp16: No effect: the input decides the type.
        bf16: No effect, as above.

    Shape:
        Input and output (sub_seq, batch, hidden).

    Raises:
        ValueError: The heads do not divide the hidden size, a number is out of range, or the launched job has
            no SEQUENCE axis.
    """

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        attention_dropout: float,
        attention_mask_func: MaskFunction,
        layer_number: int,
        apply_query_key_layer_scaling: bool = False,
        convert_fp16_to_fp32_in_softmax: bool = False,
        attn_mask_type: Any = None,
        masked_softmax_fusion: bool | None = None,
        fp16: bool = False,
        bf16: bool = False,
    ) -> None:
        super().__init__()
        if num_attention_heads < 1 or hidden_size % num_attention_heads:
            raise ValueError(
                f"hidden_size is {hidden_size}, which {num_attention_heads} attention heads do not divide"
            )
        if layer_number < 1:
            raise ValueError(f"layer_number is {layer_number}; layers count from 1")
        _warn_of_what_has_no_effect(
            attn_mask_type=attn_mask_type, masked_softmax_fusion=masked_softmax_fusion, fp16=fp16, bf16=bf16
        )
        self.num_attention_heads = num_attention_heads
        self.head_size = hidden_size // num_attention_heads
        self.attention_mask_func = attention_mask_func
        self.layer_scale = layer_number if apply_query_key_layer_scaling else 1
        self.softmax_in_fp32 = convert_fp16_to_fp32_in_softmax or apply_query_key_layer_scaling
        self.axis = global_context.axis(ParallelMode.SEQUENCE)
        chosen = global_context.sequence_attention
        if chosen is not None and ATTENTIONS[chosen] is not RING:
            get_dist_logger().log_once(
                f"TransformerSelfAttentionRing is ring attention: the job's attention, {chosen!r}, has no "
                "effect on it",
                ranks=[0],
            )
        self.query_key_value = nn.Linear(hidden_size, 3 * hidden_size)
        self.dense = nn.Linear(hidden_size, hidden_size)
        self.attention_dropout = nn.Dropout(attention_dropout)

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attend from each position of this rank to those of all ranks.

        Args:
            hidden_states: This rank's sub-sequence.
            attention_mask: The mask of `attention_mask_func`, for this rank's rows and all columns; None for
                no mask.
        """
        sub_seq, batch, _ = hidden_states.shape
        rows = batch * self.num_attention_heads
        fused = self.query_key_value(hidden_states).view(sub_seq, rows, 3 * self.head_size).transpose(0, 1)
        query, key, value = (part.contiguous() for part in fused.chunk(3, dim=-1))  # (rows, sub_seq, head)
        query = query / (math.sqrt(self.head_size) * self.layer_scale)
        scores = RingQK.apply(query, key, batch, self.num_attention_heads, sub_seq, self.axis)
        weights = self._weights(scores.unflatten(0, (batch, -1)), attention_mask).flatten(0, 1)
        mixed = RingAV.apply(
            weights, value, batch, self.num_attention_heads, self.head_size, sub_seq, self.axis
        )
        attended: torch.Tensor = self.dense(mixed.transpose(0, 1).reshape(sub_seq, batch, -1))
        return attended

    def _weights(self, scores: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Return the probabilities, some of them dropped, of (batch, heads, sub_seq, seq) scores."""
        dtype = scores.dtype
        if self.softmax_in_fp32:
            scores = scores.to(torch.promote_types(dtype, torch.float32)) * self.layer_scale
        if mask is not None:
            scores = self.attention_mask_func(scores, mask)
        weights = scores.softmax(dim=-1).to(dtype)
        # The ranks hold different rows: each draws masks of its own.
        with drawing_apart(only_if_drawn=True) if self.training else nullcontext():
            dropped: torch.Tensor = self.attention_dropout(weights)
        return dropped


def _warn_of_what_has_no_effect(**options: Any) -> None:
    for name, value in options.items():
        if value not in (None, False):
            get_dist_logger().log_once(
                f"TransformerSelfAttentionRing: {name} has no effect: it chose a fused kernel", ranks=[0]
            )
