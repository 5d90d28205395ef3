"""Group relative policy optimization (2402.03300) and its relatives: advantages without a critic.

Each prompt has a group of completions, and the advantage of one is its reward relative to the group. The loss
is that of PPO, in the variants of the papers:

    GRPO        2402.03300      level="token"       normalize="sequence"
    DAPO        2503.14476      level="token"       normalize="batch", epsilon_high=0.28
    Dr. GRPO    2503.20783      level="token"       normalize="constant", advantages with scale="none"
    GSPO        2507.18071      level="sequence"    normalize="sequence", epsilon=3e-4, epsilon_high=4e-4

The defaults are those of TRL 1.16: level="token", normalize="batch", epsilon=0.2 on both sides.
"""

from typing import Literal

import torch
from torch import Tensor

from colossalai.chat.losses._kl import kl
from colossalai.chat.losses._masked import Divisor, divide, fill_masked, require_shapes, token_mask, widen
from colossalai.chat.losses._ppo import clipped_surrogate, require_clip

_DEVIATION_EPS = 1e-4

Normalize = Literal["sequence", "batch", "constant"]


@torch.no_grad()
def group_advantages(
    rewards: Tensor, group_size: int, scale: Literal["group", "batch", "none"] = "group"
) -> Tensor:
    """Return the advantage of each completion over its group: reward - mean, over the deviation.

    The deviation is the sample's, with the divisor n - 1, and 1e-4 is added to it, as in TRL. Equal rewards
    give exact zeros.

    Args:
        rewards: (batch,), the completions of one prompt next to each other.
        group_size: Number of completions of a prompt, at least 2.
        scale: Divisor: the deviation of the "group" (2402.03300), of the whole "batch" (2508.08221), or
            "none" (2503.20783), which does not favour prompts that are too easy or too hard. For "batch",
            gather a batch that is distributed over ranks first.

    Returns:
        (batch,), float32 or better, without gradient.

    Raises:
        ValueError: `rewards` is not (batch,), `group_size` is below 2 or does not divide the batch, or
            `scale` is unknown.
    """
    require_shapes(rewards.shape, "batch", rewards=rewards)
    if group_size < 2:
        raise ValueError(f"group_size is {group_size}; it must be at least 2: one alone is its own mean")
    if len(rewards) % group_size != 0:
        raise ValueError(
            f"there are {len(rewards)} rewards, which group_size {group_size} does not divide; give whole "
            "groups"
        )
    groups = widen(rewards).view(-1, group_size)
    # Relative to the first of the group, so that equal rewards are exactly 0.
    centred = groups - groups[:, :1]
    centred = centred - centred.mean(1, keepdim=True)
    if scale == "group":
        centred = centred / (centred.std(1, keepdim=True) + _DEVIATION_EPS)
    elif scale == "batch":
        centred = centred / (groups.std() + _DEVIATION_EPS)
    elif scale != "none":
        raise ValueError(f"scale is {scale!r}; it must be 'group', 'batch' or 'none'")
    return centred.flatten()


def grpo_loss(  # noqa: PLR0913 - four tensors, and how the papers differ
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    level: Literal["token", "sequence"] = "token",
    normalize: Normalize = "batch",
    max_length: int | None = None,
    ref_logp: Tensor | None = None,
    kl_coef: float = 0.0,
    num_tokens: Divisor | None = None,
    num_sequences: Divisor | None = None,
) -> Tensor:
    """Return the loss of GRPO, or of a variant of it; see the module docstring.

    At each token it is -min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A) + kl_coef k3. A sequence without
    tokens has a loss of 0, and counts as a sequence.

    Args:
        logp: (batch, length), of the policy in training.
        old_logp: (batch, length), of the policy that drew the tokens; gets no gradient.
        advantages: (batch,), or (batch, length); get no gradient.
        mask: (batch, length), boolean or 0 and 1: the drawn tokens.
        epsilon: Ratios have no gradient below 1 - epsilon.
        epsilon_high: Ratios have no gradient above 1 + epsilon_high, which may exceed 1. Default: `epsilon`.
        level: The ratio r of a "token" is its own, or, for all tokens of a "sequence", exp of the mean of
            logp - old_logp over them.
        normalize: "batch": the mean over all tokens. "sequence": the mean over the tokens of a sequence, then
            over the sequences. "constant": the sum divided by sequences times `max_length`.
        max_length: Maximum length of a drawn completion, for "constant" only.
        ref_logp: (batch, length), of the reference; gets no gradient. Only used if `kl_coef` is not 0.
        kl_coef: Coefficient of k3, the third estimator of `kl`; at least 0.
        num_tokens: Divisor for "batch" if this is a part of one: `mask.sum()`, summed over all parts.
        num_sequences: Divisor for "sequence" and "constant" in this case: the sequences of all parts.

    Raises:
        ValueError: `logp`, `old_logp`, `advantages`, `mask` and `ref_logp` differ in shape, an option is
            unknown, out of range, missing, or has no effect with the others, or no token counts and the
            divisor is not given.
    """
    mask = token_mask(mask, logp=logp, old_logp=old_logp)
    if advantages.dim() == 1:
        require_shapes(mask.shape[:1], "batch", advantages=advantages)
        advantages = advantages.unsqueeze(1).expand(mask.shape)
    require_shapes(mask.shape, "batch, length", advantages=advantages)
    high = epsilon if epsilon_high is None else epsilon_high
    require_clip(epsilon, "epsilon")
    if not high > 0.0:
        raise ValueError(f"epsilon_high is {high}; it must be above 0, or None for that of epsilon")
    counts = mask.sum(1, keepdim=True)
    logp = fill_masked(logp, mask)
    log_ratio = logp - fill_masked(old_logp.detach(), mask)
    if level == "sequence":
        mean = log_ratio.sum(1, keepdim=True) / counts.clamp(min=1)
        log_ratio = torch.where(mask, mean, 0.0)
    elif level != "token":
        raise ValueError(f"level is {level!r}; it must be 'token' or 'sequence'")
    advantages = fill_masked(advantages.detach(), mask)
    losses = -clipped_surrogate(log_ratio, advantages, low=epsilon, high=high)  # 0 where the mask is False
    losses = losses + _reference_penalty(logp, ref_logp, mask, kl_coef)
    return _normalize(
        losses,
        counts,
        normalize=normalize,
        max_length=max_length,
        num_tokens=num_tokens,
        num_sequences=num_sequences,
    )


def _reference_penalty(logp: Tensor, ref_logp: Tensor | None, mask: Tensor, kl_coef: float) -> Tensor | float:
    """Return kl_coef k3 at each token, 0 where the mask is False, for a masked `logp`."""
    if not kl_coef >= 0.0:
        raise ValueError(f"kl_coef is {kl_coef}; it must be at least 0")
    if kl_coef == 0.0:
        return 0.0
    if ref_logp is None:
        raise ValueError(f"kl_coef is {kl_coef}, but ref_logp is None; give the reference, or a kl_coef of 0")
    token_mask(mask, ref_logp=ref_logp)
    return kl_coef * kl(logp, fill_masked(ref_logp.detach(), mask), "k3")


def _normalize(
    losses: Tensor,
    counts: Tensor,
    *,
    normalize: Normalize,
    max_length: int | None,
    num_tokens: Divisor | None,
    num_sequences: Divisor | None,
) -> Tensor:
    """Return the mean of losses that are 0 without a token; the options are those of `grpo_loss`.

    Args:
        losses: (batch, length).
        counts: (batch, 1), number of tokens of each sequence.
        normalize: Kind of mean.
        max_length: For "constant".
        num_tokens: For "batch".
        num_sequences: For the others.
    """
    if normalize not in ("sequence", "batch", "constant"):
        raise ValueError(f"normalize is {normalize!r}; it must be 'sequence', 'batch' or 'constant'")
    if (max_length is None) == (normalize == "constant") or (max_length is not None and max_length < 1):
        raise ValueError(
            f"max_length is {max_length} with normalize {normalize!r}; it must be a length of at least 1 for "
            "'constant', and None for the others"
        )
    if (num_sequences if normalize == "batch" else num_tokens) is not None:
        used, unused = ("tokens", "sequences") if normalize == "batch" else ("sequences", "tokens")
        raise ValueError(f"num_{unused} has no effect with normalize {normalize!r}; give num_{used}")
    if normalize == "batch":
        return divide(losses.sum(), counts.sum(), num_tokens, name="num_tokens")
    per_sequence = losses.sum(1) / (max_length or counts.squeeze(1).clamp(min=1))
    # A batch without any token is an error, as in all losses; a sequence without tokens has a loss of 0.
    return divide(per_sequence.sum(), counts.any() * len(counts), num_sequences, name="num_sequences")
