"""The blocks of a transformer, of which GPT, BERT and ViT are built.

A block depends on its tensor mode only through the layers of `colossalai.nn`, and passes each its input cut:
the norms and the first of two linear layers get the input cut of the block, the second one the output cut of
the first.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from colossalai.model_zoo._attention import SelfAttention
from colossalai.nn.layer import Cut, Dropout, DropPath, LayerNorm, Linear, current_cut, launched_job


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
        activation: Between the two linear layers of the feed-forward layer.
        bias: Whether the linear layers add a bias.
        dtype: Type of the parameters; None for torch's default.
        drop_path: Probability that a sample does without the attention, and without the feed-forward layer.
    """

    hidden_size: int
    num_heads: int
    inner_size: int
    causal: bool
    dropout: float
    attention_dropout: float
    layer_norm_epsilon: float
    activation: Callable[[Tensor], Tensor] = functional.gelu
    bias: bool = True
    dtype: torch.dtype | None = None
    drop_path: float = 0.0

    def __post_init__(self) -> None:
        check_heads(self.hidden_size, self.num_heads)
        for name in ("dropout", "attention_dropout", "drop_path"):
            check_rate(name, getattr(self, name))


class FeedForward(nn.Module):
    """The feed-forward layer: linear, activation, linear.

    Args:
        shape: The shape of the block.
        input_cut: Cut of the input and the output.
    """

    def __init__(self, shape: BlockShape, *, input_cut: Cut) -> None:
        super().__init__()
        hidden, inner = shape.hidden_size, shape.inner_size
        self.activation = shape.activation
        self.expansion = Linear(hidden, inner, shape.bias, shape.dtype, input_cut=input_cut)
        self.projection = Linear(inner, hidden, shape.bias, shape.dtype, after=self.expansion)
        self.dropout = Dropout(shape.dropout, after=self.projection)

    def forward(self, hidden: Tensor) -> Tensor:
        """Transform each position of (batch, seq, hidden) on its own."""
        transformed: Tensor = self.dropout(self.projection(self.activation(self.expansion(hidden))))
        return transformed


class Block(nn.Module):
    """A block of either kind; abstract.

    Args:
        input_cut: Cut of the residual stream. Default: the output cut of the layer built before.
    """

    def __init__(self, *, input_cut: Cut | None) -> None:
        super().__init__()
        self.input_cut = input_cut or current_cut(launched_job().mode)

    @property
    def output_cut(self) -> Cut:
        """Cut of the output."""
        return self.input_cut


class PreNormBlock(Block):
    """Attention and feed-forward layer, each fed the norm of the residual stream and added to it.

    Args:
        shape: The shape of the block.
        input_cut: Cut of the residual stream. Default: the output cut of the layer built before.
    """

    def __init__(self, shape: BlockShape, *, input_cut: Cut | None = None) -> None:
        super().__init__(input_cut=input_cut)
        self.attention_norm = _norm(shape, self.input_cut)
        self.attention = _attention(shape, self.input_cut)
        self.mlp_norm = _norm(shape, self.input_cut)
        self.mlp = FeedForward(shape, input_cut=self.input_cut)
        self.drop_path: nn.Module = nn.Identity()
        if shape.drop_path > 0.0:
            self.drop_path = DropPath(shape.drop_path, cut=self.input_cut)

    def forward(self, hidden: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Map (batch, seq, hidden) to the same shape.

        Args:
            hidden: This rank's slice of the residual stream.
            attention_mask: (batch, seq), whole; 0 where a position is padding.
        """
        hidden = hidden + self.drop_path(self.attention(self.attention_norm(hidden), attention_mask))
        output: Tensor = hidden + self.drop_path(self.mlp(self.mlp_norm(hidden)))
        return output


class PostNormBlock(Block):
    """Attention and feed-forward layer, each followed by the norm of its sum with its input.

    Args:
        shape: The shape of the block.
        input_cut: Cut of the residual stream. Default: the output cut of the layer built before.
    """

    def __init__(self, shape: BlockShape, *, input_cut: Cut | None = None) -> None:
        super().__init__(input_cut=input_cut)
        self.attention = _attention(shape, self.input_cut)
        self.attention_norm = _norm(shape, self.input_cut)
        self.mlp = FeedForward(shape, input_cut=self.input_cut)
        self.mlp_norm = _norm(shape, self.input_cut)

    def forward(self, hidden: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Map (batch, seq, hidden) to the same shape.

        Args:
            hidden: This rank's slice of the residual stream.
            attention_mask: (batch, seq), whole; 0 where a position is padding.
        """
        hidden = self.attention_norm(hidden + self.attention(hidden, attention_mask))
        output: Tensor = self.mlp_norm(hidden + self.mlp(hidden))
        return output


def _norm(shape: BlockShape, input_cut: Cut) -> nn.Module:
    eps, dtype = shape.layer_norm_epsilon, shape.dtype
    return LayerNorm(shape.hidden_size, eps=eps, dtype=dtype, input_cut=input_cut)


def _attention(shape: BlockShape, input_cut: Cut) -> SelfAttention:
    return SelfAttention(
        shape.hidden_size,
        shape.num_heads,
        causal=shape.causal,
        dropout=shape.dropout,
        attention_dropout=shape.attention_dropout,
        bias=shape.bias,
        dtype=shape.dtype,
        input_cut=input_cut,
    )


def check_heads(hidden_size: int, num_heads: int) -> None:
    """Require that the heads of an attention have one size.

    Raises:
        ValueError: `num_heads` is below 1, or does not divide `hidden_size`.
    """
    if num_heads < 1 or hidden_size % num_heads:
        raise ValueError(
            f"hidden_size={hidden_size} does not divide into {num_heads} heads: choose "
            "num_attention_heads that divides hidden_size"
        )


def check_rate(name: str, rate: float) -> None:
    """Require that a rate is from 0 to below 1.

    Raises:
        ValueError: `rate` is not in [0, 1).
    """
    if not 0.0 <= rate < 1.0:
        raise ValueError(f"{name}={rate}: a rate from 0 up to, not including, 1 is needed")
