"""The loss of a language model: each position predicts the token after it."""

from torch import Tensor, nn


class GPTLMLoss(nn.Module):
    """Mean cross entropy, in nats, between the logits at each position and the next token.

    The labels are the input tokens themselves; the shift by one happens here.
    """

    def __init__(self) -> None:
        super().__init__()
        self.loss = nn.CrossEntropyLoss()

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Compare logits (batch, seq, vocab) with labels (batch, seq); the result is a scalar."""
        predicted = logits[..., :-1, :].flatten(0, -2)
        return self.loss(predicted, labels[..., 1:].flatten())
