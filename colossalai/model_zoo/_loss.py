"""The mean cross entropy of tokens over the whole batch, in every tensor mode.

[Note: the loss of cut sequences]
If ranks share sequences, each has the logits of its positions. The mean is over the counted tokens on all
ranks together, in any distribution: L = (sum over ranks of S_r) / n, with S_r the sum of the losses of rank r
and n the number of counted labels, which every rank has, as labels are passed whole. The backward of rank r
has to leave a gradient g_r whose *mean* over the p ranks, computed by the data method, is dL. The ring of the
attention returns to a rank the gradients of its keys from the queries of all ranks; so if every rank starts
from c dS_r, the sum of the g_r is c times the gradient of the sum of all S, and c = p / n is right. With
equally many labels on each rank this is the gradient of a rank's own mean.

As a pair (sum, count) it is (S, n) on each of the p ranks, and starts from p dS_r: the weights of the
replicas add up to p times the labels, which cancels the factor.
"""

from typing import Any

import torch
from torch import Tensor

from colossalai.communication import all_reduce
from colossalai.context import Axis
from colossalai.model_zoo._sequence import sequence_cut
from colossalai.nn.layer import Cut, head_cut, launched_job
from colossalai.nn.loss import CrossEntropyLoss, HeadOperands, LanguageModelOutput, LossOfOutput
from colossalai.tensor import set_built_for

IGNORED = -100
"""The label of a token that does not count."""


class TokenLoss(LossOfOutput):
    """Mean cross entropy, in nats, at the positions whose label is not -100.

    In a tensor mode the logits have to be cut like the output of the model that was built last.

    Args:
        causal: Whether the model is causal, which determines the cut of shared sequences.
        with_count: Whether to return the pair (sum, number of counted labels): a training step then uses the
            mean over all tokens of all ranks and microbatches, in any distribution.
    """

    def __init__(self, *, causal: bool, with_count: bool = False) -> None:
        super().__init__()
        self.cut = sequence_cut(causal=causal)
        self.with_count = with_count
        # Over the positions of this rank, where there are others.
        self.loss = CrossEntropyLoss(ignore_index=IGNORED, with_count=with_count or self.cut.is_cut)
        job = launched_job()
        set_built_for(self, sequence=job.layout.sequence)
        logits_cut = Cut() if job.mode is None else head_cut(job.mode)
        self.num_batch_parts, self.num_class_parts = (
            job.mesh.axis_size(axes) if axes else 1 for axes in (logits_cut.batch, logits_cut.features)
        )

    def forward(
        self, logits: Tensor | HeadOperands | LanguageModelOutput, labels: Tensor
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Compare logits (batch, seq, vocab), a slice, with labels (batch, seq), whole; return a scalar.

        With `with_count` return two of them. Instead of logits, the operands of the head are accepted, or the
        output of a model that has computed its loss.

        Raises:
            ValueError: `logits`, but for the classes, and this rank's `labels` differ in shape, or a label is
                not a class.
        """
        if isinstance(logits, LanguageModelOutput):
            return (logits.total, logits.num_labels) if self.with_count else logits.loss
        if not self.cut.is_cut:
            if isinstance(logits, HeadOperands):
                own, num_labels = (
                    logits.loss(labels, ignore_index=IGNORED, reduction="sum"),
                    labels != IGNORED,
                )
                return (own, num_labels.sum()) if self.with_count else own / num_labels.sum()
            loss: Tensor | tuple[Tensor, Tensor] = self.loss(logits.flatten(0, -2), labels.flatten())
            return loss
        counted = labels != IGNORED
        self.cut.check(labels[counted], logits.shape[-1] * self.num_class_parts, what="labels")
        own_labels = self.cut.own_columns(labels)
        if (logits.shape[0] * self.num_batch_parts, *logits.shape[1:-1]) != own_labels.shape:
            raise ValueError(
                f"logits of shape {tuple(logits.shape)} do not fit labels of shape {tuple(labels.shape)}, of "
                f"which this rank's part is {tuple(own_labels.shape)}"
            )
        if isinstance(logits, HeadOperands):
            own = logits.loss(own_labels, ignore_index=IGNORED, reduction="sum")
        else:
            wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2)
            own, _ = self.loss(wide, own_labels.flatten())
        total: Tensor = _SumOverSequence.apply(own, self.cut.axis)
        return (total, counted.sum()) if self.with_count else total / counted.sum()


class _SumOverSequence(torch.autograd.Function):
    """See [Note: the loss of cut sequences]."""

    @staticmethod
    def forward(ctx: Any, term: Tensor, axis: Axis) -> Tensor:
        ctx.num_ranks = axis.size
        return all_reduce(term, axis) if axis.size > 1 else term.view_as(term)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.num_ranks, None
