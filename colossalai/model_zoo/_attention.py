"""Self-attention over whole heads: each rank attends with its heads, for its part of the batch.

Query, key and value come from one linear layer whose output features are ordered (heads, 3, head_size), so
that a slice of them holds whole heads in every tensor mode. What happens between that layer and the next one
is an attention core: it alone depends on the tensor mode.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from colossalai.communication import slice_of
from colossalai.context import ParallelMode, get_seeds, global_context, seed
from colossalai.model_zoo._sequence import SEQUENCE, sequence_cut
from colossalai.nn.layer import Cut, Dropout, Linear, SharesSequence, current_cut, linear_scheme
from colossalai.nn.layer.sequence_parallel import ring_attention


class AttentionCore(Protocol):
    """Attention of the heads and samples of one rank."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        causal: bool,
        key_padding_mask: Tensor | None,
        dropout_p: float,
    ) -> Tensor:
        """Return the context of (batch, heads, seq, head_size) queries, of the same shape.

        Args:
            query: The queries.
            key: The keys.
            value: The values.
            causal: Whether a query attends to its own and earlier positions only.
            key_padding_mask: (batch, seq), True for a key that nobody attends to; None for no padding.
            dropout_p: Probability that a weight is dropped.
        """


class SelfAttention(SharesSequence):
    """Multi-head self-attention: fused projection to query, key and value, core, output projection.

    Args:
        hidden_size: Global width of the input and the output.
        num_heads: Global number of heads.
        causal: Whether a position attends to itself and the earlier ones only.
        dropout: Rate after the output projection.
        attention_dropout: Rate on the attention weights.
        bias: Whether the projections add a bias.
        dtype: Type of the parameters; None for torch's default.
        input_cut: How the input is cut, and the output; default: as the layer built before leaves it.

    Shape:
        Input and output (batch, seq, hidden), slices.

    Raises:
        ValueError: The ranks do not divide the heads, or the tensor mode has no attention.
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
        input_cut = input_cut or current_cut(global_context.tensor_mode)
        self.cut = cut_of_heads(num_heads, input_cut)
        self.sequence = sequence_cut(causal=causal)
        self.core = attention_core(global_context.tensor_mode)
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
        query, key, value = (part.transpose(1, 2) for part in fused.unbind(-2))
        rate = self.attention_dropout if self.training else 0.0
        with self._random_state() if rate > 0.0 else nullcontext():
            context = self.core(
                query,
                key,
                value,
                causal=self.causal,
                key_padding_mask=self._padding(attention_mask),
                dropout_p=rate,
            )
        return self.dropout(self.projection(context.transpose(1, 2).flatten(2)))

    def _padding(self, attention_mask: Tensor | None) -> Tensor | None:
        """Return where this rank's part of the batch, or of its sequences, is padding."""
        if attention_mask is None:
            return None
        attention_mask = self.sequence.own_columns(attention_mask)
        for name in self.cut.batch:
            attention_mask = slice_of(attention_mask, global_context.mesh.axis(name), 0)
        return attention_mask == 0

    def _random_state(self) -> AbstractContextManager[Any]:
        """Draw masks that differ where the ranks have different heads or samples."""
        is_cut = bool(self.cut.batch or self.cut.features)
        return seed(ParallelMode.TENSOR) if is_cut and ParallelMode.TENSOR in get_seeds() else nullcontext()


def scaled_dot_product(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool,
    key_padding_mask: Tensor | None,
    dropout_p: float,
) -> Tensor:
    """Attend within this rank, where it holds whole sequences: the core of all modes that cut none."""
    visible = None
    if key_padding_mask is not None:
        visible = ~key_padding_mask[:, None, None, :]
        if causal:
            length = query.shape[-2]
            visible = visible & torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
    return functional.scaled_dot_product_attention(
        query, key, value, attn_mask=visible, dropout_p=dropout_p, is_causal=causal and visible is None
    )


def ring(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool,
    key_padding_mask: Tensor | None,
    dropout_p: float,
) -> Tensor:
    """Attend to the keys of all ranks that share the sequences: the core of mode "sequence"."""
    sequence = sequence_cut(causal=causal)
    return ring_attention(
        query,
        key,
        value,
        axis=sequence.axis,
        causal=causal,
        key_padding_mask=key_padding_mask,
        dropout_p=dropout_p,
        order=sequence.order,
    )


_CORES: Mapping[str | None, AttentionCore] = {
    **dict.fromkeys((None, "1d", "2d", "2.5d", "3d"), scaled_dot_product),
    SEQUENCE: ring,
}


def attention_core(mode: str | None) -> AttentionCore:
    """Return the attention core of a tensor mode.

    Raises:
        ValueError: It has none.
    """
    if mode not in _CORES:
        raise ValueError(f"these models have no attention of mode {mode!r}; they have {[*_CORES]}")
    return _CORES[mode]


def cut_of_heads(num_heads: int, input_cut: Cut) -> Cut:
    """Return how query, key and value are cut.

    Args:
        num_heads: Global number of heads.
        input_cut: How the input of the attention is cut.

    Raises:
        ValueError: The ranks that cut the features do not divide the heads.
    """
    cut = linear_scheme(global_context.tensor_mode, input_cut).y
    num_ranks = global_context.mesh.axis_size(cut.features) if cut.features else 1
    if num_heads % num_ranks:
        raise ValueError(
            f"{num_heads} attention heads, which the {num_ranks} ranks along {' x '.join(cut.features)} do "
            f"not divide: choose a number of heads that is a multiple of {num_ranks}, or fewer ranks"
        )
    return cut


def by_head(fused: Tensor, num_heads: int) -> Tensor:
    """Reorder dim 0 of a fused weight or bias from (3, heads, head_size) to (heads, 3, head_size)."""
    return fused.unflatten(0, (3, num_heads, -1)).transpose(0, 1).flatten(0, 2)


def by_kind(fused: Tensor, num_heads: int) -> Tensor:
    """Undo `by_head`: reorder dim 0 from (heads, 3, head_size) to (3, heads, head_size)."""
    return fused.unflatten(0, (num_heads, 3, -1)).transpose(0, 1).flatten(0, 2)
