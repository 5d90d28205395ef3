"""The parts of a GPT under their documented names and with their documented arguments.

A stage of a pipeline that is written by hand is built of them. Their parameters start as those of torch's
layers do, while `GPT` draws its weights as its paper does.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from colossalai.model_zoo._embedding import TokensAndPositions
from colossalai.model_zoo._head import output_layer
from colossalai.model_zoo._transformer import BlockShape, PreNormBlock
from colossalai.nn.layer import Cut, Dropout
from colossalai.runtime import checkpoint as recomputed


class GPTEmbedding(TokensAndPositions):
    """Token embedding plus learned position embedding.

    Args:
        hidden_size: Width of the residual stream.
        vocab_size: Number of tokens.
        max_position_embeddings: Longest sequence.
        dropout: Rate after the sum.
        dtype: Type of the parameters; None for torch's default.
        vocab_parallel_limit: A vocabulary above this is cut over the ranks; None for the limit of the layers.
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        max_position_embeddings: int,
        *,
        dropout: float = 0.0,
        dtype: torch.dtype | None = None,
        vocab_parallel_limit: int | None = None,
    ) -> None:
        super().__init__(
            hidden_size,
            vocab_size,
            max_position_embeddings,
            causal=True,
            dtype=dtype,
            vocab_parallel_limit=vocab_parallel_limit,
        )
        self.dropout = Dropout(dropout, input_cut=self.output_cut)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Embed `input_ids` of shape (batch, seq), whole, to this rank's slice of (batch, seq, hidden).

        Raises:
            ValueError: The sequence is longer than the model has positions, or cannot be cut.
        """
        tokens, positions = self.embed(input_ids)
        hidden: Tensor = self.dropout(tokens + positions)
        return hidden


class GPTBlock(PreNormBlock):
    """One pre-norm decoder block that passes the mask on: causal attention and feed-forward layer.

    Args:
        hidden_size: Width of the residual stream.
        num_attention_heads: Heads of the attention.
        mlp_ratio: Width of the feed-forward layer over `hidden_size`.
        activation: Between the two linear layers of the feed-forward layer.
        attention_dropout: Rate on the attention weights.
        dropout: Rate after the attention and the feed-forward layer.
        layernorm_epsilon: Added to the variance in each layer norm.
        dtype: Type of the parameters; None for torch's default.
        bias: Whether the linear layers add a bias.
        checkpoint: Whether the backward computes the activations again instead of keeping them.
        input_cut: Cut of the residual stream. Default: the output cut of the layer built before.
    """

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        *,
        mlp_ratio: float = 4.0,
        activation: Callable[[Tensor], Tensor] = functional.gelu,
        attention_dropout: float = 0.0,
        dropout: float = 0.0,
        layernorm_epsilon: float = 1e-5,
        dtype: torch.dtype | None = None,
        bias: bool = True,
        checkpoint: bool = False,
        input_cut: Cut | None = None,
    ) -> None:
        shape = BlockShape(
            hidden_size=hidden_size,
            num_heads=num_attention_heads,
            inner_size=round(mlp_ratio * hidden_size),
            causal=True,
            dropout=dropout,
            attention_dropout=attention_dropout,
            layer_norm_epsilon=layernorm_epsilon,
            activation=activation,
            bias=bias,
            dtype=dtype,
        )
        super().__init__(shape, input_cut=input_cut)
        self.checkpoint = checkpoint

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, attention_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Map (batch, seq, hidden) to the same shape; return it with the mask, for the next block.

        Args:
            hidden_states: This rank's slice of the residual stream.
            attention_mask: (batch, seq), whole, 0 where a position is padding; or (batch, 1, 1, seq), to be
                added to the scores: 0 where a position is visible, a large negative number where it is not.

        Raises:
            ValueError: The mask has another shape.
        """
        run = super().forward
        visible = _visible(attention_mask)
        if self.checkpoint:
            return recomputed(run, False, hidden_states, visible), attention_mask
        return run(hidden_states, visible), attention_mask


def GPTLMHead(
    dim: int,
    vocab_size: int,
    *,
    dtype: torch.dtype | None = None,
    bias: bool = False,
    vocab_parallel_limit: int | None = None,
    input_cut: Cut | None = None,
) -> nn.Module:
    """Return the layer from the last norm to logits, with its own weight, which `GPT` ties.

    Args:
        dim: Width of the residual stream.
        vocab_size: Number of tokens.
        dtype: Type of the parameters; None for torch's default.
        bias: Whether to add a bias.
        vocab_parallel_limit: A vocabulary above this is cut over the ranks; None for the limit of the layers.
        input_cut: Cut of the input. Default: the output cut of the layer built before.
    """
    return output_layer(
        dim,
        vocab_size,
        bias=bias,
        dtype=dtype,
        vocab_parallel_limit=vocab_parallel_limit,
        input_cut=input_cut,
    )


def _visible(mask: Tensor | None) -> Tensor | None:
    """Return a mask as (batch, seq), 0 where a position is padding."""
    if mask is None or mask.dim() == 2:
        return mask
    if mask.dim() != 4 or mask.shape[1:3] != (1, 1):
        raise ValueError(
            f"an attention mask of shape {tuple(mask.shape)}; it must be (batch, seq) with 0 for padding, or "
            "(batch, 1, 1, seq) with values to add to the scores"
        )
    return mask[:, 0, 0] == 0
