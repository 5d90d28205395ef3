"""The loss of a masked language model: the tokens that were hidden are predicted."""

from colossalai.model_zoo._loss import TokenLoss


class BertMLMLoss(TokenLoss):
    """Mean cross entropy, in nats, at the positions whose label is not -100; see `TokenLoss`.

    Args:
        with_count: Return the pair (sum, number of labels that count).
    """

    def __init__(self, *, with_count: bool = False) -> None:
        super().__init__(causal=False, with_count=with_count)
