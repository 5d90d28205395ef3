"""A GPT decoder: pre-norm blocks, learned positions, causal attention, output tied to the token embedding.

    x = tokens + positions;  x += attention(norm(x));  x += mlp(norm(x));  logits = norm(x) @ tokens.T

The blocks stand in one `nn.ModuleList`, so that recomputation, sharding and pipelining can take them one
by one.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from colossalai.model_zoo.gpt._config import GPTConfig


class GPTEmbedding(nn.Module):
    """Token embedding plus learned position embedding.

    Args:
        config: The shape of the model.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.dropout = nn.Dropout(config.embedding_dropout)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Embed `input_ids` of shape (batch, seq) to (batch, seq, hidden).

        Raises:
            ValueError: The sequence is longer than the model has positions.
        """
        length = input_ids.size(-1)
        if length > self.positions.num_embeddings:
            raise ValueError(
                f"a sequence of {length} tokens, max_position_embeddings={self.positions.num_embeddings}: "
                "shorten the sequences or build the model with more positions"
            )
        positions = torch.arange(length, device=input_ids.device)
        return self.dropout(self.tokens(input_ids) + self.positions(positions))


class GPTAttention(nn.Module):
    """Causal self-attention with one fused projection to query, key and value.

    Args:
        config: The shape of the model.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_size = config.head_size
        self.attention_dropout = config.attention_dropout
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.projection = nn.Linear(config.hidden_size, config.hidden_size)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """Attend from each position of (batch, seq, hidden) to itself and the earlier ones."""
        query, key, value = (
            part.unflatten(-1, (-1, self.head_size)).transpose(1, 2)  # (batch, heads, seq, head)
            for part in self.qkv(hidden).chunk(3, dim=-1)
        )
        rate = self.attention_dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(query, key, value, dropout_p=rate, is_causal=True)
        return self.dropout(self.projection(mixed.transpose(1, 2).flatten(2)))


class GPTMLP(nn.Module):
    """The feed-forward layer: linear, GELU, linear.

    Args:
        config: The shape of the model.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        inner_size = int(config.mlp_ratio * config.hidden_size)
        self.expansion = nn.Linear(config.hidden_size, inner_size)
        self.projection = nn.Linear(inner_size, config.hidden_size)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """Transform each position of (batch, seq, hidden) on its own."""
        return self.dropout(self.projection(functional.gelu(self.expansion(hidden))))


class GPTBlock(nn.Module):
    """One pre-norm decoder block: attention and feed-forward, each added to the residual stream.

    Args:
        config: The shape of the model.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.attention = GPTAttention(config)
        self.mlp_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.mlp = GPTMLP(config)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map (batch, seq, hidden) to the same shape."""
        hidden = hidden + self.attention(self.attention_norm(hidden))
        return hidden + self.mlp(self.mlp_norm(hidden))


class GPT(nn.Module):
    """A GPT decoder with a language-model head.

    Args:
        config: The shape of the model.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = GPTEmbedding(config)
        self.blocks = nn.ModuleList(GPTBlock(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.tie_weights()
        self.reset_parameters()

    def tie_weights(self) -> None:
        """Make the head use the token embedding; `to_empty` on a meta model undoes it, so call it again."""
        self.head.weight = self.embedding.tokens.weight

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the weights as GPT-2 does.

        Normal with `init_std`, half of it for the positions; biases 0. The projections that end in the
        residual stream are scaled by 1/sqrt(number of additions to it), 1/sqrt(2 * num_layers) (Radford et
        al. 2019, section 2.3).
        """
        std = self.config.init_std
        residual_std = std / math.sqrt(2 * self.config.num_layers)
        for name, module in self.named_modules():
            if isinstance(module, nn.LayerNorm):
                module.reset_parameters()
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=std / 2 if module is self.embedding.positions else std)
            elif isinstance(module, nn.Linear) and module is not self.head:
                nn.init.normal_(module.weight, std=residual_std if name.endswith("projection") else std)
                nn.init.zeros_(module.bias)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Map `input_ids` of shape (batch, seq) to logits of shape (batch, seq, vocab)."""
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))
