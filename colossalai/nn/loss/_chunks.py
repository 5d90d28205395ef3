"""Cross entropy of a linear layer's outputs in chunks of rows: the autograd function and its formulas.

For row i with label y over V classes, with scale s, soft cap c, label smoothing e and z-loss coefficient k:

    u_j = s (w_j . x + b_j)                 z_j = c tanh(u_j / c); without a cap z = u
    L = log sum_j exp z_j                   l_i = L - (1 - e) z_y - (e / V) sum_j z_j + k L^2

"none" is t_i l_i with token weights t (1 where none are given), "sum" their sum over the rows that count,
"mean" that over the sum of t. The gradients come from the logits of the same chunk, with p_j = exp(z_j - L):

    dl_i/du_j = ((1 + 2 k L) p_j - (1 - e) [j = y] - e / V) (1 - (z_j / c)^2)
    dx_i = s t_i W^T dl_i/du        dW = s sum_i t_i dl_i/du x_i^T        db = s sum_i t_i dl_i/du

So (chunk, V) of logits are in memory, in the place of three times (rows, V): logits, their softmax, and its
gradient. Rows that do not count are not computed at all.

[Note: gradients from the forward]
"mean" and "sum": the gradients exist when the backward begins, which returns them, multiplied in place by the
incoming gradient. A further backward of a retained graph computes them again, and so does every backward of
"none", which needs the incoming gradient of each row. Neither can be differentiated a second time; it raises.

[Note: sharded vocabulary]
Each rank has the classes of its slice of the weight. For each chunk the ranks exchange the largest logit of a
row, the sum of the exponentials under it and the logit of its label, in one all-gather of (3, chunk) numbers,
and (4, chunk) with label smoothing; and dx is summed over them, while dW is computed. Classes that pad the
vocabulary are not looked at.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from colossalai.communication import all_gather, start_all_reduce
from colossalai.context import Axis

_CHUNK_ELEMENTS = 1 << 23  # of logits: 32 MiB in float32
_LEAST_ROWS = 256  # in a chunk: each reads and writes all of the gradient of the weight
_BLOCK_ELEMENTS = 1 << 18  # of logits between two products, on a CPU: 1 MiB, which stays in its cache

Wanted = tuple[bool, bool, bool]
Gradients = list[Tensor | None]


@dataclass(frozen=True, kw_only=True)
class VocabularySlice:
    """Classes of a rank.

    Attributes:
        num_classes: Number of classes on all ranks, without padding.
        axis: The ranks, each of which has a slice of the same size; None if one rank has all classes.
    """

    num_classes: int
    axis: Axis | None = None

    def own(self, num_rows: int) -> tuple[int, int]:
        """Return the first class of this rank, and how many it has, for a slice of so many rows."""
        first = 0 if self.axis is None else self.axis.rank * num_rows
        return first, max(0, min(num_rows, self.num_classes - first))


@dataclass(frozen=True, kw_only=True)
class LossTerms:
    """Options of the loss of a row; see the head of the module."""

    label_smoothing: float
    z_loss: float
    logits_scale: float
    softcap: float | None
    chunk: int | None
    vocabulary: VocabularySlice


@dataclass
class _Block:
    """The logits of some rows while they are turned into their gradient.

    Attributes:
        values: (rows, own classes), float32 or better: the exponentials under the largest, then the gradient.
        stored: Destination of the gradient; `values` itself, or its half-precision original.
        slope: The derivative of the soft cap; None without one.
        labels: (rows, 1), as columns of `values`, 0 where another rank has the class.
        is_own: (rows, 1), whether this rank has the class; None where it has all.
    """

    values: Tensor
    stored: Tensor
    slope: Tensor | None
    labels: Tensor
    is_own: Tensor | None


class ChunkedCrossEntropy(torch.autograd.Function):
    """See [Note: gradients from the forward]."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        token_weights: Tensor | None,
        rows: Tensor | None,
        terms: LossTerms,
        reduction: str,
        is_grad_enabled: bool,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, bias, labels, token_weights, rows)
        ctx.terms, ctx.reduction = terms, reduction
        ctx.types = (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        wanted = ctx.needs_input_grad[:3]
        is_late = reduction == "none" or not is_grad_enabled
        # In float16 a gradient divided by the number of rows underflows.
        ctx.divides_early = reduction == "mean" and x.dtype != torch.float16
        ctx.total = None
        num_rows = len(labels) if rows is None else len(rows)
        ctx.is_empty = num_rows == 0  # then the mean is 0 / 0, and the gradients are 0, as torch's
        if reduction == "mean":
            ctx.total = (
                x.new_tensor(num_rows, dtype=torch.float64) if token_weights is None else token_weights.sum()
            )
        losses, ctx.ready = _in_chunks(
            x,
            weight,
            bias,
            labels,
            _row_factors(ctx, token_weights),
            rows,
            terms,
            (False, False, False) if is_late else wanted,
        )
        if token_weights is not None:
            losses = losses * token_weights
        if reduction == "none":
            return losses
        return losses.sum() if ctx.total is None else losses.sum() / ctx.total.to(losses.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            done = _arrived(ctx, grad)
        if torch.is_grad_enabled():  # create_graph=True: a result linear in `grad` only would be wrong
            done = [None if found is None else _Once.apply(found.requires_grad_()) for found in done]
        return (*done, None, None, None, None, None, None)


class _Once(torch.autograd.Function):
    """The identity, which cannot be differentiated."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise RuntimeError(
            "the loss in chunks has no second derivative: its gradient was computed in the forward; use "
            "cross_entropy over whole logits (LinearCrossEntropyLoss, or fused_loss=True, left out)"
        )


def _arrived(ctx: Any, grad: Tensor) -> Gradients:
    """Return the gradients of x, weight and bias for the loss's incoming gradient, and release them."""
    # See [Note: gradients from the forward].
    wanted = ctx.needs_input_grad[:3]
    ready, ctx.ready = ctx.ready, [None, None, None]
    if any(want and found is None for want, found in zip(wanted, ready, strict=True)):
        x, weight, bias, labels, token_weights, rows = ctx.saved_tensors
        factors = _row_factors(ctx, token_weights)
        if ctx.reduction == "none":
            factors = grad if factors is None else grad * factors
        _, ready = _in_chunks(x, weight, bias, labels, factors, rows, ctx.terms, wanted)
    if ctx.reduction != "none" and not ctx.is_empty:
        factor = grad if ctx.total is None or ctx.divides_early else grad / ctx.total
        # Mostly the backward starts from the loss, with an incoming gradient of 1.
        if factor.device.type != "cpu" or factor.item() != 1.0:
            for found in ready:
                if found is not None:
                    found.mul_(factor.to(found.dtype))
    return [None if found is None else found.to(kind) for found, kind in zip(ready, ctx.types, strict=True)]


def _row_factors(ctx: Any, token_weights: Tensor | None) -> Tensor | None:
    """Return the factors of the rows' gradients during their computation; None for 1."""
    if not ctx.divides_early:
        return token_weights
    part: Tensor = 1.0 / ctx.total
    return part if token_weights is None else token_weights * part


def _in_chunks(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    factors: Tensor | None,
    counted: Tensor | None,
    terms: LossTerms,
    wanted: Wanted,
) -> tuple[Tensor, Gradients]:
    """Return the losses of all rows, 0 where a label does not count, and the gradients that are wanted.

    Args:
        x: (rows, hidden).
        weight: (classes, hidden), this rank's slice.
        bias: (classes,), or None.
        labels: (rows,).
        factors: (rows,), or one for all: factors of the rows' gradients; None for 1.
        counted: The numbers of the rows that count; None for all.
        terms: The options.
        wanted: Whether the gradients of x, weight and bias are wanted.

    Returns:
        (rows,) in float32 or better; the gradient of x in its type, the others in float32 or better.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    num_rows = len(x) if counted is None else len(counted)
    first, num_own = terms.vocabulary.own(len(weight))
    axis = terms.vocabulary.axis
    own, own_bias = weight[:num_own], None if bias is None else bias[:num_own]
    losses = x.new_zeros(len(x), dtype=wide)
    dx = torch.zeros_like(x, memory_format=torch.contiguous_format) if wanted[0] else None
    dw = torch.zeros_like(weight, dtype=wide) if wanted[1] else None
    db = torch.zeros_like(bias, dtype=wide) if wanted[2] and bias is not None else None
    chunk = terms.chunk or max(_LEAST_ROWS, _CHUNK_ELEMENTS // max(1, num_own) // 64 * 64)
    with torch.autocast(x.device.type, enabled=False):
        for start in range(0, num_rows, chunk):
            stop = min(start + chunk, num_rows)
            index: Any = slice(start, stop) if counted is None else counted[start:stop]
            inputs = x[index]
            logits = inputs @ own.t() if own_bias is None else torch.addmm(own_bias, inputs, own.t())
            own_factors = factors if factors is None or factors.dim() == 0 else factors[index]
            losses[index] = _to_gradient(logits, labels[index] - first, own_factors, terms, keep=any(wanted))
            wait = None
            if dx is not None:
                rows_grad = logits @ own
                # Sum over the ranks of the vocabulary, in flight during the product below.
                wait = start_all_reduce(rows_grad, axis) if axis is not None else None
            if dw is not None:
                _add_product(dw[:num_own], logits.t(), inputs)
            if db is not None:
                db[:num_own] += logits.sum(0, dtype=wide)
            if dx is not None:
                if wait is not None:
                    wait()
                dx[index] = rows_grad
            del logits  # before the next one comes
    return losses, [dx, dw, db]


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a b to the total, without other memory where the types are the same."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total.add_(a @ b)


def _to_gradient(
    logits: Tensor, labels: Tensor, factors: Tensor | None, terms: LossTerms, *, keep: bool
) -> Tensor:
    """Return the losses of rows, and put in the place of their logits the gradient.

    Args:
        logits: (rows, own classes).
        labels: (rows,), counted from the first own class.
        factors: Factors of the gradients.
        terms: The options.
        keep: Whether a gradient is wanted; otherwise the logits are only used up.
    """
    num_rows, num_own = logits.shape
    size = num_rows if logits.device.type != "cpu" else max(1, _BLOCK_ELEMENTS // max(1, num_own))
    if terms.vocabulary.axis is not None:
        size = num_rows
    losses = []
    for start in range(0, num_rows, size):
        part = slice(start, start + size)
        block, stats = _open(logits[part], labels[part], terms)
        own_factors = factors if factors is None or factors.dim() == 0 else factors[part]
        losses.append(_close(block, stats, own_factors, terms, keep=keep))
    return losses[0] if len(losses) == 1 else torch.cat(losses)


def _open(logits: Tensor, labels: Tensor, terms: LossTerms) -> tuple[_Block, Tensor]:
    """Exponentiate logits under the largest of their row.

    Returns:
        The block, and (3 or 4, rows): the largest, the sum of exponentials, the logit of the label, and, with
        label smoothing, the sum of the logits.
    """
    num_own = logits.shape[1]
    values = logits.to(torch.promote_types(logits.dtype, torch.float32))  # the same memory if it is that
    slope = None
    if terms.softcap is not None:
        values.mul_(terms.logits_scale / terms.softcap).tanh_()
        slope = 1.0 - values.square()
        values.mul_(terms.softcap)
    elif terms.logits_scale != 1.0:
        values.mul_(terms.logits_scale)
    is_own = None
    columns = labels.unsqueeze(1)
    if terms.vocabulary.axis is not None:
        is_own = (columns >= 0) & (columns < num_own)
        columns = columns.masked_fill(~is_own, 0)
    block = _Block(values, logits, slope, columns, is_own)
    if num_own == 0:  # a rank that has nothing but padding
        stats = values.new_zeros(4 if terms.label_smoothing else 3, len(logits))
        stats[0] = -math.inf
        return block, stats
    of_label = values.gather(1, columns)
    if is_own is not None:
        of_label = of_label.masked_fill(~is_own, 0.0)
    largest = values.amax(1, keepdim=True)
    sums = [values.sum(1)] if terms.label_smoothing else []
    total = values.sub_(largest).exp_().sum(1)
    return block, torch.stack([largest.squeeze(1), total, of_label.squeeze(1), *sums])


def _close(block: _Block, stats: Tensor, factors: Tensor | None, terms: LossTerms, *, keep: bool) -> Tensor:
    """Return the losses of a block, and store its gradient."""
    smoothing, own_largest = terms.label_smoothing, stats[0]
    largest, total, of_label, sums = _over_ranks(stats, terms.vocabulary.axis)
    log_sum = total.log() + largest
    losses = log_sum - (1.0 - smoothing) * of_label
    if smoothing:
        losses -= smoothing / terms.vocabulary.num_classes * sums
    if terms.z_loss:
        losses += terms.z_loss * log_sum.square()
    if not keep or block.values.shape[1] == 0:
        return losses
    scale = (
        log_sum.new_tensor(terms.logits_scale)
        if factors is None
        else factors.to(log_sum) * terms.logits_scale
    )
    of_softmax = (own_largest - largest).exp() / total * scale
    if terms.z_loss:
        of_softmax = of_softmax * (1.0 + 2.0 * terms.z_loss * log_sum)
    values = block.values.mul_(of_softmax.unsqueeze(1))
    scale = scale.expand(len(values)).unsqueeze(1)
    if smoothing:
        values.sub_(smoothing / terms.vocabulary.num_classes * scale)
    of_label = (smoothing - 1.0) * scale
    if block.is_own is not None:
        of_label = of_label.masked_fill(~block.is_own, 0.0)
    values.scatter_add_(1, block.labels, of_label)
    if block.slope is not None:
        values.mul_(block.slope)
    if values.dtype != block.stored.dtype:
        block.stored.copy_(values)
    return losses


def _over_ranks(stats: Tensor, axis: Axis | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return largest, sum of exponentials, logit of the label and sum of logits over all classes of rows."""
    if axis is None or axis.size == 1:
        return stats[0], stats[1], stats[2], stats[-1]
    # See [Note: sharded vocabulary]: (ranks, 3 or 4, rows), added up in the same order everywhere.
    every = all_gather(stats.unsqueeze(0), 0, axis)
    largest = every[:, 0].amax(0)
    total = (every[:, 1] * (every[:, 0] - largest).exp()).sum(0)
    return largest, total, every[:, 2].sum(0), every[:, -1].sum(0)
