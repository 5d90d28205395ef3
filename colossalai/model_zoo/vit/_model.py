"""A vision transformer (Dosovitskiy et al. 2021, 2010.11929): patches as tokens, classified by an added one.

    x = [class token, patches] + positions;  x += attention(norm(x));  x += mlp(norm(x));  head(norm(x)[0])

The blocks are in one `nn.ModuleList`, so that recomputation, sharding and pipelining can take them one by
one.
"""

from torch import Tensor, nn

from colossalai.model_zoo._transformer import PreNormBlock
from colossalai.model_zoo._weights import draw_parameters
from colossalai.model_zoo.vit._config import ViTConfig
from colossalai.model_zoo.vit._parts import ViTEmbedding, ViTHead
from colossalai.nn.layer import LayerNorm


class ViT(nn.Module):
    """A vision transformer.

    It follows the tensor mode of the current context: images are passed whole, logits are cut along the
    batch, depending on the mode, and `colossalai.nn.CrossEntropyLoss` accepts them in this form.

    Args:
        config: The shape of the model.

    Raises:
        ValueError: The ranks of the tensor mode do not divide a size, which the message names, or ranks
            share sequences.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = ViTEmbedding(
            config.image_size,
            config.patch_size,
            config.num_channels,
            config.hidden_size,
            dropout=config.embedding_dropout,
        )
        stream = self.embedding.output_cut
        self.blocks = nn.ModuleList(
            PreNormBlock(config.block, input_cut=stream) for _ in range(config.num_layers)
        )
        self.norm = LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon, input_cut=stream)
        self.head = ViTHead(
            config.hidden_size,
            config.num_classes,
            vocab_parallel_limit=config.vocab_parallel_limit,
            input_cut=stream,
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights: normal with `init_std`, cut off at 2 of them; biases 0."""
        draw_parameters(self, self._draw)

    def _draw(self, name: str, whole: Tensor) -> None:
        std = self.config.init_std
        nn.init.trunc_normal_(whole, std=std, a=-2 * std, b=2 * std)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (batch, channels, height, width), whole, to this rank's slice of (batch, classes)."""
        hidden = self.embedding(images)
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        return logits
