"""The shape of a GPT decoder as a value."""

from dataclasses import dataclass


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

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "max_position_embeddings",
            "hidden_size",
            "num_layers",
            "num_attention_heads",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: a positive number is needed")
        if self.hidden_size % self.num_attention_heads != 0:
            raise ValueError(
                f"hidden_size={self.hidden_size} does not divide into {self.num_attention_heads} heads: "
                "choose num_attention_heads that divides hidden_size"
            )
        for name in ("embedding_dropout", "dropout", "attention_dropout"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(
                    f"{name}={getattr(self, name)}: a rate from 0 up to, not including, 1 is needed"
                )

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_attention_heads
