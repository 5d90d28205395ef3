"""A GPT decoder: pre-norm blocks, learned positions, causal attention, output tied to the token embedding.

    x = tokens + positions;  x += attention(norm(x));  x += mlp(norm(x));  logits = norm(x) @ tokens.T

The blocks are in one `nn.ModuleList`, so that recomputation, sharding and pipelining can take them one by
one.
"""

import math
from typing import Any

from torch import Tensor, nn

from colossalai.model_zoo._attention import by_head
from colossalai.model_zoo._transformer import PreNormBlock
from colossalai.model_zoo._weights import draw_parameters
from colossalai.model_zoo.gpt._config import GPTConfig
from colossalai.model_zoo.gpt._loss import GPTLMLoss
from colossalai.model_zoo.gpt._parts import GPTEmbedding, GPTLMHead
from colossalai.nn.layer import LayerNorm
from colossalai.nn.loss import (
    MISSING_LOGITS,
    FusesLoss,
    LanguageModelOutput,
    head_operands,
    refuse_other_head,
)


class GPT(FusesLoss):
    """A GPT decoder with a language-model head.

    It follows the tensor mode of the current context: ids are passed whole, logits are cut along the batch
    and the vocabulary, or along the sequence, depending on the mode, and `GPTLMLoss` accepts them in this
    form.

    Args:
        config: The shape of the model.
        fused_loss: In training, where labels are given, compute head and loss together in chunks, without
            logits; see `colossalai.nn.LinearCrossEntropyLoss`.

    Raises:
        ValueError: The ranks of the tensor mode do not divide a size; the message names it. Or `fused_loss`
            does not go with the tensor mode.
    """

    def __init__(self, config: GPTConfig, *, fused_loss: bool = False) -> None:
        super().__init__()
        self.config = config
        self.embedding = GPTEmbedding(
            config.hidden_size,
            config.vocab_size,
            config.max_position_embeddings,
            dropout=config.embedding_dropout,
            vocab_parallel_limit=config.vocab_parallel_limit,
        )
        stream = self.embedding.output_cut
        self.blocks = nn.ModuleList(
            PreNormBlock(config.block, input_cut=stream) for _ in range(config.num_layers)
        )
        self.norm = LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon, input_cut=stream)
        self.head = GPTLMHead(
            config.hidden_size,
            config.vocab_size,
            vocab_parallel_limit=config.vocab_parallel_limit,
            input_cut=stream,
        )
        self.loss = GPTLMLoss(with_count=True)
        if fused_loss:
            refuse_other_head(self.head)
        self.fused_loss = fused_loss
        self.tie_weights()
        self.reset_parameters()

    def tie_weights(self) -> None:
        """Make the head use the token embedding; `to_empty` on a meta model undoes it, so call it again."""
        self.head.weight = self.embedding.tokens.weight

    def reset_parameters(self) -> None:
        """Draw the weights as GPT-2 does.

        Normal with `init_std`, half of it for the positions; biases 0. The projections that end in the
        residual stream are scaled by 1/sqrt(number of additions to it), 1/sqrt(2 * num_layers) (Radford et
        al. 2019, section 2.3).
        """
        draw_parameters(self, self._draw)

    def _draw(self, name: str, whole: Tensor) -> None:
        std = self.config.init_std
        if name.endswith("projection.weight"):
            std /= math.sqrt(2 * self.config.num_layers)
        elif name == "embedding.positions.weight":
            std /= 2
        nn.init.normal_(whole, std=std)
        if name.endswith("qkv.weight"):  # the same numbers give the same model as with q, k, v side by side
            whole.copy_(by_head(whole, self.config.num_attention_heads))

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> Any:
        """Map token ids to logits, and with labels to a loss.

        Args:
            input_ids: (batch, seq), whole.
            attention_mask: (batch, seq), whole; 0 where a position is padding, which is masked out.
            labels: (batch, seq), whole: the tokens themselves, -100 where one does not count; `GPTLMLoss` has
                more.

        Returns:
            This rank's slice of (batch, seq, vocab); with labels a `LanguageModelOutput`, of which `loss` is
            the mean over the labels that count.
        """
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            hidden = block(hidden, attention_mask)
        hidden = self.norm(hidden)
        if labels is None:
            return self.head(hidden)
        if self.fused_loss and self.training:
            total, num_labels = self.loss(head_operands(self.head, hidden), labels)
            return LanguageModelOutput(total, num_labels, MISSING_LOGITS)
        logits = self.head(hidden)
        total, num_labels = self.loss(logits, labels)
        return LanguageModelOutput(total, num_labels, logits)
