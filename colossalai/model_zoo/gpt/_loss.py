"""The loss of a language model: each position predicts the token after it."""

from torch import Tensor
from torch.nn import functional

from colossalai.model_zoo._loss import IGNORED, TokenLoss


class GPTLMLoss(TokenLoss):
    """Mean cross entropy, in nats, between the logits at each position and the next token.

    The labels are the input tokens themselves, or -100 where a token does not count; the shift by one happens
    here. In a tensor mode the logits are taken to be cut as the model that was built last leaves them.
    """

    def __init__(self) -> None:
        super().__init__(causal=True)

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Compare logits (batch, seq, vocab), a slice, with labels (batch, seq), whole; return a scalar."""
        return super().forward(logits, functional.pad(labels[..., 1:], (0, 1), value=IGNORED))
