"""The shape of a BERT encoder as a value."""

from dataclasses import dataclass

from colossalai.model_zoo._config import TransformerConfig


@dataclass(frozen=True, kw_only=True)
class BertConfig(TransformerConfig):
    """The shape of a BERT encoder; see `TransformerConfig`.

    Attributes:
        vocab_size: Number of tokens.
        type_vocab_size: Number of segments that a token may belong to.
        max_position_embeddings: Longest sequence that the learned positions allow.
    """

    vocab_size: int = 30522
    type_vocab_size: int = 2
    max_position_embeddings: int = 512
    layer_norm_epsilon: float = 1e-12
