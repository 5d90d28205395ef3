"""Estimators of the KL divergence, and the rewards that it penalizes."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from colossalai.chat.losses import kl, sequence_rewards, token_rewards
from tests.chat.losses.parts import assert_same, masks, normal, with_grads

pytestmark = pytest.mark.unit

FORMULAS = {
    "k1": lambda p, q: p - q,
    "k2": lambda p, q: 0.5 * (p - q) ** 2,
    "k3": lambda p, q: torch.exp(q - p) - 1 - (q - p),
}


@pytest.mark.parametrize("kind", FORMULAS)
def test_estimators_are_the_formulas(kind: str) -> None:
    logp, ref_logp = normal(0, 2, 3), normal(1, 2, 3)

    def loop(p: Tensor, q: Tensor) -> Tensor:
        return sum(FORMULAS[kind](p[b, t], q[b, t]) for b in range(2) for t in range(3))

    found = with_grads(lambda p, q: kl(p, q, kind).sum(), logp, ref_logp)  # type: ignore[arg-type]
    assert_same(found, with_grads(loop, logp, ref_logp))
    assert kl(logp.bfloat16(), ref_logp.bfloat16(), kind).dtype == torch.float32  # type: ignore[arg-type]


def test_estimators_have_the_mean_of_the_divergence() -> None:
    logp, ref_logp = normal(0, 6, scale=0.3).log_softmax(0), normal(1, 6, scale=0.3).log_softmax(0)
    divergence = (logp.exp() * (logp - ref_logp)).sum()
    for kind in ("k1", "k3"):
        mean = (logp.exp() * kl(logp, ref_logp, kind)).sum()  # type: ignore[arg-type]
        torch.testing.assert_close(mean, divergence, atol=1e-15, rtol=1e-12)


def test_k3_near_the_reference() -> None:
    difference = torch.tensor([1e-4, -1e-4, 0.0])
    found = kl(-difference, torch.zeros(3), "k3")
    torch.testing.assert_close(found, torch.tensor([5e-9, 5e-9, 0.0]), atol=1e-11, rtol=0)


def test_extreme_differences() -> None:
    logp = torch.tensor([1000.0, -1000.0])
    zero = torch.zeros(2)
    assert kl(logp, zero, "k1").tolist() == [1000.0, -1000.0]
    assert kl(logp, zero, "k2").tolist() == [5e5, 5e5]
    assert kl(logp, zero, "k3").tolist() == [999.0, math.inf]
    assert with_grads(lambda x: kl(x, zero, "k3").sum(), logp)[1].tolist() == [1.0, -math.inf]


def test_an_unknown_estimator_and_other_shapes() -> None:
    with pytest.raises(ValueError, match="kind is 'k4'; it must be 'k1', 'k2' or 'k3'"):
        kl(torch.zeros(2), torch.zeros(2), "k4")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"logp has shape \(2,\) and ref_logp \(1,\)"):
        kl(torch.zeros(2), torch.zeros(1))


@given(masks(), st.integers(0, 99))
@settings(max_examples=25)
def test_rewards_are_those_of_a_loop(mask: Tensor, seed: int) -> None:
    mask[:, seed % mask.shape[1]] = True
    batch, length = mask.shape
    reward, logp, ref_logp = (
        normal(seed, batch),
        normal(seed + 1, batch, length),
        normal(seed + 2, batch, length),
    )
    by_token, by_sum, by_mean = torch.zeros(batch, length), torch.zeros(batch), torch.zeros(batch)
    by_token, by_sum, by_mean = by_token.double(), by_sum.double(), by_mean.double()
    for b in range(batch):
        places = [t for t in range(length) if mask[b, t]]
        for t in places:
            by_token[b, t] = -0.3 * (logp[b, t] - ref_logp[b, t])
        by_token[b, places[-1]] += reward[b]
        penalty = sum(float(logp[b, t] - ref_logp[b, t]) for t in places)
        by_sum[b] = reward[b] - 0.3 * penalty
        by_mean[b] = reward[b] - 0.3 * penalty / len(places)
    junk = logp.masked_fill(~mask, math.nan), ref_logp.masked_fill(~mask, math.inf)
    tokens = token_rewards(reward, *junk, mask, 0.3)
    found = sequence_rewards(reward, *junk, mask, 0.3), sequence_rewards(reward, *junk, mask, 0.3, mean=True)
    assert_same([tokens, *found, tokens.sum(1)], [by_token, by_sum, by_mean, by_sum])


def test_rewards_are_constants() -> None:
    logp = torch.zeros(2, 3, requires_grad=True)
    reward, mask = torch.ones(2).bfloat16(), torch.ones(2, 3, dtype=torch.long)
    for function in (token_rewards, sequence_rewards):
        found = function(reward, logp, logp, mask, 0.1)
        assert not found.requires_grad
        assert found.dtype == torch.float32


def test_sequences_without_tokens() -> None:
    reward, logp = torch.tensor([2.0, 3.0]), torch.ones(2, 2)
    mask = torch.tensor([[0, 0], [1, 0]])
    for mean in (False, True):
        assert sequence_rewards(reward, logp, 0 * logp, mask, 1.0, mean=mean).tolist() == [2.0, 2.0]
    with pytest.raises(
        ValueError, match=r"sequences \[0\] have no token in mask, and so no place for their reward"
    ):
        token_rewards(reward, logp, logp, mask, 1.0)


@pytest.mark.parametrize("function", [token_rewards, sequence_rewards])
def test_what_is_refused(function: Callable[..., Tensor]) -> None:
    reward, logp, mask = torch.zeros(2), torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"reward has shape \(2, 3\); it must be \(batch\)"):
        function(logp, logp, logp, mask, 0.1)
    with pytest.raises(ValueError, match=r"ref_logp has shape \(2, 2\); it must be \(batch, length\)"):
        function(reward, logp, logp[:, 1:], mask, 0.1)
    with pytest.raises(ValueError, match=r"kl_coef is -0.1; it must be at least 0"):
        function(reward, logp, logp, mask, -0.1)
