"""The common base of the embeddings of GPT and BERT: tokens, learned positions, sequences that are cut."""

import torch
from torch import Tensor, nn

from colossalai.model_zoo._head import vocab_options
from colossalai.model_zoo._sequence import sequence_cut
from colossalai.nn.layer import Embedding, PositionEmbedding, first_cut, launched_job


class TokensAndPositions(nn.Module):
    """Token embedding plus learned position embedding; the base of the embedding of a model.

    Args:
        hidden_size: Width of the residual stream.
        vocab_size: Number of tokens.
        max_position_embeddings: Longest sequence.
        causal: Whether the model is causal, which determines the cut of shared sequences.
        dtype: Type of the parameters; None for torch's default.
        vocab_parallel_limit: A vocabulary above this is cut over the ranks; None for the limit of the layers.
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        max_position_embeddings: int,
        *,
        causal: bool,
        dtype: torch.dtype | None,
        vocab_parallel_limit: int | None,
    ) -> None:
        super().__init__()
        options = vocab_options(vocab_parallel_limit)
        self.tokens = Embedding(vocab_size, hidden_size, dtype=dtype, **options)
        self.output_cut = first_cut(launched_job().mode)
        self.positions = PositionEmbedding(
            max_position_embeddings, hidden_size, input_cut=self.output_cut, dtype=dtype
        )
        self.vocab_size = vocab_size
        self.max_length = max_position_embeddings
        self.cut = sequence_cut(causal=causal)

    @property
    def word_embeddings(self) -> nn.Module:
        """The token embedding under its documented name."""
        return self.tokens

    def embed(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return this rank's slices of embedded tokens, (batch, seq, hidden), and positions, (seq, hidden).

        Args:
            input_ids: (batch, seq), whole.

        Raises:
            ValueError: The sequence is longer than the model has positions, or cannot be cut.
        """
        length = input_ids.size(-1)
        if length > self.max_length:
            raise ValueError(
                f"a sequence of {length} tokens, max_position_embeddings={self.max_length}: "
                "shorten the sequences or build the model with more positions"
            )
        self.cut.check(input_ids, self.vocab_size, what="ids")
        at = self.cut.own_columns(torch.arange(length, device=input_ids.device))
        return self.tokens(self.cut.own_columns(input_ids)), self.positions(at)
