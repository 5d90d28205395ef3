"""Estimators of the KL divergence from samples, and KL-penalized rewards.

With d = log pi(x) - log pi_ref(x) at a token x that the policy pi drew, the estimators of KL(pi | pi_ref) by
J. Schulman ("Approximating KL Divergence", joschu.net/blog/kl-approx.html, 2020) are

    k1 = d                      unbiased, of either sign
    k2 = d^2 / 2                biased, of small variance
    k3 = exp(-d) - 1 + d        unbiased, never negative
"""

from typing import Literal

import torch
from torch import Tensor

from colossalai.chat.losses._masked import fill_masked, require_shapes, token_mask, widen


def kl(logp: Tensor, ref_logp: Tensor, kind: Literal["k1", "k2", "k3"] = "k1") -> Tensor:
    """Return an estimate of the KL divergence of the policy from the reference at each token.

    Both inputs get gradients. The values are estimates of the divergence; the gradient of k1 or k3 is not an
    estimate of the gradient of the divergence.

    Args:
        logp: Of the policy that drew the tokens; (batch, length), or any shape.
        ref_logp: Of the reference, of the same shape.
        kind: The estimator; see the module docstring.

    Returns:
        The shape of `logp`, float32 or better. A k3 beyond the range of its dtype is infinity.

    Raises:
        ValueError: `logp` and `ref_logp` differ in shape, or `kind` is unknown.
    """
    if logp.shape != ref_logp.shape:
        raise ValueError(
            f"logp has shape {tuple(logp.shape)} and ref_logp {tuple(ref_logp.shape)}; give one shape"
        )
    difference = widen(logp) - widen(ref_logp)
    if kind == "k1":
        return difference
    if kind == "k2":
        return 0.5 * difference.square()
    if kind == "k3":
        # expm1 is accurate for a policy near the reference, where exp(-d) - 1 cancels.
        return torch.expm1(-difference) + difference
    raise ValueError(f"kind is {kind!r}; it must be 'k1', 'k2' or 'k3'")


@torch.no_grad()
def sequence_rewards(
    reward: Tensor, logp: Tensor, ref_logp: Tensor, mask: Tensor, kl_coef: float, *, mean: bool = False
) -> Tensor:
    """Return the reward of each sequence, less its KL penalty: `reward - kl_coef * sum(logp - ref_logp)`.

    By default the penalty is the k1 estimate summed over the tokens: beta log(pi / pi_ref) of the whole
    completion (2203.02155, equation 2), equal to the sum of `token_rewards`. With `mean` it is the mean over
    the tokens, which does not grow with the length of a completion.

    Args:
        reward: (batch,), of the reward model.
        logp: (batch, length), of the policy that drew the tokens.
        ref_logp: (batch, length), of the reference.
        mask: (batch, length), boolean or 0 and 1: the drawn tokens.
        kl_coef: Coefficient of the penalty; 0 for none.
        mean: Whether to take the mean over the tokens instead of the sum.

    Returns:
        (batch,), float32 or better, without gradient. A sequence without tokens has no penalty.

    Raises:
        ValueError: `logp`, `ref_logp`, `mask` and `reward` differ in shape, or `kl_coef` is below 0.
    """
    penalty, mask = _penalty(reward, logp, ref_logp, mask, kl_coef)
    total = penalty.sum(1)
    return widen(reward) - (total / mask.sum(1).clamp(min=1) if mean else total)


@torch.no_grad()
def token_rewards(reward: Tensor, logp: Tensor, ref_logp: Tensor, mask: Tensor, kl_coef: float) -> Tensor:
    """Return a reward for each token: its KL penalty, by k1, plus the sequence's reward at the last token.

    The result is an input of `gae` (1909.08593, 2203.02155). The last token is the last one of the mask,
    which is not the last of the completion if that was truncated.

    Args:
        reward: (batch,), of the reward model.
        logp: (batch, length), of the policy that drew the tokens.
        ref_logp: (batch, length), of the reference.
        mask: (batch, length), boolean or 0 and 1: the drawn tokens.
        kl_coef: Coefficient of the penalty; 0 for none.

    Returns:
        (batch, length), float32 or better, without gradient; 0 where the mask is False.

    Raises:
        ValueError: `logp`, `ref_logp`, `mask` and `reward` differ in shape, `kl_coef` is below 0, or a
            sequence has no token for its reward.
    """
    penalty, mask = _penalty(reward, logp, ref_logp, mask, kl_coef)
    is_empty = ~mask.any(1)
    if bool(is_empty.any()):
        raise ValueError(
            f"sequences {is_empty.nonzero().flatten().tolist()} have no token in mask, and so no place for "
            "their reward: leave them out"
        )
    is_last = mask & (mask.flip(1).cumsum(1).flip(1) == 1)  # no other token counts from here to the end
    return torch.where(is_last, widen(reward).unsqueeze(1), 0.0) - penalty


def _penalty(
    reward: Tensor, logp: Tensor, ref_logp: Tensor, mask: Tensor, kl_coef: float
) -> tuple[Tensor, Tensor]:
    """Return the penalty of each token, 0 where the mask is False, and the mask as booleans."""
    mask = token_mask(mask, logp=logp, ref_logp=ref_logp)
    require_shapes(mask.shape[:1], "batch", reward=reward)
    if not kl_coef >= 0.0:
        raise ValueError(f"kl_coef is {kl_coef}; it must be at least 0: the penalty is subtracted")
    return kl_coef * kl(fill_masked(logp, mask), fill_masked(ref_logp, mask), "k1"), mask
