"""Accuracy as a count: counts of batches and of ranks add up, percentages of uneven batches do not."""

import torch
from torch import Tensor, nn

from colossalai.communication import all_gather, all_reduce
from colossalai.context import Mesh
from colossalai.nn.layer import Cut, head_cut, launched_job, own_part, require_cut


class Accuracy(nn.Module):
    """Count the correct predictions of a batch, over all tensor-parallel ranks.

    Example:
        ```py
        correct = Accuracy()(logits, labels)
        accuracy = correct / labels.numel()
        ```

    Args:
        cut: Cut of the logits; default: the output cut of the last classifier, whole without a tensor mode.
        mesh: The ranks; default: those of the launched job.
    """

    def __init__(self, *, cut: Cut | None = None, mesh: Mesh | None = None) -> None:
        super().__init__()
        job = launched_job()
        self.cut = cut or (Cut() if job.mode is None else head_cut(job.mode))
        self.mesh = mesh or job.mesh

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return how many predictions are right, a scalar of type int64.

        Args:
            logits: Scores, (..., classes), a slice; the prediction is the class with the highest.
            labels: Class numbers, (...), whole.

        Raises:
            ValueError: `logits`, but for the classes, and this rank's `labels` differ in shape, or the logits
                come from a layer that cuts them otherwise.
        """
        logits = require_cut(logits, self.cut, by=type(self).__name__)
        if self.cut.batch:
            labels = own_part(labels, self.cut.batch, self.mesh, by=type(self).__name__)
        if logits.shape[:-1] != labels.shape:
            raise ValueError(
                f"logits of shape {tuple(logits.shape)} do not fit labels of shape {tuple(labels.shape)}; "
                f"the logits must have the shape of the labels and one more dim, the classes, at the end"
            )
        correct = torch.sum(self._predictions(logits) == labels)
        for name in self.cut.batch:
            correct = all_reduce(correct, self.mesh.axis(name))
        return correct

    def _predictions(self, logits: Tensor) -> Tensor:
        """Return the number of the class with the highest score, the first one of equals."""
        score, number = logits.max(dim=-1)
        if self.cut.features:
            number = number + self.mesh.axis_rank_in_order(self.cut.features) * logits.shape[-1]
        for name in reversed(self.cut.features):
            scores = all_gather(score.unsqueeze(-1), -1, self.mesh.axis(name))
            numbers = all_gather(number.unsqueeze(-1), -1, self.mesh.axis(name))
            score, best = scores.max(dim=-1)
            number = numbers.gather(-1, best.unsqueeze(-1)).squeeze(-1)
        return number
