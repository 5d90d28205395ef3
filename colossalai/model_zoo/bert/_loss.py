"""The loss of a masked language model: the tokens that were hidden are predicted."""

from torch import Tensor, nn

from colossalai.nn.loss import CrossEntropyLoss


class BertMLMLoss(nn.Module):
    """Mean cross entropy, in nats, at the positions whose label is not -100.

    In a tensor mode the logits are taken to be cut as the model that was built last leaves them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.loss = CrossEntropyLoss()

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Compare logits (batch, seq, vocab), a slice, with labels (batch, seq), whole; return a scalar."""
        loss: Tensor = self.loss(logits.flatten(0, -2), labels.flatten())
        return loss
