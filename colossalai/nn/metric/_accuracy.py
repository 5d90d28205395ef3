"""Accuracy as a count: counts of batches and of ranks add up, percentages of uneven batches do not."""

import torch
from torch import Tensor, nn


class Accuracy(nn.Module):
    """Count the correct predictions of a batch.

    Example:
        ```python
        correct = Accuracy()(logits, labels)
        accuracy = correct / labels.numel()
        ```
    """

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return how many predictions are right, a scalar of type int64.

        Args:
            logits: Scores, (..., classes); the prediction is the class with the highest.
            labels: Class numbers, (...).

        Raises:
            ValueError: The shapes do not fit each other.
        """
        if logits.shape[:-1] != labels.shape:
            raise ValueError(
                f"logits of shape {tuple(logits.shape)} do not fit labels of shape {tuple(labels.shape)}; "
                f"the logits must have the shape of the labels and one more dim, the classes, at the end"
            )
        return torch.sum(logits.argmax(dim=-1) == labels)
