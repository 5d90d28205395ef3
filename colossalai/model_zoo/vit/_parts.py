"""The parts of a ViT under their documented names and with their documented arguments.

A stage of a pipeline that is written by hand is built of them. Their parameters start as those of torch's
layers do, while `ViT` draws its weights as its paper does.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from colossalai.model_zoo._head import output_layer
from colossalai.model_zoo._transformer import BlockShape, PreNormBlock
from colossalai.nn.layer import (
    Cut,
    Dropout,
    Linear,
    PatchEmbedding,
    current_cut,
    first_cut,
    launched_job,
    linear_scheme,
)
from colossalai.runtime import checkpoint as recomputed


class ViTEmbedding(nn.Module):
    """Embedded patches after a class token, plus learned positions.

    Args:
        img_size: Height and width of an image.
        patch_size: Height and width of a patch.
        in_chans: Channels of an image.
        embedding_dim: Width of the residual stream.
        dropout: Rate after the sum.
        dtype: Type of the parameters; None for torch's default.
        init_method: Initialization of the parameters: "torch", as torch's convolution, is the only choice.

    Raises:
        ValueError: The patches do not tile the image, or ranks share sequences.
    """

    def __init__(
        self,
        img_size: int,
        patch_size: int,
        in_chans: int,
        embedding_dim: int,
        *,
        dropout: float = 0.0,
        dtype: torch.dtype | None = None,
        init_method: str = "torch",
    ) -> None:
        super().__init__()
        if launched_job().layout.attention is not None:
            raise ValueError(
                "a ViT has no mode 'sequence': it classifies one token out of few, so one rank would have "
                "the loss; leave sequence parallelism out and choose mode '1d', '2d', '2.5d' or '3d'"
            )
        _check_init_method(init_method)
        self.patches = PatchEmbedding(img_size, patch_size, in_chans, embedding_dim, dtype)
        self.output_cut = first_cut(launched_job().mode)
        self.dropout = Dropout(dropout, input_cut=self.output_cut)

    def forward(self, images: Tensor) -> Tensor:
        """Embed whole images (batch, channels, height, width) to a slice of (batch, 1 + patches, hidden)."""
        hidden: Tensor = self.dropout(self.patches(images))
        return hidden


class ViTBlock(PreNormBlock):
    """One pre-norm encoder block: attention and feed-forward layer, each added to the residual stream.

    Args:
        dim: Width of the residual stream.
        num_heads: Heads of the attention.
        mlp_ratio: Width of the feed-forward layer over `dim`.
        activation: Between the two linear layers of the feed-forward layer.
        attention_dropout: Rate on the attention weights.
        dropout: Rate after the attention and the feed-forward layer.
        drop_path: Probability that a sample does without the attention, and without the feed-forward layer.
        layernorm_epsilon: Added to the variance in each layer norm.
        dtype: Type of the parameters; None for torch's default.
        bias: Whether the linear layers add a bias.
        checkpoint: Whether the backward computes the activations again instead of keeping them.
        init_method: Initialization of the parameters: "torch" is the only choice.
        input_cut: Cut of the residual stream. Default: the output cut of the layer built before.
    """

    def __init__(  # noqa: PLR0913 - one argument for each documented choice
        self,
        dim: int,
        num_heads: int,
        *,
        mlp_ratio: float = 4.0,
        activation: Callable[[Tensor], Tensor] = functional.gelu,
        attention_dropout: float = 0.0,
        dropout: float = 0.0,
        drop_path: float = 0.0,
        layernorm_epsilon: float = 1e-6,
        dtype: torch.dtype | None = None,
        bias: bool = True,
        checkpoint: bool = False,
        init_method: str = "torch",
        input_cut: Cut | None = None,
    ) -> None:
        _check_init_method(init_method)
        shape = BlockShape(
            hidden_size=dim,
            num_heads=num_heads,
            inner_size=round(mlp_ratio * dim),
            causal=False,
            dropout=dropout,
            attention_dropout=attention_dropout,
            layer_norm_epsilon=layernorm_epsilon,
            activation=activation,
            bias=bias,
            dtype=dtype,
            drop_path=drop_path,
        )
        super().__init__(shape, input_cut=input_cut)
        self.checkpoint = checkpoint

    def forward(self, hidden: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Map (batch, seq, hidden) to the same shape; see the base class."""
        run = super().forward
        result: Tensor = (
            recomputed(run, False, hidden, attention_mask) if self.checkpoint else run(hidden, attention_mask)
        )
        return result


class ViTHead(nn.Module):
    """The classifier of the class token.

    Args:
        dim: Width of the residual stream.
        num_classes: Number of classes.
        representation_size: Width of a hidden layer with tanh before the classifier; None for none.
        dtype: Type of the parameters; None for torch's default.
        bias: Whether the linear layers add a bias.
        init_method: Initialization of the parameters: "torch" is the only choice.
        vocab_parallel_limit: More classes than this are cut over the ranks; None for the limit of the layers.
        input_cut: Cut of the input. Default: the output cut of the layer built before.
    """

    def __init__(
        self,
        dim: int,
        num_classes: int,
        *,
        representation_size: int | None = None,
        dtype: torch.dtype | None = None,
        bias: bool = True,
        init_method: str = "torch",
        vocab_parallel_limit: int | None = None,
        input_cut: Cut | None = None,
    ) -> None:
        super().__init__()
        _check_init_method(init_method)
        mode = launched_job().mode
        cut = input_cut or current_cut(mode)
        self.representation: nn.Module | None = None
        if representation_size is not None:
            self.representation = Linear(dim, representation_size, bias, dtype=dtype, input_cut=cut)
            cut = linear_scheme(mode, cut).y
        options: dict[str, Any] = {"dtype": dtype, "vocab_parallel_limit": vocab_parallel_limit}
        options["input_cut"] = cut
        self.classifier = output_layer(representation_size or dim, num_classes, bias=bias, **options)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map a slice of (batch, 1 + patches, hidden) to one of (batch, classes)."""
        token = hidden[:, 0]
        if self.representation is not None:
            token = self.representation(token).tanh()
        logits: Tensor = self.classifier(token)
        return logits


def _check_init_method(name: str) -> None:
    if name != "torch":
        raise ValueError(f"init_method={name!r}; it must be 'torch', or draw the parameters yourself")
