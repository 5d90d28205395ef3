"""The shape of a transformer as a value: the common fields of GPT, BERT and ViT."""

from dataclasses import dataclass, fields
from functools import partial
from typing import ClassVar

from torch.nn import functional

from colossalai.model_zoo._transformer import BlockShape, check_heads, check_rate


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """The shape of a transformer; abstract: a model adds the fields of its embedding and its head.

    Attributes:
        causal: Whether a position attends to itself and the earlier ones only.
        hidden_size: Width of the residual stream; a multiple of `num_attention_heads`.
        num_layers: Number of blocks.
        num_attention_heads: Heads of each attention.
        mlp_ratio: Width of the feed-forward layer over `hidden_size`.
        embedding_dropout: Rate after the embedding.
        dropout: Rate after the attention and the feed-forward layer.
        attention_dropout: Rate on the attention weights. On CPU any rate above 0 leaves the fused attention.
        layer_norm_epsilon: Added to the variance in each layer norm.
        init_std: Standard deviation of the initial weights.
        gelu: "none" for the exact GELU, "tanh" for its approximation.
        vocab_parallel_limit: In a tensor mode, more tokens or classes than this are cut over the ranks; None
            for the limit of the layers.
    """

    causal: ClassVar[bool] = False

    hidden_size: int = 768
    num_layers: int = 12
    num_attention_heads: int = 12
    mlp_ratio: float = 4.0
    embedding_dropout: float = 0.1
    dropout: float = 0.1
    attention_dropout: float = 0.1
    layer_norm_epsilon: float = 1e-5
    init_std: float = 0.02
    gelu: str = "none"
    vocab_parallel_limit: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            if name.endswith("dropout"):
                check_rate(name, value)
            elif field.type is int and value < 1:
                raise ValueError(f"{name}={value}: a positive number is needed")
        check_heads(self.hidden_size, self.num_attention_heads)

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def block(self) -> BlockShape:
        """The shape of each block."""
        return BlockShape(
            hidden_size=self.hidden_size,
            num_heads=self.num_attention_heads,
            inner_size=round(self.mlp_ratio * self.hidden_size),
            causal=self.causal,
            dropout=self.dropout,
            attention_dropout=self.attention_dropout,
            layer_norm_epsilon=self.layer_norm_epsilon,
            activation=partial(functional.gelu, approximate=self.gelu),
        )
