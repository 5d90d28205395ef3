"""Preference losses for pairs of a chosen and a rejected completion: reward models and DPO.

Both maximize the probability of the choice by Bradley and Terry, sigmoid(r_chosen - r_rejected). A reward
model learns r itself (InstructGPT, 2203.02155); in DPO (2305.18290) the policy is its own reward model, with

    r(x, y) = beta (log pi(y | x) - log pi_ref(y | x))          h = (r_chosen - r_rejected) / beta
"""

import math
from typing import Literal, NamedTuple

from torch import Tensor
from torch.nn import functional

from colossalai.chat.losses._masked import Divisor, divide, require_shapes, widen


def log_sig_loss(chosen: Tensor, rejected: Tensor, *, num_sequences: Divisor | None = None) -> Tensor:
    """Return the mean of -log sigmoid(chosen - rejected), a reward model's loss (2203.02155, equation 1).

    It equals log(1 + exp(rejected - chosen)), hence the alias `log_exp_loss`. It is finite and exact at any
    difference. The paper's factor 1 / (K choose 2), for the pairs of one prompt, is the mean if every prompt
    has the same number.

    Args:
        chosen: (batch,), rewards of the preferred completions.
        rejected: (batch,), rewards of the others.
        num_sequences: Divisor if this is a part of a batch: the pairs of all parts.

    Raises:
        ValueError: `chosen` and `rejected` differ in shape or are not (batch,), or there are none and
            `num_sequences` is not given.
    """
    require_shapes(chosen.shape, "batch", chosen=chosen, rejected=rejected)
    # functional.softplus is linear above 20, with an error of 2e-9 there.
    losses = -functional.logsigmoid(widen(chosen) - widen(rejected))
    return divide(losses.sum(), len(losses), num_sequences, name="num_sequences")


log_exp_loss = log_sig_loss


class DPOResult(NamedTuple):
    """The loss of DPO, and the implied rewards.

    Attributes:
        loss: A scalar.
        chosen_rewards: (batch,), beta (log pi - log pi_ref) of the chosen completions, without gradient.
        rejected_rewards: (batch,), the same of the rejected ones.
    """

    loss: Tensor
    chosen_rewards: Tensor
    rejected_rewards: Tensor


def dpo_loss(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    *,
    beta: float = 0.1,
    kind: Literal["sigmoid", "ipo"] = "sigmoid",
    label_smoothing: float = 0.0,
    num_sequences: Divisor | None = None,
) -> DPOResult:
    """Return the loss of direct preference optimization (2305.18290), or of its variant IPO (2310.12036).

    With h as in the module docstring, the mean over the pairs of

        sigmoid     - (1 - e) log sigmoid(beta h) - e log sigmoid(-beta h)
        ipo         (h - 1 / (2 beta))^2

    with the label smoothing e: the assumed share of wrong labels (conservative DPO, E. Mitchell, "A note
    on DPO with noisy preferences", 2023). "sigmoid" takes log-probabilities of whole completions, sums over
    tokens; "ipo" takes means over tokens, as in TRL: otherwise the target 1 / (2 beta) would depend on the
    length. `sequence_logprobs` computes both.

    Args:
        policy_chosen: (batch,), log-probabilities of the chosen completions under the policy in training.
        policy_rejected: (batch,), of the rejected ones.
        ref_chosen: (batch,), under the reference; get no gradient.
        ref_rejected: (batch,), under the reference; get no gradient.
        beta: Strength of the divergence penalty, above 0 and finite; tau in the paper of "ipo".
        kind: The loss.
        label_smoothing: e, from 0 to below one half; for "sigmoid" only.
        num_sequences: Divisor if this is a part of a batch: the pairs of all parts.

    Raises:
        ValueError: `policy_chosen` and the others differ in shape or are not (batch,), `beta`, `kind` or
            `label_smoothing` is out of range, or there are no pairs and `num_sequences` is not given.
    """
    require_shapes(
        policy_chosen.shape,
        "batch",
        policy_chosen=policy_chosen,
        policy_rejected=policy_rejected,
        ref_chosen=ref_chosen,
        ref_rejected=ref_rejected,
    )
    if not 0.0 < beta < math.inf:
        raise ValueError(f"beta is {beta}; it must be above 0, and finite")
    if not 0.0 <= label_smoothing < 0.5:
        raise ValueError(
            f"label_smoothing is {label_smoothing}; it must be from 0 to below 0.5, where labels are random"
        )
    chosen = widen(policy_chosen) - widen(ref_chosen.detach())
    rejected = widen(policy_rejected) - widen(ref_rejected.detach())
    margin = chosen - rejected
    if kind == "sigmoid":
        losses = -functional.logsigmoid(beta * margin)
        if label_smoothing > 0.0:
            wrong = -functional.logsigmoid(-beta * margin)
            losses = (1.0 - label_smoothing) * losses + label_smoothing * wrong
    elif kind == "ipo":
        if label_smoothing > 0.0:
            raise ValueError(
                f"label_smoothing is {label_smoothing}, but kind 'ipo' has none; it must be 0 there"
            )
        losses = (margin - 0.5 / beta).square()
    else:
        raise ValueError(f"kind is {kind!r}; it must be 'sigmoid' or 'ipo'")
    return DPOResult(
        divide(losses.sum(), len(losses), num_sequences, name="num_sequences"),
        beta * chosen.detach(),
        beta * rejected.detach(),
    )
