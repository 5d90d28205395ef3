"""The loss of a masked language model: the tokens that were hidden are predicted."""

from colossalai.model_zoo._loss import TokenLoss


class BertMLMLoss(TokenLoss):
    """Mean cross entropy, in nats, at the positions whose label is not -100; see `TokenLoss`."""

    def __init__(self) -> None:
        super().__init__(causal=False)
