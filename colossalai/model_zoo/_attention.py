"""Self-attention over whole heads: each rank attends with its heads, for its part of the batch.

Query, key and value come from one linear layer whose output features are ordered (heads, 3, head_size), so
that a slice of them holds whole heads in every tensor mode. The attention between that layer and the next one
does not depend on a tensor mode; if ranks share sequences, it is the attention of the job over them.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from colossalai.communication import slice_of
from colossalai.context import drawing_apart
from colossalai.model_zoo._sequence import sequence_cut
from colossalai.nn.layer import (
    Cut,
    Dropout,
    Linear,
    SharesSequence,
    current_cut,
    launched_job,
    linear_scheme,
)
from colossalai.nn.layer.sequence_parallel import numbered_lanes
from colossalai.tensor import set_built_for


class SelfAttention(SharesSequence):
    """Multi-head self-attention: fused projection to query, key and value, attention, output projection.

    Args:
        hidden_size: Global width of the input and the output.
        num_heads: Global number of heads.
        causal: Whether a position attends to itself and the earlier ones only.
        dropout: Rate after the output projection.
        attention_dropout: Rate on the attention weights.
        bias: Whether the projections add a bias.
        dtype: Type of the parameters; None for torch's default.
        input_cut: Cut of the input and the output. Default: the output cut of the layer built before.

    Shape:
        Input and output (batch, seq, hidden), slices.

    Raises:
        ValueError: The ranks of the tensor mode, or those that share sequences, do not divide the heads.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        causal: bool,
        dropout: float,
        attention_dropout: float,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        input_cut: Cut | None = None,
    ) -> None:
        super().__init__()
        job = launched_job()
        set_built_for(self, sequence=job.layout.sequence)
        input_cut = input_cut or current_cut(job.mode)
        self.cut = cut_of_heads(num_heads, input_cut)
        self.mesh = None if self.cut == Cut() else job.mesh
        self.sequence = sequence_cut(causal=causal)
        if self.sequence.attention is not None:
            num_ranks = self.mesh.axis_size(self.cut.features) if self.mesh else 1
            self.sequence.attention.check_heads(num_heads // num_ranks, self.sequence.axis.size)
        self.head_size = hidden_size // num_heads
        self.causal = causal
        self.attention_dropout = attention_dropout
        self.qkv = Linear(hidden_size, 3 * hidden_size, bias, dtype, input_cut=input_cut)
        self.projection = Linear(hidden_size, hidden_size, bias, dtype, after=self.qkv)
        self.dropout = Dropout(dropout, after=self.projection)

    def forward(self, hidden: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Attend from each position to the others.

        Args:
            hidden: This rank's slice of (batch, seq, hidden).
            attention_mask: (batch, seq), whole; 0 or False where a position is padding. None for no padding.
        """
        fused = self.qkv(hidden).unflatten(-1, (-1, 3, self.head_size))  # (batch, seq, heads, 3, head_size)
        query, key, value = [part.transpose(1, 2) for part in fused.unbind(-2)]
        rate = self.attention_dropout if self.training else 0.0
        padding = None if attention_mask is None else self._padding(attention_mask)
        if self.sequence.attention is not None:
            context = self.sequence.attention.attend(
                query,
                key,
                value,
                axis=self.sequence.axis,
                causal=self.causal,
                key_padding_mask=padding,
                dropout_p=rate,
                order=self.sequence.order,
                lanes=self._lanes(query) if rate > 0.0 else None,
            )
        else:
            visible = None if padding is None else visible_keys(padding, causal=self.causal)
            is_causal = self.causal and visible is None
            with self._random_state() if rate > 0.0 else nullcontext():
                context = functional.scaled_dot_product_attention(
                    query, key, value, attn_mask=visible, dropout_p=rate, is_causal=is_causal
                )
        attended: Tensor = self.dropout(self.projection(context.transpose(1, 2).flatten(2)))
        return attended

    def _padding(self, attention_mask: Tensor) -> Tensor:
        """Return the padding mask of this rank's part of the batch, or of its sequences."""
        return self._slice(self.sequence.own_columns(attention_mask), self.cut.batch, 0) == 0

    def _lanes(self, query: Tensor) -> Tensor:
        """Return the numbers of this rank's samples and heads among all, for their dropout masks."""
        batch, heads = query.shape[:2]
        if self.mesh is not None:
            batch *= self.mesh.axis_size(self.cut.batch)
            heads *= self.mesh.axis_size(self.cut.features)
        lanes = numbered_lanes(batch, heads, device=query.device)
        return self._slice(self._slice(lanes, self.cut.batch, 0), self.cut.features, 1)

    def _slice(self, whole: Tensor, axes: tuple[str, ...], dim: int) -> Tensor:
        """Return this rank's part of a tensor cut over `axes` along a dimension."""
        for name in axes:
            assert self.mesh is not None, "what is cut is cut over ranks"
            whole = slice_of(whole, self.mesh.axis(name), dim)
        return whole

    def _random_state(self) -> AbstractContextManager[Any]:
        """Draw masks that differ where the ranks have different heads or samples."""
        is_cut = bool(self.cut.batch or self.cut.features)
        return drawing_apart() if is_cut else nullcontext()


def visible_keys(key_padding_mask: Tensor, *, causal: bool) -> Tensor:
    """Return which keys each query attends to, (batch, 1, 1 or seq, seq), where a rank holds whole sequences.

    Args:
        key_padding_mask: (batch, seq), True for a key that no query attends to.
        causal: Whether a query attends to its own and earlier positions only.
    """
    visible = ~key_padding_mask[:, None, None, :]
    if not causal:
        return visible
    length = key_padding_mask.shape[-1]
    return visible & torch.ones(length, length, dtype=torch.bool, device=visible.device).tril()


def cut_of_heads(num_heads: int, input_cut: Cut) -> Cut:
    """Return the cut of query, key and value.

    Args:
        num_heads: Global number of heads.
        input_cut: Cut of the input of the attention.

    Raises:
        ValueError: The ranks that cut the features do not divide the heads.
    """
    job = launched_job()
    cut = linear_scheme(job.mode, input_cut).y
    num_ranks = job.mesh.axis_size(cut.features) if cut.features else 1
    if num_heads % num_ranks:
        raise ValueError(
            f"{num_heads} attention heads, which the {num_ranks} ranks along {' x '.join(cut.features)} do "
            f"not divide: choose a number of heads that is a multiple of {num_ranks}, or fewer ranks"
        )
    return cut


def by_head(fused: Tensor, num_heads: int) -> Tensor:
    """Reorder dim 0 of a fused weight or bias from (3, heads, head_size) to (heads, 3, head_size)."""
    reordered: Tensor = fused.unflatten(0, (3, num_heads, -1)).transpose(0, 1).flatten(0, 2)
    return reordered


def by_kind(fused: Tensor, num_heads: int) -> Tensor:
    """Undo `by_head`: reorder dim 0 from (heads, 3, head_size) to (3, heads, head_size)."""
    reordered: Tensor = fused.unflatten(0, (num_heads, 3, -1)).transpose(0, 1).flatten(0, 2)
    return reordered
