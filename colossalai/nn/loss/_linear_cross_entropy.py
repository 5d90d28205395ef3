"""Cross entropy of a linear layer's outputs in chunks of rows, with the gradients computed in the forward.

For row i with label y over V classes, with scale s, soft cap c, label smoothing e and z-loss coefficient k:

    u_j = s (w_j . x + b_j)                 z_j = c tanh(u_j / c); without a cap z = u
    L = log sum_j exp z_j                   l_i = L - (1 - e) z_y - (e / V) sum_j z_j + k L^2

"none" is t_i l_i with token weights t (1 where none are given), "sum" their sum over the rows that count,
"mean" that over the sum of t. The gradients come from the logits of the same chunk, with p_j = exp(z_j - L):

    dl_i/du_j = ((1 + 2 k L) p_j - (1 - e) [j = y] - e / V) (1 - (z_j / c)^2)
    dx_i = s t_i W^T dl_i/du        dW = s sum_i t_i dl_i/du x_i^T        db = s sum_i t_i dl_i/du

So (chunk, V) of logits are in memory, in the place of three times (rows, V): logits, their softmax, and its
gradient. Rows that do not count are not computed at all.

[Note: what a backward takes]
"mean" and "sum": the gradients are there when the backward begins, and it hands them out, multiplied in place
by what arrives. A further backward of a retained graph computes them again, and so does every backward of
"none", which has to know what arrives at each row. Neither can be differentiated a second time, and says so.

[Note: a vocabulary that is cut]
Each rank has the classes of its slice of the weight. For each chunk the ranks exchange the largest logit of a
row, the sum of the exponentials under it and the logit of its label, in one all-gather of (3, chunk) numbers,
and (4, chunk) with label smoothing; and dx is summed over them, while dW is computed. Classes that pad the
vocabulary are not looked at.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from colossalai.communication import all_gather, outside_graphs, start_all_reduce
from colossalai.context import Axis
from colossalai.nn.layer import as_autocast
from colossalai.registry import LOSSES
from colossalai.tensor import spec_of

_CHUNK_ELEMENTS = 1 << 23  # of logits: 32 MiB in float32
_LEAST_ROWS = 256  # in a chunk: each reads and writes all of the gradient of the weight
_BLOCK_ELEMENTS = 1 << 18  # of logits between two products, on a CPU: 1 MiB, which stays in its cache

Wanted = tuple[bool, bool, bool]
Gradients = list[Tensor | None]


@dataclass(frozen=True, kw_only=True)
class VocabularySlice:
    """Which classes a rank has.

    Attributes:
        num_classes: How many there are on all ranks, without padding.
        axis: The ranks, each of which has a slice of the same size; None for one that has all classes.
    """

    num_classes: int
    axis: Axis | None = None

    def own(self, num_rows: int) -> tuple[int, int]:
        """Return the first class of this rank, and how many it has, for a slice of so many rows."""
        first = 0 if self.axis is None else self.axis.rank * num_rows
        return first, max(0, min(num_rows, self.num_classes - first))


@dataclass(frozen=True, kw_only=True)
class _Terms:
    """The options of the loss that say what a row's is; see the head of the module."""

    label_smoothing: float
    z_loss: float
    logits_scale: float
    softcap: float | None
    chunk: int | None
    vocabulary: VocabularySlice


@dataclass
class _Block:
    """The logits of some rows on their way to their gradient.

    Attributes:
        values: (rows, own classes), float32 or better: the exponentials under the largest, then the gradient.
        stored: Where the gradient goes; `values` itself, or its half-precision original.
        slope: The derivative of the soft cap; None without one.
        labels: (rows, 1), as columns of `values`, 0 where another rank has the class.
        is_own: (rows, 1), whether this rank has the class; None where it has all.
    """

    values: Tensor
    stored: Tensor
    slope: Tensor | None
    labels: Tensor
    is_own: Tensor | None


@LOSSES.register_module
class LinearCrossEntropyLoss(nn.Module):
    """Cross entropy of `x @ weight.T + bias`, without ever holding all these logits.

    It gives what `cross_entropy(linear(x, weight, bias).float(), labels)` gives, and its gradients, for the
    memory of a chunk of rows. Where no gradient is wanted none is computed, and of a frozen weight or input
    only the other's. The loss is in float32 or better, whatever the inputs are in. A weight that is cut along
    the vocabulary over ranks, as that of a vocabulary-parallel classifier of mode "1d", may be padded: the
    ranks have the same `x` and labels, and get the same loss. The formulas stand at the head of the module.

    Args:
        ignore_index: Labels that do not count.
        reduction: "mean" over the labels that count, "sum", or "none".
        label_smoothing: Share of the target that is spread evenly over all classes.
        z_loss: Coefficient of the mean of logsumexp^2 over the labels that count (2204.02311, section 5).
        logits_scale: What the logits are multiplied by.
        softcap: The logits become `softcap * tanh(logits / softcap)`, after the scale; None for no cap.
        chunk: Rows at a time; None for as many as 32 MiB of logits in float32, at least 256.

    Shape:
        x (..., hidden), weight (classes, hidden), labels (...), bias (classes,), token weights (...); the
        loss is a scalar, with "none" of the shape of the labels.

    Raises:
        ValueError: An option is not what it may be.
    """

    def __init__(
        self,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        logits_scale: float = 1.0,
        softcap: float | None = None,
        chunk: int | None = None,
    ) -> None:
        super().__init__()
        if reduction not in ("mean", "sum", "none"):
            raise ValueError(f"reduction is {reduction!r}; it must be 'mean', 'sum' or 'none'")
        if not 0.0 <= label_smoothing <= 1.0:
            raise ValueError(f"label_smoothing is {label_smoothing}; it must be from 0 to 1")
        if not (z_loss >= 0.0 and math.isfinite(z_loss)):
            raise ValueError(f"z_loss is {z_loss}; it must be a number of at least 0")
        if not (math.isfinite(logits_scale) and logits_scale != 0.0):
            raise ValueError(f"logits_scale is {logits_scale}; it must be a number other than 0")
        if softcap is not None and not (softcap > 0.0 and math.isfinite(softcap)):
            raise ValueError(f"softcap is {softcap}; it must be a number above 0, or None for no cap")
        if chunk is not None and (type(chunk) is not int or chunk < 1):
            raise ValueError(f"chunk is {chunk!r}; it must be a whole number of rows of at least 1, or None")
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.label_smoothing = label_smoothing
        self.z_loss = z_loss
        self.logits_scale = logits_scale
        self.softcap = softcap
        self.chunk = chunk

    def extra_repr(self) -> str:
        """Return what `print(model)` shows."""
        return f"reduction={self.reduction!r}, chunk={self.chunk}"

    def forward(
        self,
        x: Tensor,
        weight: Tensor,
        labels: Tensor,
        bias: Tensor | None = None,
        token_weights: Tensor | None = None,
        *,
        vocabulary: VocabularySlice | None = None,
    ) -> Tensor:
        """Return the loss.

        Args:
            x: (..., hidden).
            weight: (classes, hidden), or this rank's slice of it.
            labels: (...), whole numbers.
            bias: (classes,), cut as the weight is.
            token_weights: (...), what the loss of each label is multiplied by; the mean is over their sum.
            vocabulary: The classes of this rank; default: as the weight carries it.

        Raises:
            ValueError: The shapes or types do not fit, a label is not a class, or the weight is not cut along
                the vocabulary.
        """
        vocabulary = vocabulary or vocabulary_of(weight)
        self._check(x, weight, labels, bias, token_weights, vocabulary)
        flat, flat_labels = x.reshape(-1, x.shape[-1]), labels.reshape(-1).long()
        counted = flat_labels != self.ignore_index
        weights = None
        if token_weights is not None:
            wide = torch.promote_types(x.dtype, torch.float32)
            weights = token_weights.detach().reshape(-1).to(wide).masked_fill(~counted, 0.0)
        rows = None if bool(counted.all()) else counted.nonzero().squeeze(1)
        terms = _Terms(
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            logits_scale=self.logits_scale,
            softcap=self.softcap,
            chunk=self.chunk,
            vocabulary=vocabulary,
        )
        function: Callable[..., Tensor] = _LinearCrossEntropy.apply
        if torch.compiler.is_compiling():
            function = outside_graphs(function)
        loss = function(
            as_autocast(flat),
            as_autocast(weight),
            None if bias is None else as_autocast(bias),
            flat_labels,
            weights,
            rows,
            terms,
            self.reduction,
            torch.is_grad_enabled(),
        )
        return loss.view(labels.shape) if self.reduction == "none" else loss

    def _check(
        self,
        x: Tensor,
        weight: Tensor,
        labels: Tensor,
        bias: Tensor | None,
        token_weights: Tensor | None,
        vocabulary: VocabularySlice,
    ) -> None:
        by = type(self).__name__
        if weight.dim() != 2 or x.shape[-1:] != weight.shape[1:]:
            raise ValueError(
                f"{by} got x of shape {tuple(x.shape)} and a weight of shape {tuple(weight.shape)}; they "
                "must be (..., hidden) and (classes, hidden)"
            )
        if x.shape[:-1] != labels.shape:
            raise ValueError(
                f"{by} got x of shape {tuple(x.shape)} and labels of shape {tuple(labels.shape)}; the labels "
                "must have all dimensions of x but the last"
            )
        if labels.is_floating_point() or labels.dtype == torch.bool:
            raise ValueError(
                f"{by} got labels of type {labels.dtype}; they must be whole numbers, of classes"
            )
        if bias is not None and bias.shape != weight.shape[:1]:
            raise ValueError(
                f"{by} got a bias of shape {tuple(bias.shape)}; it must be ({len(weight)},), one number for "
                "each row of the weight"
            )
        given = {"weight": weight, "bias": bias}
        for name, operand in given.items():
            if operand is not None and as_autocast(operand).dtype != as_autocast(x).dtype:
                raise ValueError(
                    f"{by} got x of type {x.dtype} and a {name} of type {operand.dtype}: cast one"
                )
        if token_weights is not None and (token_weights.shape != labels.shape or token_weights.requires_grad):
            raise ValueError(
                f"{by} got token_weights of shape {tuple(token_weights.shape)}; they must have the shape of "
                f"the labels, {tuple(labels.shape)}, and need no gradient: detach them"
            )
        counted = labels[labels != self.ignore_index]
        if counted.numel() > 0:
            low, high = (bound.item() for bound in counted.aminmax())
            if low < 0 or high >= vocabulary.num_classes:
                raise ValueError(
                    f"{by} got labels from {low} to {high}, but there are {vocabulary.num_classes} classes, "
                    "from 0"
                )


def vocabulary_of(weight: Tensor) -> VocabularySlice:
    """Return the classes of a weight (classes, hidden), as its spec says, if it carries one.

    Raises:
        ValueError: It is cut otherwise than along the classes, over one axis.
    """
    spec = spec_of(weight)
    if spec is None or not spec.axes:
        return VocabularySlice(num_classes=len(weight))
    if len(spec.dims[0]) != 1 or spec.dims[1] or spec.stored_as is not None or spec.parts is not None:
        raise ValueError(
            f"a weight cut as {spec.dims}: the loss in chunks takes one that is cut along the classes over "
            "one axis, as in mode '1d', or not at all; use CrossEntropyLoss over logits"
        )
    return VocabularySlice(num_classes=spec.whole_shape[0], axis=spec.mesh.axis(spec.dims[0][0]))


class _LinearCrossEntropy(torch.autograd.Function):
    """See [Note: what a backward takes]."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        token_weights: Tensor | None,
        rows: Tensor | None,
        terms: _Terms,
        reduction: str,
        is_grad_enabled: bool,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, bias, labels, token_weights, rows)
        ctx.terms, ctx.reduction = terms, reduction
        ctx.types = (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        wanted = ctx.needs_input_grad[:3]
        is_late = reduction == "none" or not is_grad_enabled
        # float16 has no room for what is left of a gradient that is divided by the number of rows.
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
        if torch.is_grad_enabled():  # create_graph=True: what is linear in nothing but `grad` would be a lie
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
    """Return the gradients of x, weight and bias for what arrives at the loss, and forget them."""
    # See [Note: what a backward takes].
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
        # Mostly the loss is what the backward starts from, and 1 arrives.
        if factor.device.type != "cpu" or factor.item() != 1.0:
            for found in ready:
                if found is not None:
                    found.mul_(factor.to(found.dtype))
    return [None if found is None else found.to(kind) for found, kind in zip(ready, ctx.types, strict=True)]


def _row_factors(ctx: Any, token_weights: Tensor | None) -> Tensor | None:
    """Return what the gradients of the rows are multiplied by while they are computed; None for 1."""
    if not ctx.divides_early:
        return token_weights
    part = 1.0 / ctx.total
    return part if token_weights is None else token_weights * part


def _in_chunks(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    factors: Tensor | None,
    counted: Tensor | None,
    terms: _Terms,
    wanted: Wanted,
) -> tuple[Tensor, Gradients]:
    """Return the losses of all rows, 0 where a label does not count, and the gradients that are wanted.

    Args:
        x: (rows, hidden).
        weight: (classes, hidden), this rank's slice.
        bias: (classes,), or None.
        labels: (rows,).
        factors: (rows,), or one for all: what the gradients of the rows are multiplied by; None for 1.
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
    logits: Tensor, labels: Tensor, factors: Tensor | None, terms: _Terms, *, keep: bool
) -> Tensor:
    """Return the losses of rows, and put in the place of their logits the gradient.

    Args:
        logits: (rows, own classes).
        labels: (rows,), counted from the first own class.
        factors: What the gradients are multiplied by.
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


def _open(logits: Tensor, labels: Tensor, terms: _Terms) -> tuple[_Block, Tensor]:
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


def _close(block: _Block, stats: Tensor, factors: Tensor | None, terms: _Terms, *, keep: bool) -> Tensor:
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
    # See [Note: a vocabulary that is cut]: (ranks, 3 or 4, rows), added up in the same order everywhere.
    every = all_gather(stats.unsqueeze(0), 0, axis)
    largest = every[:, 0].amax(0)
    total = (every[:, 1] * (every[:, 0] - largest).exp()).sum(0)
    return largest, total, every[:, 2].sum(0), every[:, -1].sum(0)
