"""The loss of a language model: each position predicts the token after it."""

from torch import Tensor, nn

from colossalai.nn.loss import CrossEntropyLoss


class GPTLMLoss(nn.Module):
    """Mean cross entropy, in nats, between the logits at each position and the next token.

    The labels are the input tokens themselves; the shift by one happens here. In a tensor mode the logits are
    taken to be cut as the model that was built last leaves them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.loss = CrossEntropyLoss()

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Compare logits (batch, seq, vocab), a slice, with labels (batch, seq), whole; return a scalar."""
        predicted = logits[..., :-1, :].flatten(0, -2)
        loss: Tensor = self.loss(predicted, labels[..., 1:].flatten())
        return loss
