"""The shape of a GPT decoder as a value."""

from dataclasses import dataclass

from colossalai.model_zoo._check import check_shape
from colossalai.model_zoo._transformer import BlockShape


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """The shape of a GPT decoder.

    Attributes:
        vocab_size: Number of tokens.
        max_position_embeddings: Longest sequence that the learned positions allow.
        hidden_size: Width of the residual stream; a multiple of `num_attention_heads`.
        num_layers: Number of blocks.
        num_attention_heads: Heads of each attention.
        mlp_ratio: Width of the feed-forward layer over `hidden_size`.
        embedding_dropout: Rate after the embedding.
        dropout: Rate after the attention and the feed-forward layer.
        attention_dropout: Rate on the attention weights. On CPU any rate above 0 leaves the fused attention.
        layer_norm_epsilon: Added to the variance in each layer norm.
        init_std: Standard deviation of the initial weights.
        gelu: "none" for the exact GELU, "tanh" for its approximation (that of the published GPT-2 weights).
        vocab_parallel_limit: In a tensor mode, a vocabulary above this is cut over the ranks, which then have
            to divide it; None for the limit of the layers.
    """

    vocab_size: int = 50257
    max_position_embeddings: int = 1024
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
        sizes = ("vocab_size", "max_position_embeddings", "hidden_size", "num_layers", "num_attention_heads")
        check_shape(self, sizes=sizes, rates=("embedding_dropout", "dropout", "attention_dropout"))

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
            causal=True,
            dropout=self.dropout,
            attention_dropout=self.attention_dropout,
            layer_norm_epsilon=self.layer_norm_epsilon,
            gelu=self.gelu,
        )
