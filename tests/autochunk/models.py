"""Small models and their arguments for tests of AutoChunk, in float64."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from colossalai.model_zoo.gpt import GPT, GPTConfig
from colossalai.model_zoo.vit import ViT, ViTConfig

SIZES = {"hidden_size": 32, "num_layers": 2, "num_attention_heads": 4}


class EagerBlock(nn.Module):
    """An encoder block with explicit scores, whose values are used again after the attention."""

    def __init__(self, width: int = 32, num_heads: int = 4) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.num_heads = num_heads

    def forward(self, x: Tensor) -> Tensor:
        """Return (batch, seq, width) of the same."""
        batch, seq, width = x.shape
        qkv = self.qkv(self.norms[0](x)).view(batch, seq, 3, self.num_heads, -1)
        query, key, value = (each.transpose(1, 2) for each in qkv.unbind(2))
        scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
        mixed = (scores.softmax(-1) @ value).transpose(1, 2).reshape(batch, seq, width)
        x = x + self.out(mixed)
        return x + self.mlp(self.norms[1](x))


def eager() -> tuple[nn.Module, Mapping[str, Any]]:
    """Return blocks with explicit scores, and their arguments."""
    return nn.Sequential(*(EagerBlock() for _ in range(3))), {"input": random(2, 64, 32)}


def gpt() -> tuple[nn.Module, Mapping[str, Any]]:
    """Return a decoder, and its arguments."""
    config = GPTConfig(vocab_size=40, max_position_embeddings=96, **SIZES)
    return GPT(config), {"input_ids": torch.randint(0, 40, (2, 96))}


def vit() -> tuple[nn.Module, Mapping[str, Any]]:
    """Return a vision transformer, and its arguments."""
    return ViT(ViTConfig(image_size=40, patch_size=4, num_classes=10, **SIZES)), {
        "images": random(2, 3, 40, 40)
    }


def gpt2(attention: str) -> tuple[nn.Module, Mapping[str, Any]]:
    """Return the GPT-2 of transformers, and its arguments."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=2,
        n_embd=32,
        n_head=4,
        vocab_size=40,
        n_positions=96,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation=attention,
    )
    return GPT2LMHeadModel(config), {"input_ids": torch.randint(0, 40, (2, 96)), "use_cache": False}


def random(*shape: int) -> Tensor:
    """Return random numbers in float64."""
    return torch.randn(shape, dtype=torch.float64)


MODELS: Mapping[str, Callable[[], tuple[nn.Module, Mapping[str, Any]]]] = {
    "eager": eager,
    "gpt": gpt,
    "vit": vit,
    "gpt2-eager": lambda: gpt2("eager"),
    "gpt2-sdpa": lambda: gpt2("sdpa"),
}


def model_of(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """Return a model in evaluation mode and in float64, and its arguments by name."""
    torch.manual_seed(0)
    model, arguments = MODELS[name]()
    return model.eval().double(), dict(arguments)
