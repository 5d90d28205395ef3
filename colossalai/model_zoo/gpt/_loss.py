"""The loss of a language model: each position predicts the token after it."""

from torch import Tensor
from torch.nn import functional

from colossalai.model_zoo._loss import IGNORED, TokenLoss
from colossalai.nn.loss import HeadOperands, LanguageModelOutput


class GPTLMLoss(TokenLoss):
    """Mean cross entropy, in nats, between the logits at each position and the next token.

    The labels are the input tokens themselves, or -100 where a token does not count; the shift by one happens
    here. In a tensor mode the logits are taken to be cut as the model that was built last leaves them.

    Args:
        with_count: Return the pair (sum, number of labels that count); see `TokenLoss`.
    """

    def __init__(self, *, with_count: bool = False) -> None:
        super().__init__(causal=True, with_count=with_count)

    def forward(
        self, logits: Tensor | HeadOperands | LanguageModelOutput, labels: Tensor
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Compare logits (batch, seq, vocab), a slice, with labels (batch, seq), whole; return a scalar.

        With `with_count` return two of them.
        """
        return super().forward(logits, functional.pad(labels[..., 1:], (0, 1), value=IGNORED))
