"""WideNet (2107.11817): wider by experts, and no deeper in parameters, as all layers share them.

    x = x + attention(norm_1(x));  x = x + experts(norm_2(x))

Attention, router and experts are one for all layers; two norms and the gate, which is small, are each layer's
own. Layers are of torch: tensor parallelism (mode 1d) shares the experts, and computes the rest on all ranks.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from colossalai.nn.layer import DropPath, VanillaPatchEmbedding
from colossalai.nn.layer.moe import Experts, MoeLayer, NormalNoiseGenerator, Top2Router

Activation = Callable[[Tensor], Tensor]


class VanillaFFN(nn.Module):
    """A feed-forward expert: linear, activation, dropout, linear, dropout.

    Args:
        d_model: The width of tokens.
        d_ff: The inner width.
        activation: Between the linear layers; None for GELU.
        drop_rate: Of both dropouts.
        bias: Whether the linear layers add a bias.
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        activation: Activation | None = None,
        drop_rate: float = 0,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.expansion = nn.Linear(d_model, d_ff, bias)
        self.activation = functional.gelu if activation is None else activation
        self.projection = nn.Linear(d_ff, d_model, bias)
        self.dropout = nn.Dropout(drop_rate)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., d_model) to the same shape."""
        inner = self.dropout(self.activation(self.expansion(x)))
        result: Tensor = self.dropout(self.projection(inner))
        return result


class VanillaSelfAttention(nn.Module):
    """Multi-head self-attention whose heads have a size of their own.

    Args:
        d_model: The width of tokens.
        n_heads: The number of heads.
        d_kv: The size of a head.
        attention_drop: Rate on the attention weights.
        drop_rate: Rate after the output projection.
        bias: Whether the linear layers add a bias.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        d_kv: int,
        attention_drop: float = 0,
        drop_rate: float = 0,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.attention_drop = attention_drop
        self.qkv = nn.Linear(d_model, 3 * n_heads * d_kv, bias)
        self.projection = nn.Linear(n_heads * d_kv, d_model, bias)
        self.dropout = nn.Dropout(drop_rate)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, seq, d_model) to the same shape."""
        fused = self.qkv(x).unflatten(-1, (3, self.n_heads, -1))  # (batch, seq, 3, heads, d_kv)
        query, key, value = fused.transpose(1, 3).unbind(2)  # (batch, heads, seq, d_kv)
        rate = self.attention_drop if self.training else 0.0
        context = functional.scaled_dot_product_attention(query, key, value, dropout_p=rate)
        result: Tensor = self.dropout(self.projection(context.transpose(1, 2).flatten(2)))
        return result


def moe_sa_args(
    d_model: int,
    n_heads: int,
    d_kv: int,
    attention_drop: float = 0,
    drop_rate: float = 0,
    bias: bool = True,
) -> dict[str, Any]:
    """Return the arguments of `VanillaSelfAttention` by name; they are its own."""
    return {
        "d_model": d_model,
        "n_heads": n_heads,
        "d_kv": d_kv,
        "attention_drop": attention_drop,
        "drop_rate": drop_rate,
        "bias": bias,
    }


def moe_mlp_args(d_model: int, d_ff: int, drop_rate: float, bias: bool = True) -> dict[str, Any]:
    """Return the arguments of `VanillaFFN` by name; they are its own."""
    return {"d_model": d_model, "d_ff": d_ff, "drop_rate": drop_rate, "bias": bias}


class WidenetBlock(nn.Module):
    """A layer: two norms of its own around the shared attention and experts.

    Args:
        d_model: The width of tokens.
        attention: Shared.
        ffn: The layer of experts.
        drop_path: Probability that a sample does without the attention, and without the experts.
    """

    def __init__(self, d_model: int, attention: nn.Module, ffn: nn.Module, drop_path: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(d_model, eps=1e-6)
        self.attention = attention
        self.norm2 = nn.LayerNorm(d_model, eps=1e-6)
        self.ffn = ffn
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, seq, d_model) to the same shape."""
        x = x + self.drop_path(self.attention(self.norm1(x)))
        result: Tensor = x + self.drop_path(self.ffn(self.norm2(x)))
        return result


class Widenet(nn.Module):
    """A vision transformer with two experts for each token and layer, shared by all layers.

    Args:
        num_experts: The number of experts.
        capacity_factor: Number of choices that an expert serves in training; see `Top2Router`.
        img_size: Height and width of an image.
        patch_size: Height and width of a patch.
        in_chans: Channels of an image.
        num_classes: The number of classes.
        depth: The number of layers.
        d_model: The width of tokens.
        num_heads: Heads of the attention.
        d_kv: The size of a head.
        d_ff: The inner width of an expert.
        attention_drop: Rate on the attention weights.
        drop_rate: Rate after the embedding, the attention, and in the experts.
        drop_path: Probability that a sample does without a branch of the last layer; less in those before.

    Raises:
        ValueError: The patches do not tile the image, or the ranks do not divide `num_experts`.
    """

    def __init__(  # noqa: PLR0913 - the documented arguments
        self,
        num_experts: int,
        capacity_factor: float,
        img_size: int = 224,
        patch_size: int = 16,
        in_chans: int = 3,
        num_classes: int = 1000,
        depth: int = 12,
        d_model: int = 768,
        num_heads: int = 12,
        d_kv: int = 64,
        d_ff: int = 4096,
        attention_drop: float = 0.0,
        drop_rate: float = 0.1,
        drop_path: float = 0.0,
    ) -> None:
        super().__init__()
        self.embedding = VanillaPatchEmbedding(img_size, patch_size, in_chans, d_model)
        self.dropout = nn.Dropout(drop_rate)
        attention = VanillaSelfAttention(
            **moe_sa_args(d_model, num_heads, d_kv, attention_drop=attention_drop, drop_rate=drop_rate)
        )
        router = Top2Router(capacity_factor, noisy_func=NormalNoiseGenerator(num_experts))
        experts = Experts(VanillaFFN, num_experts, **moe_mlp_args(d_model, d_ff, drop_rate))
        rates = torch.linspace(0, drop_path, depth, device="cpu").tolist()
        self.blocks = nn.ModuleList(
            WidenetBlock(d_model, attention, MoeLayer(d_model, num_experts, router, experts), rate)
            for rate in rates
        )
        self.norm = nn.LayerNorm(d_model, eps=1e-6)
        self.head = nn.Linear(d_model, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (batch, channels, height, width) to (batch, classes)."""
        hidden = self.dropout(self.embedding(images))
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden)[:, 0])
        return logits
