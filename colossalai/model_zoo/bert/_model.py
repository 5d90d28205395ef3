"""A BERT encoder (Devlin et al. 2019, 1810.04805) with the head of a masked language model.

    x = norm(tokens + positions + segments);  x = norm(x + attention(x));  x = norm(x + mlp(x))
    logits = norm(gelu(linear(x))) @ tokens.T + bias

The blocks are in one `nn.ModuleList`, so that recomputation, sharding and pipelining can take them one by
one.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from colossalai.model_zoo._embedding import TokensAndPositions
from colossalai.model_zoo._head import output_layer
from colossalai.model_zoo._transformer import PostNormBlock
from colossalai.model_zoo._weights import draw_parameters
from colossalai.model_zoo.bert._config import BertConfig
from colossalai.nn.layer import BackToFirstCut, Cut, Dropout, Embedding, LayerNorm, Linear


class BertEmbedding(TokensAndPositions):
    """The norm of token, position and segment embeddings.

    Args:
        config: The shape of the model.
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__(
            config.hidden_size,
            config.vocab_size,
            config.max_position_embeddings,
            causal=False,
            dtype=None,
            vocab_parallel_limit=config.vocab_parallel_limit,
        )
        self.num_segments = config.type_vocab_size
        self.segments = Embedding(
            config.type_vocab_size, config.hidden_size, vocab_parallel_limit=config.type_vocab_size
        )
        cut = self.output_cut
        self.norm = LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon, input_cut=cut)
        self.dropout = Dropout(config.embedding_dropout, input_cut=cut)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        """Embed ids of shape (batch, seq), whole, to this rank's slice of (batch, seq, hidden).

        Args:
            input_ids: The tokens.
            token_type_ids: The segment of each; None if all belong to segment 0.

        Raises:
            ValueError: The sequence is longer than the model has positions, or cannot be cut.
        """
        tokens, positions = self.embed(input_ids)
        segments = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        self.cut.check(segments, self.num_segments, what="segments")
        segments = self.segments(self.cut.own_columns(segments))
        hidden: Tensor = self.dropout(self.norm(tokens + segments + positions))
        return hidden


class BertBlock(PostNormBlock):
    """One post-norm encoder block.

    Args:
        config: The shape of the model.
        input_cut: Cut of the residual stream. Default: the output cut of the layer built before.
    """

    def __init__(self, config: BertConfig, *, input_cut: Cut | None = None) -> None:
        super().__init__(config.block, input_cut=input_cut)


class BertHead(nn.Module):
    """From hidden states to the logits of the tokens that were hidden.

    The decoder has a weight of its own until `Bert` ties it to the token embedding.

    Args:
        config: The shape of the model.
        input_cut: Cut of the input. Default: the output cut of the layer built before.
    """

    def __init__(self, config: BertConfig, *, input_cut: Cut | None = None) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.gelu = config.gelu
        self.transform = Linear(hidden, hidden, input_cut=input_cut)
        self.recut = BackToFirstCut(after=self.transform)  # to the cut of the embedding's weight
        cut = self.recut.output_cut
        self.norm = LayerNorm(hidden, eps=config.layer_norm_epsilon, input_cut=cut)
        limit = config.vocab_parallel_limit
        self.decoder = output_layer(hidden, config.vocab_size, vocab_parallel_limit=limit, input_cut=cut)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map (batch, seq, hidden) to (batch, seq, vocab)."""
        hidden = functional.gelu(self.transform(hidden), approximate=self.gelu)
        logits: Tensor = self.decoder(self.norm(self.recut(hidden)))
        return logits


class Bert(nn.Module):
    """A BERT encoder with the head of a masked language model.

    It follows the tensor mode of the current context: ids are passed whole, logits are cut along the batch
    and the vocabulary, or along the sequence, depending on the mode, and `BertMLMLoss` accepts them in this
    form.

    Args:
        config: The shape of the model.

    Raises:
        ValueError: The ranks of the tensor mode do not divide a size; the message names it.
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = BertEmbedding(config)
        stream = self.embedding.output_cut
        self.blocks = nn.ModuleList(BertBlock(config, input_cut=stream) for _ in range(config.num_layers))
        self.head = BertHead(config, input_cut=stream)
        self.tie_weights()
        self.reset_parameters()

    def tie_weights(self) -> None:
        """Make the head use the token embedding; `to_empty` on a meta model undoes it, so call it again."""
        self.head.decoder.weight = self.embedding.tokens.weight

    def reset_parameters(self) -> None:
        """Draw the weights: normal with `init_std`; biases 0."""
        draw_parameters(self, self._draw)

    def _draw(self, name: str, whole: Tensor) -> None:
        nn.init.normal_(whole, std=self.config.init_std)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> Tensor:
        """Map token ids to logits.

        Args:
            input_ids: (batch, seq), whole.
            attention_mask: (batch, seq), whole; 0 where a position is padding, which is masked out.
            token_type_ids: (batch, seq), whole; the segment of each token.

        Returns:
            This rank's slice of (batch, seq, vocab).
        """
        hidden = self.embedding(input_ids, token_type_ids)
        for block in self.blocks:
            hidden = block(hidden, attention_mask)
        logits: Tensor = self.head(hidden)
        return logits
