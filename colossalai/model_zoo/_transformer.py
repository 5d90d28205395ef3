"""The blocks of a transformer, of which GPT, BERT and ViT are built.

A block knows of its tensor mode through the layers of `colossalai.nn` only. Those that are built one after
another are applied one after another, so the order in a constructor is the order of the forward.
"""

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional

from colossalai.model_zoo._attention import SelfAttention
from colossalai.nn.layer import Dropout, LayerNorm, Linear


@dataclass(frozen=True, kw_only=True)
class BlockShape:
    """The shape of a transformer block.

    Attributes:
        hidden_size: Width of the residual stream.
        num_heads: Heads of the attention.
        inner_size: Width of the feed-forward layer.
        causal: Whether a position attends to itself and the earlier ones only.
        dropout: Rate after the attention and the feed-forward layer.
        attention_dropout: Rate on the attention weights.
        layer_norm_epsilon: Added to the variance in each layer norm.
        gelu: "none" for the exact GELU, "tanh" for its approximation, as torch names them.
    """

    hidden_size: int
    num_heads: int
    inner_size: int
    causal: bool
    dropout: float
    attention_dropout: float
    layer_norm_epsilon: float
    gelu: str = "none"


class FeedForward(nn.Module):
    """The feed-forward layer: linear, GELU, linear.

    Args:
        shape: The shape of the block.
    """

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.gelu = shape.gelu
        self.expansion = Linear(shape.hidden_size, shape.inner_size)
        self.projection = Linear(shape.inner_size, shape.hidden_size)
        self.dropout = Dropout(shape.dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """Transform each position of (batch, seq, hidden) on its own."""
        inner = functional.gelu(self.expansion(hidden), approximate=self.gelu)
        return self.dropout(self.projection(inner))


class PreNormBlock(nn.Module):
    """Attention and feed-forward layer, each fed the norm of the residual stream and added to it.

    Args:
        shape: The shape of the block.
    """

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.attention_norm = _norm(shape)
        self.attention = _attention(shape)
        self.mlp_norm = _norm(shape)
        self.mlp = FeedForward(shape)

    def forward(self, hidden: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Map (batch, seq, hidden) to the same shape.

        Args:
            hidden: This rank's slice of the residual stream.
            attention_mask: (batch, seq), whole; 0 where a position is padding.
        """
        hidden = hidden + self.attention(self.attention_norm(hidden), attention_mask)
        return hidden + self.mlp(self.mlp_norm(hidden))


class PostNormBlock(nn.Module):
    """Attention and feed-forward layer, each followed by the norm of its sum with its input.

    Args:
        shape: The shape of the block.
    """

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.attention = _attention(shape)
        self.attention_norm = _norm(shape)
        self.mlp = FeedForward(shape)
        self.mlp_norm = _norm(shape)

    def forward(self, hidden: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Map (batch, seq, hidden) to the same shape.

        Args:
            hidden: This rank's slice of the residual stream.
            attention_mask: (batch, seq), whole; 0 where a position is padding.
        """
        hidden = self.attention_norm(hidden + self.attention(hidden, attention_mask))
        return self.mlp_norm(hidden + self.mlp(hidden))


def _norm(shape: BlockShape) -> nn.Module:
    return LayerNorm(shape.hidden_size, eps=shape.layer_norm_epsilon)


def _attention(shape: BlockShape) -> SelfAttention:
    return SelfAttention(
        shape.hidden_size,
        shape.num_heads,
        causal=shape.causal,
        dropout=shape.dropout,
        attention_dropout=shape.attention_dropout,
    )
