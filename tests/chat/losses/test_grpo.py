"""GRPO and its relatives, against loops over sequences and tokens."""

import itertools
import math
import statistics
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from colossalai.chat.losses import group_advantages, grpo_loss, ppo_policy_loss
from tests.chat.losses.parts import (
    assert_masked_places_have_no_say,
    assert_parts_add_up,
    assert_same,
    masks,
    normal,
    with_grads,
)
from tests.chat.losses.test_ppo import one_surrogate

pytestmark = pytest.mark.unit

MAX_LENGTH = 11
CELLS = list(itertools.product(("token", "sequence"), ("sequence", "batch", "constant"), (0.0, 0.3)))


def options(normalize: str, **others: Any) -> dict[str, Any]:
    return {"normalize": normalize, "max_length": MAX_LENGTH if normalize == "constant" else None, **others}


def loop_grpo(
    logp: Tensor,
    old: Tensor,
    advantages: Tensor,
    ref: Tensor,
    mask: Tensor,
    *,
    level: str,
    normalize: str,
    kl_coef: float,
    low: float,
    high: float,
) -> Tensor:
    old, ref = old.detach(), ref.detach()
    sums = []
    for b in range(len(mask)):
        places = [t for t in range(mask.shape[1]) if mask[b, t]]
        total = 0 * logp[0, 0]
        for t in places:
            if level == "token":
                ratio = (logp[b, t] - old[b, t]).exp()
            else:
                ratio = (sum(logp[b, s] - old[b, s] for s in places) / len(places)).exp()
            advantage = float((advantages[b] if advantages.dim() == 1 else advantages[b, t]).detach())
            away = ref[b, t] - logp[b, t]
            total = total - one_surrogate(ratio, advantage, low, high) + kl_coef * (away.exp() - away - 1)
        sums.append((total, len(places)))
    if normalize == "sequence":
        return sum(total / max(1, count) for total, count in sums) / len(sums)
    if normalize == "batch":
        return sum(total for total, _ in sums) / sum(count for _, count in sums)
    return sum(total for total, _ in sums) / (len(sums) * MAX_LENGTH)


@pytest.mark.parametrize(("level", "normalize", "kl_coef"), CELLS)
@given(mask=masks(), seed=st.integers(0, 99), per_token=st.booleans())
@settings(max_examples=8)
def test_the_loss_is_that_of_a_loop(
    level: str, normalize: str, kl_coef: float, mask: Tensor, seed: int, per_token: bool
) -> None:
    logp, old, ref = (normal(seed + number, *mask.shape, scale=0.4) for number in range(3))
    advantages = normal(seed + 3, *(mask.shape if per_token else mask.shape[:1]))
    chosen = options(normalize, level=level, kl_coef=kl_coef, epsilon=0.1, epsilon_high=0.3)
    found = with_grads(
        lambda x, o, a, r: grpo_loss(x, o, a, mask, ref_logp=r, **chosen), logp, old, advantages, ref
    )
    terms = {"level": level, "normalize": normalize, "kl_coef": kl_coef, "low": 0.1, "high": 0.3}
    wanted = with_grads(lambda x, o, a, r: loop_grpo(x, o, a, r, mask, **terms), logp, old, advantages, ref)
    assert_same(found, wanted)
    assert not any(grad.any() for grad in found[2:])


@pytest.mark.parametrize(("level", "normalize", "kl_coef"), CELLS)
def test_parts_of_a_batch_add_up(level: str, normalize: str, kl_coef: float) -> None:
    mask = normal(9, 6, 4) > 0
    mask[2] = False  # a sequence without tokens, and a part that is only that
    tensors = [normal(0, 6, 4), normal(1, 6, 4), normal(2, 6), normal(3, 6, 4), mask]
    divisor = {"num_tokens": mask.sum()} if normalize == "batch" else {"num_sequences": 6}

    def loss(logp: Tensor, old: Tensor, a: Tensor, ref: Tensor, mask: Tensor, **divisor: Any) -> Tensor:
        return grpo_loss(
            logp, old, a, mask, ref_logp=ref, **options(normalize, level=level, kl_coef=kl_coef), **divisor
        )

    for sizes in ([2, 1, 3], [4, 2], [6], [0, 6]):
        assert_parts_add_up(lambda *part: loss(*part, **divisor), loss, tensors, sizes)


@pytest.mark.parametrize(("level", "normalize", "kl_coef"), CELLS)
def test_masked_places_have_no_say(level: str, normalize: str, kl_coef: float) -> None:
    mask = torch.tensor([[True, False, True], [False, False, False], [True, True, False]])
    tensors = [normal(number, 3, 3) for number in range(4)]
    chosen = options(normalize, level=level, kl_coef=kl_coef)
    assert_masked_places_have_no_say(
        lambda x, o, a, r: grpo_loss(x, o, a, mask, ref_logp=r, **chosen), tensors, mask
    )
    per_sequence = torch.tensor([1.0, math.nan, -1.0], dtype=torch.float64)  # of one without tokens
    loss, grad = with_grads(
        lambda x: grpo_loss(x, tensors[1], per_sequence, mask, ref_logp=tensors[3], **chosen), tensors[0]
    )
    assert loss.isfinite()
    assert grad.isfinite().all()


def test_relatives_that_are_the_same() -> None:
    logp, old, mask = normal(0, 3, 4, scale=0.3), normal(1, 3, 4, scale=0.3), normal(2, 3, 4) > -1
    advantages = normal(3, 3, 4)
    torch.testing.assert_close(
        grpo_loss(logp, old, advantages, mask, normalize="batch"),
        ppo_policy_loss(logp, old, advantages, mask),
    )
    # On the policy that drew the tokens the gradient is that of REINFORCE, token by token.
    per_sequence = normal(4, 3)
    for level in ("token", "sequence"):
        loss, grad = with_grads(
            lambda x, level=level: grpo_loss(x, logp, per_sequence, mask, level=level, normalize="sequence"),
            logp,
        )
        weights = mask / mask.sum(1, keepdim=True) / 3
        torch.testing.assert_close(loss, -(per_sequence * (mask.sum(1) > 0)).sum() / 3)
        torch.testing.assert_close(grad, -per_sequence.unsqueeze(1) * weights)


def test_the_ratio_of_a_sequence_is_a_mean() -> None:
    """A long completion overflows as a product of ratios, not as their geometric mean."""
    logp, old = torch.full((1, 500), 0.1), torch.zeros(1, 500)
    mask, advantages = torch.ones(1, 500, dtype=torch.bool), torch.tensor([1.0])
    loss = grpo_loss(logp, old, advantages, mask, level="sequence")
    assert loss.item() == pytest.approx(-math.exp(0.1), rel=1e-5)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_extreme_differences(level: str) -> None:
    mask, zero = torch.ones(2, 1, dtype=torch.bool), torch.zeros(2, 1)
    logp = torch.tensor([[1000.0], [-1000.0]])
    loss, grad = with_grads(
        lambda x: grpo_loss(x, zero, torch.tensor([1.0, -1.0]), mask, level=level),  # type: ignore[arg-type]
        logp,
    )
    assert loss.item() == pytest.approx((-1.2 + 0.8) / 2)
    assert grad.tolist() == [[0.0], [0.0]]
    low = grpo_loss(logp.bfloat16(), zero.bfloat16(), torch.ones(2).bfloat16(), mask)
    assert low.dtype == torch.float32


@given(st.integers(2, 5), st.integers(1, 4), st.integers(0, 99))
@settings(max_examples=25)
def test_advantages_of_groups(group_size: int, num_groups: int, seed: int) -> None:
    rewards = normal(seed, num_groups * group_size, scale=2.0) + 1.0
    numbers = rewards.tolist()
    groups = [numbers[start : start + group_size] for start in range(0, len(numbers), group_size)]
    for scale in ("group", "batch", "none"):
        wanted = []
        for group in groups:
            divisor = {
                "group": statistics.stdev(group) + 1e-4,
                "batch": statistics.stdev(numbers) + 1e-4,
                "none": 1.0,
            }[scale]
            wanted += [(x - statistics.mean(group)) / divisor for x in group]
        found = group_advantages(rewards, group_size, scale)  # type: ignore[arg-type]
        assert_same([found], [torch.tensor(wanted, dtype=torch.float64)])


@pytest.mark.parametrize("reward", [0.1, 1.0, -1000.0, 1e8])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_equal_rewards_give_zeros(reward: float, scale: str) -> None:
    rewards = torch.tensor([reward] * 7 + [0.0] * 6 + [1.0], requires_grad=True)
    found = group_advantages(rewards, 7, scale)  # type: ignore[arg-type]
    assert found[:7].tolist() == [0.0] * 7
    assert found[7:].all()
    assert not found.requires_grad
    assert group_advantages(rewards.bfloat16(), 7).dtype == torch.float32


def test_groups_that_are_refused() -> None:
    with pytest.raises(ValueError, match="there are 6 rewards, which group_size 4 does not divide"):
        group_advantages(torch.zeros(6), 4)
    with pytest.raises(ValueError, match="group_size is 1; it must be at least 2"):
        group_advantages(torch.zeros(6), 1)
    with pytest.raises(ValueError, match=r"rewards has shape \(2, 3\); it must be \(batch\)"):
        group_advantages(torch.zeros(2, 3), 3)
    with pytest.raises(ValueError, match="scale is 'std'; it must be 'group', 'batch' or 'none'"):
        group_advantages(torch.zeros(6), 3, "std")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"epsilon": 1.0}, r"epsilon is 1.0; it must be between 0 and 1"),
        ({"epsilon_high": 0.0}, r"epsilon_high is 0.0; it must be above 0"),
        ({"level": "word"}, "level is 'word'; it must be 'token' or 'sequence'"),
        ({"normalize": "mean"}, "normalize is 'mean'; it must be 'sequence', 'batch' or 'constant'"),
        ({"normalize": "constant"}, "max_length is None with normalize 'constant'; it must be a length"),
        ({"normalize": "constant", "max_length": 0}, "max_length is 0 with normalize 'constant'"),
        ({"max_length": 5}, "max_length is 5 with normalize 'batch'; .* None for the others"),
        ({"normalize": "sequence", "num_tokens": 5}, "num_tokens has no effect .*; give num_sequences"),
        ({"num_sequences": 5}, "num_sequences has no effect with normalize 'batch'; give num_tokens"),
        ({"kl_coef": -0.1}, r"kl_coef is -0.1; it must be at least 0"),
        ({"kl_coef": 0.1}, "kl_coef is 0.1, but ref_logp is None"),
        ({"kl_coef": 0.1, "ref_logp": torch.zeros(2, 2)}, r"ref_logp has shape \(2, 2\)"),
    ],
)
def test_options_that_are_refused(chosen: dict[str, Any], message: str) -> None:
    x, mask = normal(0, 2, 3), torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match=message):
        grpo_loss(x, x, x, mask, **chosen)


def test_shapes_that_are_refused_and_masks_without_tokens() -> None:
    x, mask = normal(0, 2, 3), torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"old_logp has shape \(2, 2\)"):
        grpo_loss(x, x[:, 1:], x, mask)
    with pytest.raises(ValueError, match=r"advantages has shape \(3,\); it must be \(batch\)"):
        grpo_loss(x, x, x[0], mask)
    with pytest.raises(ValueError, match=r"advantages has shape \(2, 2\); it must be \(batch, length\)"):
        grpo_loss(x, x, x[:, 1:], mask)
    for normalize in ("sequence", "batch", "constant"):
        with pytest.raises(ValueError, match="to take the mean of"):
            grpo_loss(x, x, x, ~mask, **options(normalize))
        divisor = {"num_tokens" if normalize == "batch" else "num_sequences": 4}
        assert grpo_loss(x, x, x, ~mask, **options(normalize), **divisor) == 0
