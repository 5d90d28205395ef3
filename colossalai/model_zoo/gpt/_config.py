"""The shape of a GPT decoder as a value."""

from dataclasses import dataclass
from typing import ClassVar

from colossalai.model_zoo._config import TransformerConfig


@dataclass(frozen=True, kw_only=True)
class GPTConfig(TransformerConfig):
    """The shape of a GPT decoder; see `TransformerConfig`.

    The published GPT-2 weights have the approximation of GELU, `gelu="tanh"`.

    Attributes:
        vocab_size: Number of tokens.
        max_position_embeddings: Longest sequence that the learned positions allow.
    """

    causal: ClassVar[bool] = True

    vocab_size: int = 50257
    max_position_embeddings: int = 1024
