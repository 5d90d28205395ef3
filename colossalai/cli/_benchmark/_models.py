"""Models of the benchmark: a table of builders by name, for the mode of the launched job."""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from colossalai.cli._benchmark._results import BenchmarkSettings
from colossalai.context import global_context
from colossalai.nn.layer import LayerNorm, Linear, current_cut


class MLP(nn.Module):
    """Two linear layers, hidden -> 4 hidden -> hidden.

    Args:
        settings: The sizes.
    """

    def __init__(self, settings: BenchmarkSettings) -> None:
        super().__init__()
        self.expansion = Linear(settings.hidden_size, 4 * settings.hidden_size)
        self.projection = Linear(4 * settings.hidden_size, settings.hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, seq, hidden) to the same shape."""
        y: torch.Tensor = self.projection(functional.gelu(self.expansion(x)))
        return y


class Attention(nn.Module):
    """Causal self-attention; every rank computes its own heads and sequences.

    Args:
        settings: The sizes.

    Raises:
        ValueError: The heads do not divide the hidden size, or the ranks the heads.
    """

    def __init__(self, settings: BenchmarkSettings) -> None:
        super().__init__()
        hidden, heads = settings.hidden_size, settings.num_heads
        if hidden % heads:
            raise ValueError(f"{heads} heads do not divide the hidden size {hidden}: change --num_heads")
        self.head_size = hidden // heads
        self.qkv = Linear(hidden, 3 * hidden)
        num_parts = global_context.mesh.axis_size(current_cut(global_context.tensor_mode).features)
        if heads % num_parts:
            raise ValueError(f"{num_parts} ranks do not divide the {heads} heads: change --num_heads")
        self.projection = Linear(hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, seq, hidden) to the same shape."""
        # Head by head, so that a slice of the features is some heads' queries, keys and values.
        parts = self.qkv(x).unflatten(-1, (-1, 3, self.head_size))  # (batch, seq, heads, 3, head)
        query, key, value = parts.permute(3, 0, 2, 1, 4)  # (batch, heads, seq, head) each
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        y: torch.Tensor = self.projection(mixed.transpose(1, 2).flatten(2))
        return y


class BenchmarkBlock(nn.Module):
    """A pre-norm transformer block.

    Args:
        settings: The sizes.
    """

    def __init__(self, settings: BenchmarkSettings) -> None:
        super().__init__()
        self.attention_norm = LayerNorm(settings.hidden_size)
        self.attention = Attention(settings)
        self.mlp_norm = LayerNorm(settings.hidden_size)
        self.mlp = MLP(settings)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, seq, hidden) to the same shape."""
        x = x + self.attention(self.attention_norm(x))
        y: torch.Tensor = x + self.mlp(self.mlp_norm(x))
        return y


Builder = Callable[[BenchmarkSettings], nn.Module]
"""Builds one layer of a model, which maps (batch, seq, hidden), sharded as the mode requires, to the same."""

MODELS: dict[str, Builder] = {"MLP": MLP, "transformer": BenchmarkBlock}
