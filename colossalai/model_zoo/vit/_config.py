"""The shape of a vision transformer as a value."""

from dataclasses import dataclass

from colossalai.model_zoo._check import check_shape
from colossalai.model_zoo._transformer import BlockShape


@dataclass(frozen=True, kw_only=True)
class ViTConfig:
    """The shape of a vision transformer that classifies images.

    Attributes:
        image_size: Height and width of an image, a multiple of `patch_size`.
        patch_size: Height and width of a patch.
        num_channels: Channels of an image.
        num_classes: Number of classes.
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
        vocab_parallel_limit: In a tensor mode, more classes than this are cut over the ranks, which then have
            to divide them; None for the limit of the layers.
    """

    image_size: int = 224
    patch_size: int = 16
    num_channels: int = 3
    num_classes: int = 1000
    hidden_size: int = 768
    num_layers: int = 12
    num_attention_heads: int = 12
    mlp_ratio: float = 4.0
    embedding_dropout: float = 0.0
    dropout: float = 0.0
    attention_dropout: float = 0.0
    layer_norm_epsilon: float = 1e-6
    init_std: float = 0.02
    gelu: str = "none"
    vocab_parallel_limit: int | None = None

    def __post_init__(self) -> None:
        sizes = ("image_size", "patch_size", "num_channels", "num_classes", "hidden_size", "num_layers")
        rates = ("embedding_dropout", "dropout", "attention_dropout")
        check_shape(self, sizes=(*sizes, "num_attention_heads"), rates=rates)
        if self.image_size % self.patch_size:
            raise ValueError(
                f"patch_size={self.patch_size} does not divide image_size={self.image_size}: "
                "choose patches that tile the image"
            )

    @property
    def block(self) -> BlockShape:
        """The shape of each block."""
        return BlockShape(
            hidden_size=self.hidden_size,
            num_heads=self.num_attention_heads,
            inner_size=round(self.mlp_ratio * self.hidden_size),
            causal=False,
            dropout=self.dropout,
            attention_dropout=self.attention_dropout,
            layer_norm_epsilon=self.layer_norm_epsilon,
            gelu=self.gelu,
        )
