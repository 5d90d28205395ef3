"""Losses of pairs, against the formulas in a loop of Python numbers."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from colossalai.chat.losses import DPOResult, dpo_loss, log_exp_loss, log_sig_loss
from tests.chat.losses.parts import assert_parts_add_up, assert_same, normal, with_grads

pytestmark = pytest.mark.unit


def sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x))


@given(st.lists(st.tuples(st.floats(-9, 9), st.floats(-9, 9)), min_size=1, max_size=5))
@settings(max_examples=30)
def test_a_reward_model_learns_from_the_difference(pairs: list[tuple[float, float]]) -> None:
    chosen, rejected = torch.tensor(pairs, dtype=torch.float64).unbind(1)
    size = len(pairs)
    slopes = [(sigmoid(c - r) - 1.0) / size for c, r in pairs]
    wanted = [
        torch.tensor(sum(-math.log(sigmoid(c - r)) for c, r in pairs) / size, dtype=torch.float64),
        torch.tensor(slopes, dtype=torch.float64),
        -torch.tensor(slopes, dtype=torch.float64),
    ]
    assert_same(with_grads(log_sig_loss, chosen, rejected), wanted)
    by_exp = sum(math.log(1.0 + math.exp(r - c)) for c, r in pairs) / size
    torch.testing.assert_close(log_exp_loss(chosen, rejected).item(), by_exp, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_rewards(dtype: torch.dtype) -> None:
    chosen = torch.tensor([1000.0, -1000.0, 30.0, -30.0], dtype=dtype)
    zero = torch.zeros(4, dtype=dtype)
    for number, (wanted, slope) in enumerate(
        [
            (0.0, 0.0),
            (1000.0, -1.0),
            (math.log1p(math.exp(-30)), -sigmoid(-30)),
            (30 + math.log1p(math.exp(-30)), -sigmoid(30)),
        ]
    ):
        one = slice(number, number + 1)
        loss, grad, _ = with_grads(log_sig_loss, chosen[one], zero[one])
        rtol = 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(loss.item(), wanted, atol=0, rtol=rtol)
        torch.testing.assert_close(grad.item(), slope, atol=0, rtol=rtol)


def test_half_precision_is_subtracted_in_float32() -> None:
    chosen, rejected = torch.tensor([256.0]).bfloat16(), torch.tensor([0.5]).bfloat16()
    loss = log_exp_loss(rejected, chosen)
    assert loss.dtype == torch.float32
    assert loss.item() == 255.5


def loop_dpo(
    pc: Tensor, pr: Tensor, rc: Tensor, rr: Tensor, beta: float, kind: str, smoothing: float
) -> Tensor:
    losses = []
    for i in range(len(pc)):
        h = (pc[i] - pr[i]) - (rc[i] - rr[i]).detach()
        if kind == "ipo":
            losses.append((h - 1 / (2 * beta)) ** 2)
        else:
            right, wrong = 1 / (1 + torch.exp(-beta * h)), 1 / (1 + torch.exp(beta * h))
            losses.append(-(1 - smoothing) * right.log() - smoothing * wrong.log())
    return sum(losses) / len(losses)


@pytest.mark.parametrize(("kind", "smoothing"), [("sigmoid", 0.0), ("sigmoid", 0.2), ("ipo", 0.0)])
@pytest.mark.parametrize("beta", [0.1, 2.0])
def test_dpo_is_the_formula(kind: str, smoothing: float, beta: float) -> None:
    tensors = [normal(seed, 5, scale=3.0) for seed in range(4)]

    def loss(*tensors: Tensor) -> Tensor:
        return dpo_loss(*tensors, beta=beta, kind=kind, label_smoothing=smoothing).loss  # type: ignore[arg-type]

    found = with_grads(loss, *tensors)
    assert_same(found, with_grads(lambda *x: loop_dpo(*x, beta, kind, smoothing), *tensors))
    assert not found[3].any()
    assert not found[4].any()
    assert_parts_add_up(
        lambda *x: dpo_loss(*x, beta=beta, kind=kind, label_smoothing=smoothing, num_sequences=5).loss,  # type: ignore[arg-type]
        loss,
        tensors,
        [2, 3],
    )


def test_what_dpo_says_as_a_reward_model() -> None:
    tensors = [normal(seed, 3).requires_grad_() for seed in range(4)]
    result = dpo_loss(*tensors, beta=0.5)
    assert isinstance(result, DPOResult)
    assert torch.equal(result.chosen_rewards, 0.5 * (tensors[0] - tensors[2]))
    assert torch.equal(result.rejected_rewards, 0.5 * (tensors[1] - tensors[3]))
    assert not result.chosen_rewards.requires_grad
    assert not result.rejected_rewards.requires_grad
    wanted = log_sig_loss(result.chosen_rewards, result.rejected_rewards)
    torch.testing.assert_close(result.loss, wanted, atol=1e-12, rtol=0)
    same = dpo_loss(tensors[0], tensors[1], tensors[0], tensors[1])
    assert same.loss.item() == pytest.approx(math.log(2))


@pytest.mark.parametrize("difference", [1000.0, -1000.0])
def test_extreme_differences_of_dpo(difference: float) -> None:
    chosen, zero = torch.tensor([difference]), torch.zeros(1)
    loss, grad, *_ = with_grads(
        lambda x: dpo_loss(x, zero, zero, zero, beta=1.0, label_smoothing=0.25).loss, chosen
    )
    assert loss.item() == (250.0 if difference > 0 else 750.0)
    assert grad.item() == (0.25 if difference > 0 else -0.75)


@given(st.integers(1, 5), st.integers(0, 5))
@settings(max_examples=10)
def test_parts_of_a_batch_add_up(size: int, first: int) -> None:
    first = min(first, size)
    tensors = [normal(seed, size) for seed in range(2)]
    assert_parts_add_up(
        lambda *x: log_sig_loss(*x, num_sequences=size), log_sig_loss, tensors, [first, size - first]
    )


def test_what_is_refused() -> None:
    two, three = normal(0, 2), normal(0, 3)
    with pytest.raises(ValueError, match=r"rejected has shape \(3,\); it must be \(batch\), as the others"):
        log_sig_loss(two, three)
    with pytest.raises(ValueError, match=r"chosen has shape \(2, 1\); it must be \(batch\)"):
        log_sig_loss(two.unsqueeze(1), two.unsqueeze(1))
    with pytest.raises(ValueError, match="no sequences to take the mean of"):
        log_sig_loss(two[:0], two[:0])
    with pytest.raises(ValueError, match=r"ref_rejected has shape \(3,\)"):
        dpo_loss(two, two, two, three)
    with pytest.raises(ValueError, match="no sequences to take the mean of"):
        dpo_loss(two[:0], two[:0], two[:0], two[:0])
    with pytest.raises(ValueError, match="beta is 0; it must be above 0"):
        dpo_loss(two, two, two, two, beta=0)
    with pytest.raises(ValueError, match="beta is inf; it must be above 0, and finite"):  # 0 * inf is NaN
        dpo_loss(two, two, two, two, beta=math.inf)
    with pytest.raises(ValueError, match=r"label_smoothing is 0.5; it must be from 0 to below 0.5"):
        dpo_loss(two, two, two, two, label_smoothing=0.5)
    with pytest.raises(ValueError, match=r"label_smoothing is 0.1, but kind 'ipo' has none"):
        dpo_loss(two, two, two, two, kind="ipo", label_smoothing=0.1)
    with pytest.raises(ValueError, match=r"kind is 'hinge'; it must be 'sigmoid' or 'ipo'"):
        dpo_loss(two, two, two, two, kind="hinge")  # type: ignore[arg-type]
