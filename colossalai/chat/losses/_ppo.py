"""Proximal policy optimization (1707.06347): advantages, and the losses of policy and critic.

With r = exp(logp - old_logp), the ratio of the probabilities of a token, and its advantage A, the loss is

    - min(r A, clip(r, 1 - c, 1 + c) A)

The second branch is constant in r. See [Note: the clipped branch].
"""

import math

import torch
from torch import Tensor

from colossalai.chat.losses._masked import Divisor, divide, fill_masked, token_mask

_VARIANCE_EPS = 1e-8


def clipped_surrogate(log_ratio: Tensor, advantages: Tensor, *, low: float, high: float) -> Tensor:
    """Return min(r A, clip(r, 1 - low, 1 + high) A) at each token.

    [Note: the clipped branch]
    `torch.min` of both branches passes a gradient of 0 to the branch that is not selected, and 0 times the
    derivative of an overflowed ratio is NaN. So the branch is selected by the logarithm of the ratio, and
    only the selected exponential is computed. An overflowed ratio without clipping, which requires a negative
    advantage, gives a loss of infinity, as in the formula. NaN stays NaN.

    Args:
        log_ratio: (batch, length), logp - old_logp.
        advantages: (batch, length), without gradient.
        low: Lower clip, between 0 and 1.
        high: Upper clip, above 0.
    """
    rises = advantages > 0.0
    is_clipped = torch.where(rises, log_ratio > math.log1p(high), log_ratio < math.log1p(-low))
    # An advantage of 0 selects the constant, too: it is 0 for any ratio, including infinity.
    is_clipped |= (advantages == 0.0) & ~log_ratio.isnan()
    constant = torch.where(rises, advantages * (1.0 + high), advantages * (1.0 - low))
    return torch.where(is_clipped, constant, advantages * torch.where(is_clipped, 0.0, log_ratio).exp())


def require_clip(clip: float, name: str) -> None:
    """Check the lower clip of a ratio; `name` is the name of the argument in the caller.

    Raises:
        ValueError: `clip` is not between 0 and 1.
    """
    if not 0.0 < clip < 1.0:
        raise ValueError(f"{name} is {clip}; it must be between 0 and 1: 1 - {name} is a ratio")


def ppo_policy_loss(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip: float = 0.2,
    *,
    num_tokens: Divisor | None = None,
) -> Tensor:
    """Return the clipped surrogate loss of PPO, the mean over the tokens in the mask.

    Args:
        logp: (batch, length), of the policy in training.
        old_logp: (batch, length), of the policy that drew the tokens; gets no gradient.
        advantages: (batch, length), from `gae` and `whiten`; get no gradient.
        mask: (batch, length), boolean or 0 and 1: the drawn tokens.
        clip: Ratios have no gradient beyond 1 - clip and 1 + clip.
        num_tokens: Divisor if this is a part of a batch: `mask.sum()`, summed over all parts.

    Raises:
        ValueError: `logp`, `old_logp`, `advantages` and `mask` differ in shape, `clip` is not between 0 and
            1, or no token counts and `num_tokens` is not given.
    """
    mask = token_mask(mask, logp=logp, old_logp=old_logp, advantages=advantages)
    require_clip(clip, "clip")
    log_ratio = fill_masked(logp, mask) - fill_masked(old_logp.detach(), mask)
    surrogate = clipped_surrogate(log_ratio, fill_masked(advantages.detach(), mask), low=clip, high=clip)
    return divide(-surrogate.sum(), mask.sum(), num_tokens, name="num_tokens")


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    clip: float = 0.2,
    *,
    num_tokens: Divisor | None = None,
) -> Tensor:
    """Return half the squared error of the critic, with values clipped to `clip` around the old ones.

    At each token it is the larger error of the value and of the value clipped to `old_values` - clip and
    + clip; one half of the mean over the tokens in the mask. The clipping follows the authors' own code of
    PPO, and of TRL; the paper (1707.06347) has the plain error, for `clip=math.inf`.

    Args:
        values: (batch, length), of the critic in training.
        old_values: (batch, length), of the critic when the tokens were drawn; get no gradient.
        returns: (batch, length), from `gae`; get no gradient.
        mask: (batch, length), boolean or 0 and 1: the drawn tokens.
        clip: Maximum change of a value.
        num_tokens: Divisor if this is a part of a batch: `mask.sum()`, summed over all parts.

    Raises:
        ValueError: `values`, `old_values`, `returns` and `mask` differ in shape, `clip` is not above 0, or no
            token counts and `num_tokens` is not given.
    """
    mask = token_mask(mask, values=values, old_values=old_values, returns=returns)
    if not clip > 0.0:
        raise ValueError(f"clip is {clip}; it must be above 0, or math.inf for no clipping")
    values, target = fill_masked(values, mask), fill_masked(returns.detach(), mask)
    old = fill_masked(old_values.detach(), mask)
    errors = (values - target).square()
    clipped_errors = (values.clamp(old - clip, old + clip) - target).square()
    total = 0.5 * torch.maximum(errors, clipped_errors).sum()
    return divide(total, mask.sum(), num_tokens, name="num_tokens")


@torch.no_grad()
def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float = 1.0, lam: float = 0.95
) -> tuple[Tensor, Tensor]:
    """Return generalized advantage estimates (1506.02438, equation 16) and returns.

    A_t = sum_l (gamma lam)^l delta_{t+l} with delta_t = r_t + gamma V_{t+1} - V_t, over the positions of the
    mask only: the successor of a position is the next position in the mask, so padding before, after and in
    between has no influence, and V after the last position is 0. The returns are A_t + V_t, the target of the
    critic.

    Args:
        rewards: (batch, length), from `token_rewards`.
        values: (batch, length), of the critic, before each token.
        mask: (batch, length), boolean or 0 and 1: the drawn tokens.
        gamma: Discount of later rewards, from 0 to 1.
        lam: Between the one-step estimate, 0, and the whole sum of rewards, 1.

    Returns:
        (batch, length) twice, float32 or better, without gradient; 0 where the mask is False.

    Raises:
        ValueError: `rewards`, `values` and `mask` differ in shape, or `gamma` or `lam` is not from 0 to 1.
    """
    mask = token_mask(mask, rewards=rewards, values=values)
    if not (0.0 <= gamma <= 1.0 and 0.0 <= lam <= 1.0):
        raise ValueError(f"gamma is {gamma} and lam {lam}; they must be from 0 to 1")
    rewards, values = fill_masked(rewards, mask), fill_masked(values, mask)
    advantages = torch.zeros_like(rewards + values)
    later, next_values = advantages.new_zeros(len(mask)), advantages.new_zeros(len(mask))
    for t in reversed(range(mask.shape[1])):
        now = rewards[:, t] + gamma * next_values - values[:, t] + gamma * lam * later
        later = torch.where(mask[:, t], now, later)
        next_values = torch.where(mask[:, t], values[:, t], next_values)
        advantages[:, t] = torch.where(mask[:, t], now, 0.0)
    return advantages, advantages + values


@torch.no_grad()
def whiten(advantages: Tensor, mask: Tensor) -> Tensor:
    """Return advantages of mean 0 and variance 1 over the tokens in the mask.

    It is (A - mean) / sqrt(variance + 1e-8) with the unbiased variance, as in TRL. Pass all tokens of a
    batch: whiten before it is divided into microbatches. A single token gives 0.

    Args:
        advantages: (batch, length).
        mask: (batch, length), boolean or 0 and 1.

    Returns:
        (batch, length), float32 or better, without gradient; 0 where the mask is False.

    Raises:
        ValueError: `advantages` and `mask` differ in shape, or no token counts.
    """
    mask = token_mask(mask, advantages=advantages)
    count = mask.sum()
    mean = divide(fill_masked(advantages, mask).sum(), count, None, name="tokens")
    centred = fill_masked(advantages - mean, mask)
    variance = centred.square().sum() / (count - 1).clamp(min=1)
    return centred * torch.rsqrt(variance + _VARIANCE_EPS)


def ptx_loss(policy: Tensor, lm: Tensor, ptx_coef: float) -> Tensor:
    """Return `policy + ptx_coef * lm`: PPO with a share of pretraining (PPO-ptx, 2203.02155, equation 2).

    The coefficient of the paper is 27.8, with both losses as means.

    Args:
        policy: The loss of the policy, a scalar.
        lm: The loss of the language model on pretraining texts, such as `sft_loss`, a scalar.
        ptx_coef: Factor of `lm`, at least 0.

    Raises:
        ValueError: `policy` or `lm` is not a scalar, or `ptx_coef` is below 0.
    """
    if policy.dim() != 0 or lm.dim() != 0:
        raise ValueError(
            f"policy has shape {tuple(policy.shape)} and lm {tuple(lm.shape)}; they must be scalars: means "
            "over their tokens"
        )
    if not ptx_coef >= 0.0:
        raise ValueError(f"ptx_coef is {ptx_coef}; it must be at least 0")
    return policy + ptx_coef * lm
