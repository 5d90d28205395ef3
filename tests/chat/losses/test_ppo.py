"""PPO, token by token in loops."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from colossalai.chat.losses import gae, ppo_policy_loss, ptx_loss, value_loss, whiten
from tests.chat.losses.parts import (
    Loss,
    assert_masked_places_have_no_say,
    assert_parts_add_up,
    assert_same,
    masks,
    normal,
    with_grads,
)

pytestmark = pytest.mark.unit


def counted(mask: Tensor) -> list[tuple[int, int]]:
    return [(b, t) for b in range(mask.shape[0]) for t in range(mask.shape[1]) if mask[b, t]]


def one_surrogate(ratio: Tensor, advantage: float, low: float, high: float) -> Tensor:
    bound = min(max(float(ratio.detach()), 1 - low), 1 + high)
    return (
        ratio * advantage
        if float(ratio.detach()) * advantage <= bound * advantage
        else 0 * ratio + bound * advantage
    )


def loop_policy(logp: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, clip: float) -> Tensor:
    losses = [
        -one_surrogate((logp[i] - old[i].detach()).exp(), float(advantages[i].detach()), clip, clip)
        for i in counted(mask)
    ]
    return sum(losses) / len(losses)


def loop_value(values: Tensor, old: Tensor, returns: Tensor, mask: Tensor, clip: float) -> Tensor:
    losses = []
    for i in counted(mask):
        error, target = (values[i] - returns[i].item()) ** 2, returns[i].item()
        moved = float(values[i].detach() - old[i].detach())
        if abs(moved) > clip:
            held = old[i].item() + math.copysign(clip, moved)
            error = (
                error if float(error.detach()) >= (held - target) ** 2 else 0 * error + (held - target) ** 2
            )
        losses.append(error)
    return 0.5 * sum(losses) / len(losses)


@given(masks(), st.integers(0, 99), st.sampled_from([0.05, 0.2, 0.9]))
@settings(max_examples=40)
def test_losses_are_those_of_a_loop(mask: Tensor, seed: int, clip: float) -> None:
    tensors = [normal(seed + number, *mask.shape, scale=0.5) for number in range(3)]
    found = with_grads(lambda *x: ppo_policy_loss(*x, mask, clip), *tensors)
    assert_same(found, with_grads(lambda *x: loop_policy(*x, mask, clip), *tensors))
    found = with_grads(lambda *x: value_loss(*x, mask, clip), *tensors)
    assert_same(found, with_grads(lambda *x: loop_value(*x, mask, clip), *tensors))


def test_the_losses_as_pytorch_would_write_them() -> None:
    logp, old, advantages = (normal(number, 8, 9) for number in range(3))
    mask = normal(3, 8, 9) > 0
    ratio = (logp - old).exp()
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    torch.testing.assert_close(ppo_policy_loss(logp, old, advantages, mask), -surrogate[mask].mean())
    clipped = torch.maximum(old - 0.2, torch.minimum(logp, old + 0.2))
    errors = torch.maximum((logp - advantages) ** 2, (clipped - advantages) ** 2)
    torch.testing.assert_close(value_loss(logp, old, advantages, mask), 0.5 * errors[mask].mean())
    plain = torch.nn.functional.mse_loss(logp[mask], advantages[mask])
    torch.testing.assert_close(value_loss(logp, old, advantages, mask, clip=math.inf), 0.5 * plain)


@pytest.mark.parametrize("loss", [ppo_policy_loss, value_loss])
@given(mask=masks(max_batch=5), first=st.integers(0, 4))
@settings(max_examples=15)
def test_parts_of_a_batch_add_up(loss: Loss, mask: Tensor, first: int) -> None:
    first, count = min(first, len(mask)), int(mask.sum())
    tensors = [normal(number, *mask.shape) for number in range(3)]
    assert_parts_add_up(
        lambda *part: loss(*part, num_tokens=count), loss, [*tensors, mask], [first, len(mask) - first]
    )


def test_masked_places_have_no_say() -> None:
    mask = torch.tensor([[True, False, True], [False, False, False]])
    tensors = [normal(number, 2, 3) for number in range(3)]
    assert_masked_places_have_no_say(lambda *x: ppo_policy_loss(*x, mask), tensors, mask)
    assert_masked_places_have_no_say(lambda *x: value_loss(*x, mask), tensors, mask)


def test_extreme_ratios() -> None:
    """A ratio that overflows is clipped, or is the loss; it never is NaN, unless something was."""
    mask = torch.ones(1, 1, dtype=torch.bool)
    for difference, advantage, wanted, slope in (
        (1000.0, 2.0, -2.4, 0.0),
        (-1000.0, 2.0, 0.0, 0.0),
        (1000.0, -2.0, math.inf, math.inf),
        (-1000.0, -2.0, 1.6, 0.0),
        (1000.0, 0.0, 0.0, 0.0),
        (-1000.0, 0.0, 0.0, 0.0),
        (math.nan, 0.0, math.nan, math.nan),
        (math.nan, 1.0, math.nan, math.nan),
        (math.nan, -1.0, math.nan, math.nan),
        (0.0, math.nan, math.nan, math.nan),
    ):
        logp, advantages = torch.full((1, 1), difference), torch.full((1, 1), advantage)
        loss, grad, _ = with_grads(
            lambda x, a: ppo_policy_loss(x, torch.zeros(1, 1), a, mask), logp, advantages
        )
        assert loss.item() == pytest.approx(wanted, nan_ok=True), (difference, advantage)
        assert grad.item() == pytest.approx(slope, nan_ok=True) or advantage == 0.0, (difference, advantage)
    found = with_grads(
        lambda v: value_loss(v, torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 2).bool()),
        torch.tensor([[1000.0, -1000.0]]),
    )
    assert found[0].item() == 5e5
    assert found[1].tolist() == [[500.0, -500.0]]


def loop_gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> Tensor:
    """Return the advantages by the sum over l of (gamma lam)^l delta."""
    result = torch.zeros_like(rewards)
    for b in range(len(mask)):
        places = [t for t in range(mask.shape[1]) if mask[b, t]]
        r, v = [float(rewards[b, t]) for t in places], [float(values[b, t]) for t in places] + [0.0]
        deltas = [r[i] + gamma * v[i + 1] - v[i] for i in range(len(places))]
        for i, t in enumerate(places):
            result[b, t] = sum((gamma * lam) ** (j - i) * deltas[j] for j in range(i, len(places)))
    return result


@given(
    masks(max_length=7),
    st.integers(0, 99),
    st.sampled_from([1.0, 0.9, 0.0]),
    st.sampled_from([1.0, 0.95, 0.0]),
)
@settings(max_examples=40)
def test_advantages_are_the_sum_over_what_comes_after(
    mask: Tensor, seed: int, gamma: float, lam: float
) -> None:
    rewards, values = normal(seed, *mask.shape), normal(seed + 1, *mask.shape)
    wanted = loop_gae(rewards, values, mask, gamma, lam)
    junk = rewards.masked_fill(~mask, math.nan), values.masked_fill(~mask, math.inf)
    advantages, returns = gae(*junk, mask, gamma, lam)
    assert_same([advantages, returns], [wanted, (wanted + values).masked_fill(~mask, 0.0)])


def test_with_neither_discount_nor_lambda_the_return_is_what_is_still_to_come() -> None:
    rewards = torch.tensor([[1.0, 2.0, 4.0, 9.0]])
    mask = torch.tensor([[0, 1, 1, 0]])
    values = torch.randn(1, 4, requires_grad=True)
    advantages, returns = gae(rewards, values, mask, lam=1.0)
    torch.testing.assert_close(returns, torch.tensor([[0.0, 6.0, 4.0, 0.0]]))
    assert not advantages.requires_grad
    assert not returns.requires_grad
    assert gae(rewards.bfloat16(), values.bfloat16(), mask)[0].dtype == torch.float32


def test_places_in_between_are_left_out() -> None:
    rewards, values = normal(0, 1, 6), normal(1, 1, 6)
    mask = torch.tensor([[False, True, False, True, True, False]])
    kept = torch.ones(1, 3, dtype=torch.bool)
    found = gae(rewards, values, mask, 0.9, 0.8)
    wanted = gae(rewards[mask].view(1, 3), values[mask].view(1, 3), kept, 0.9, 0.8)
    assert_same([each[mask] for each in found], [each.flatten() for each in wanted])
    assert not any(each[~mask].any() for each in found)


@given(masks(), st.integers(0, 99))
@settings(max_examples=25)
def test_whitened_advantages(mask: Tensor, seed: int) -> None:
    advantages = normal(seed, *mask.shape, scale=5.0) + 3.0
    kept = [float(advantages[i]) for i in counted(mask)]
    mean = sum(kept) / len(kept)
    variance = sum((x - mean) ** 2 for x in kept) / max(1, len(kept) - 1)
    wanted = torch.zeros_like(advantages)
    for i in counted(mask):
        wanted[i] = (float(advantages[i]) - mean) / math.sqrt(variance + 1e-8)
    assert_same([whiten(advantages.masked_fill(~mask, math.nan), mask)], [wanted])


def test_whitening_of_few() -> None:
    one = torch.tensor([[True, False]])
    assert whiten(torch.tensor([[7.0, torch.inf]], requires_grad=True), one).tolist() == [[0.0, 0.0]]
    assert whiten(torch.full((2, 2), 3.0), torch.ones(2, 2).bool()).tolist() == [[0.0, 0.0]] * 2
    with pytest.raises(ValueError, match="no tokens to take the mean of"):
        whiten(torch.ones(1, 2), one & False)


def test_pretraining_is_added() -> None:
    policy, lm = torch.tensor(2.0, requires_grad=True), torch.tensor(3.0, requires_grad=True)
    loss = ptx_loss(policy, lm, 27.8)
    loss.backward()
    assert loss.item() == pytest.approx(2 + 27.8 * 3)
    assert (policy.grad.item(), lm.grad.item()) == (1.0, pytest.approx(27.8))
    with pytest.raises(ValueError, match=r"policy has shape \(2,\) and lm \(\); they must be scalars"):
        ptx_loss(torch.ones(2), lm, 1.0)
    with pytest.raises(ValueError, match=r"ptx_coef is -1.0; it must be at least 0"):
        ptx_loss(policy, lm, -1.0)


def test_what_is_refused() -> None:
    x, mask = normal(0, 2, 3), torch.ones(2, 3, dtype=torch.bool)
    for loss, second, third in (
        (ppo_policy_loss, "old_logp", "advantages"),
        (value_loss, "old_values", "returns"),
    ):
        with pytest.raises(ValueError, match=rf"{second} has shape \(2, 2\); it must be \(batch, length\)"):
            loss(x, x[:, 1:], x, mask)
        with pytest.raises(ValueError, match=rf"{third} has shape \(3,\)"):
            loss(x, x, x[0], mask)
        with pytest.raises(ValueError, match=r"no tokens to take the mean of; .* give num_tokens"):
            loss(x, x, x, ~mask)
        assert loss(x, x, x, ~mask, num_tokens=3) == 0
        with pytest.raises(ValueError, match=r"mask has shape .* it must be"):
            loss(x[0], x[0], x[0], mask[0])
    with pytest.raises(ValueError, match=r"clip is 1.0; it must be between 0 and 1"):
        ppo_policy_loss(x, x, x, mask, clip=1.0)
    with pytest.raises(ValueError, match=r"clip is 0; it must be above 0, or math.inf"):
        value_loss(x, x, x, mask, clip=0)
    with pytest.raises(ValueError, match=r"values has shape \(2, 2\)"):
        gae(x, x[:, 1:], mask)
    with pytest.raises(ValueError, match=r"gamma is 1.5 and lam 0.95; they must be from 0 to 1"):
        gae(x, x, mask, gamma=1.5)
    with pytest.raises(ValueError, match=r"advantages has shape \(2, 2\)"):
        whiten(x[:, 1:], mask)
