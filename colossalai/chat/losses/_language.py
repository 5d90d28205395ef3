"""Log-probabilities of tokens, their entropy, and the loss of supervised fine-tuning.

For logits x over a vocabulary, at one position, with L = log sum_j exp x_j and p_j = exp(x_j - L):

    log p_y = x_y - L                       d log p_y / dx_j = [j = y] - p_j
    H = - sum_j p_j log p_j                 dH / dx_j = - p_j log p_j - p_j H

[Note: logits in pieces]
Logits are the largest tensor of a step: (batch, length, vocabulary). The forward allocates nothing of their
size, and the backward only their gradient: both process a few positions of all sequences at a time, in
float32 or better, and store L, one number for each position. Logits of half precision are not copied as a
whole.
"""

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor

from colossalai.chat.losses._masked import Divisor, divide, fill_masked, require_shapes, token_mask, widen

_PIECE_ELEMENTS = 1 << 23  # of logits: 32 MiB in float32


def token_logprobs(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the log-probability of each label under the logits of its own position.

    Nothing is shifted: for a causal model pass `logits[:, :-1]` and `tokens[:, 1:]`. A position with a
    gradient of zero gives its logits a gradient of zero, even if they are not finite. There is no second
    derivative.

    Args:
        logits: (batch, length, vocabulary), of any floating-point dtype.
        labels: (batch, length), integers.

    Returns:
        (batch, length), float32, or float64 if the logits are that.

    Raises:
        ValueError: `logits` and `labels` differ in shape, or a label is not in the vocabulary.
    """
    _check_logits(logits)
    require_shapes(logits.shape[:2], "batch, length", labels=labels)
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise ValueError(f"labels are of type {labels.dtype}; they must be whole numbers, of tokens")
    if labels.numel() > 0:
        low, high = (int(bound) for bound in labels.aminmax())
        if low < 0 or high >= logits.shape[2]:
            raise ValueError(
                f"labels go from {low} to {high}, but the vocabulary has {logits.shape[2]} tokens, from 0; "
                "put any token where labels do not count, and mask the result there"
            )
    return cast(Tensor, _LabelLogprobs.apply(logits, labels.long()))


def entropy(logits: Tensor) -> Tensor:
    """Return the entropy of the next token at each position, in nats.

    A token with a logit of minus infinity does not contribute, and has no gradient. There is no second
    derivative.

    Args:
        logits: (batch, length, vocabulary), of any floating-point dtype.

    Returns:
        (batch, length), float32, or float64 if the logits are that.

    Raises:
        ValueError: `logits` lacks a dimension, or has an empty vocabulary.
    """
    _check_logits(logits)
    return cast(Tensor, _Entropy.apply(logits))


def sft_loss(logits: Tensor, labels: Tensor, mask: Tensor, *, num_tokens: Divisor | None = None) -> Tensor:
    """Return the mean cross entropy of the tokens in the mask, as in InstructGPT (2203.02155, 3.5).

    The function shifts: `labels[:, t]` is the token at t, predicted by `logits[:, t - 1]`, and `mask[:, t]`
    selects the token at t. The first token of a sequence is not predicted and never counts, nor do the last
    logits. Masked labels may have any value, including -100.

    Args:
        logits: (batch, length, vocabulary), output of a causal model for `labels`.
        labels: (batch, length), the tokens themselves, not shifted.
        mask: (batch, length), boolean or 0 and 1, aligned with `labels`: usually the completion.
        num_tokens: Divisor if this is a part of a batch: `mask[:, 1:].sum()`, summed over all parts.

    Raises:
        ValueError: `logits`, `labels` and `mask` differ in shape, a label that counts is not in the
            vocabulary, or no token counts and `num_tokens` is not given.
    """
    mask = token_mask(mask, labels=labels)
    # Shift the labels, not the logits: a slice of the logits would be copied for its gradient.
    counts = mask.roll(-1, 1)
    counts[:, -1:] = False
    logp = token_logprobs(logits, torch.where(counts, labels.roll(-1, 1), 0))
    return divide(-fill_masked(logp, counts).sum(), counts.sum(), num_tokens, name="num_tokens")


def sequence_logprobs(logp: Tensor, mask: Tensor, mean: bool = False) -> Tensor:
    """Return the log-probability of each completion.

    Args:
        logp: (batch, length), of the tokens.
        mask: (batch, length), boolean or 0 and 1: the tokens of the completion.
        mean: Whether to divide by the number of tokens, as for IPO.

    Returns:
        (batch,), float32 or better. Without tokens the sum is 0.

    Raises:
        ValueError: `logp` and `mask` differ in shape, or a sequence has no token and `mean` is set.
    """
    mask = token_mask(mask, logp=logp)
    total = fill_masked(logp, mask).sum(1)
    if not mean:
        return total
    counts = mask.sum(1)
    if bool((counts == 0).any()):
        raise ValueError(
            f"sequences {(counts == 0).nonzero().flatten().tolist()} have no token in mask, and so no mean: "
            "leave them out"
        )
    return total / counts


def _check_logits(logits: Tensor) -> None:
    if logits.dim() != 3 or logits.shape[2] == 0 or not logits.is_floating_point():
        raise ValueError(
            f"logits have shape {tuple(logits.shape)} and type {logits.dtype}; they must be (batch, length, "
            "vocabulary), of a floating-point type"
        )


def _pieces(logits: Tensor) -> Iterator[slice]:
    """Yield slices of positions; see [Note: logits in pieces]."""
    batch_size, length, vocab_size = logits.shape
    size = max(1, _PIECE_ELEMENTS // max(1, batch_size * vocab_size))
    for start in range(0, length, size):
        yield slice(start, start + size)


def _refuse_second_derivative() -> None:
    if torch.is_grad_enabled():  # create_graph=True would treat results of the pieces as constants
        raise RuntimeError(
            "token_logprobs, entropy and sft_loss have no second derivative: leave create_graph out, or use "
            "log_softmax over whole logits"
        )


class _LabelLogprobs(torch.autograd.Function):
    """The logit of the label minus logsumexp; see the module docstring."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        picked = widen(logits.gather(2, labels.unsqueeze(2)).squeeze(2))
        log_sums = torch.empty_like(picked)  # (batch, length)
        for piece in _pieces(logits):
            log_sums[:, piece] = widen(logits[:, piece]).logsumexp(2)
        ctx.save_for_backward(logits, labels, log_sums)
        return picked - log_sums

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        _refuse_second_derivative()
        logits, labels, log_sums = ctx.saved_tensors
        result = torch.empty_like(logits)
        log_sums, labels, grad = log_sums.unsqueeze(2), labels.unsqueeze(2), grad.unsqueeze(2)
        for piece in _pieces(logits):
            rows = (widen(logits[:, piece]) - log_sums[:, piece]).exp_().mul_(-grad[:, piece])
            rows.scatter_add_(2, labels[:, piece], grad[:, piece])
            # See [Note: masked places]: the logits of a position that is masked later may be NaN.
            result[:, piece] = rows.masked_fill_(grad[:, piece] == 0.0, 0.0)
        return result, None


class _Entropy(torch.autograd.Function):
    """The entropy of softmax; see the module docstring."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        log_sums = torch.empty_like(logits[..., 0], dtype=torch.promote_types(logits.dtype, torch.float32))
        entropies = torch.empty_like(log_sums)  # (batch, length)
        for piece in _pieces(logits):
            rows = widen(logits[:, piece])
            log_sums[:, piece] = rows.logsumexp(2)
            rows = (rows - log_sums[:, piece].unsqueeze(2)).exp_()
            entropies[:, piece] = torch.special.entr(rows).sum(2)  # entr(p) = -p log p, and 0 at 0
        ctx.save_for_backward(logits, log_sums, entropies)
        return entropies

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        _refuse_second_derivative()
        logits, log_sums, entropies = (
            saved if saved.dim() == 3 else saved.unsqueeze(2) for saved in ctx.saved_tensors
        )
        result = torch.empty_like(logits)
        grad = grad.unsqueeze(2)
        for piece in _pieces(logits):
            rows = (widen(logits[:, piece]) - log_sums[:, piece]).exp_()
            rows = torch.special.entr(rows).sub_(rows.mul_(entropies[:, piece])).mul_(grad[:, piece])
            result[:, piece] = rows.masked_fill_(grad[:, piece] == 0.0, 0.0)
        return result
