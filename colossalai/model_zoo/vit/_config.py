"""The shape of a vision transformer as a value."""

from dataclasses import dataclass

from colossalai.model_zoo._config import TransformerConfig


@dataclass(frozen=True, kw_only=True)
class ViTConfig(TransformerConfig):
    """The shape of a vision transformer that classifies images; see `TransformerConfig`.

    Attributes:
        image_size: Height and width of an image, a multiple of `patch_size`.
        patch_size: Height and width of a patch.
        num_channels: Channels of an image.
        num_classes: Number of classes.
    """

    image_size: int = 224
    patch_size: int = 16
    num_channels: int = 3
    num_classes: int = 1000
    embedding_dropout: float = 0.0
    dropout: float = 0.0
    attention_dropout: float = 0.0
    layer_norm_epsilon: float = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.image_size % self.patch_size:
            raise ValueError(
                f"patch_size={self.patch_size} does not divide image_size={self.image_size}: "
                "choose patches that tile the image"
            )
