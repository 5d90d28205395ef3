"""Routers choose, weigh and drop as a reference of twenty lines does; noise differs, and replays."""

import copy
import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import colossalai
from colossalai.amp import NaiveFP16, PureBF16
from colossalai.core import global_context as gpc
from colossalai.nn import checkpoint
from colossalai.nn.layer.moe import (
    MoeRouter,
    NormalNoiseGenerator,
    Routes,
    Top1Router,
    Top2Router,
    TopKRouter,
    UniformNoiseGenerator,
)
from tests.ranks import run_ranks


def by_reference(
    logits: Tensor, k: int, factor: Fraction, min_capacity: int
) -> tuple[list[list[int]], list[list[float]], list[list[bool]]]:
    """Return experts, weights and which are served, token by token."""
    num_tokens, num_experts = logits.shape
    capacity = max(math.ceil(factor * k * num_tokens / num_experts), min_capacity)
    capacity += capacity % 2
    experts, weights = [], []
    for row in logits.double().softmax(-1).tolist():
        ranked = sorted(range(num_experts), key=lambda expert, row=row: (-row[expert], expert))[:k]
        experts.append(ranked)
        weights.append([row[expert] for expert in ranked])
    load = [0] * num_experts
    served = [[False] * k for _ in range(num_tokens)]
    for choice in range(k):
        for token in range(num_tokens):
            served[token][choice] = load[experts[token][choice]] < capacity
            load[experts[token][choice]] += 1
    return experts, weights, served


def logits_with_ties(num_tokens: int, num_experts: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 4, (num_tokens, num_experts), generator=generator).double()


@pytest.mark.unit
@settings(max_examples=200)
@given(
    num_tokens=st.integers(0, 40),
    num_experts=st.integers(1, 9),
    k=st.integers(1, 4),
    factor=st.sampled_from(["0.3", "0.5", "1", "1.1", "1.25", "2"]),
    min_capacity=st.integers(0, 5),
    is_training=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_against_the_reference(
    num_tokens: int,
    num_experts: int,
    k: int,
    factor: str,
    min_capacity: int,
    is_training: bool,
    seed: int,
) -> None:
    k = min(k, num_experts)
    logits = logits_with_ties(num_tokens, num_experts, seed)
    factors = (float(factor), 7.0) if is_training else (7.0, float(factor))
    routers = [MoeRouter(k, *factors, min_capacity)]
    routers += [Top1Router(*factors, min_capacity)] if k == 1 else []
    routers += [Top2Router(*factors, min_capacity)] if k == 2 else []
    routers += [TopKRouter(k, *factors, min_capacity, drop_tks=True, norm_topk_prob=False)]
    experts, weights, served = by_reference(logits, k, Fraction(factor), min_capacity)
    for router in routers:
        routes = router.train(is_training)(logits)
        assert routes.experts.tolist() == experts
        torch.testing.assert_close(routes.weights, torch.tensor(weights).double().view(-1, k))
        found = torch.ones_like(routes.experts, dtype=torch.bool) if routes.served is None else routes.served
        assert found.tolist() == served
    for router in (MoeRouter(k, *factors, min_capacity, drop_tks=False), TopKRouter(k)):
        assert router(logits).served is None
    sums = TopKRouter(k)(logits).weights.sum(-1)
    torch.testing.assert_close(sums, torch.ones_like(sums))


@pytest.mark.unit
def test_one_positional_factor_is_that_of_training() -> None:
    for router in (Top1Router(0.5), Top2Router(0.5)):
        assert (router.capacity_factor_train, router.capacity_factor_eval) == (0.5, 2.0)


@pytest.mark.unit
def test_random_tokens_are_served() -> None:
    """As many as the first ones, others each time; in evaluation the first."""
    router = Top1Router(0.5, 0.5, 0, select_policy="random")
    logits = torch.zeros(64, 1)
    torch.manual_seed(0)
    first, second = router(logits).served, router(logits).served
    assert first.sum() == second.sum() == 32
    assert not torch.equal(first, second)
    assert router.eval()(logits).served.flatten().tolist() == [True] * 32 + [False] * 32


@pytest.mark.unit
def test_weights_have_gradients() -> None:
    logits = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)

    def weights(logits: Tensor) -> Tensor:
        return TopKRouter(2)(logits).weights

    assert torch.autograd.gradcheck(weights, (logits,))


@pytest.mark.unit
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_probabilities_are_in_float32(dtype: torch.dtype) -> None:
    logits = torch.randn(7, 5).to(dtype)
    routes = Top2Router()(logits)
    assert routes.probabilities.dtype == routes.weights.dtype == torch.float32
    assert torch.equal(routes.probabilities, logits.float().softmax(-1))


@pytest.mark.unit
@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Top1Router(0.0), "capacity_factor_train is 0.0; it must be greater than 0"),
        (lambda: Top2Router(1.0, -1.0), "capacity_factor_eval is -1.0"),
        (lambda: Top1Router(min_capacity=-1), "min_capacity is -1; it must not be negative"),
        (lambda: Top1Router(select_policy="last"), "select_policy is 'last'; it must be 'first' or 'random'"),
        (lambda: TopKRouter(0), "k_value is 0"),
        (lambda: TopKRouter(1, z_loss_weight=-1.0), "z_loss_weight is -1.0"),
        (lambda: TopKRouter(1, bias_update_rate=0.1), "needs a rate that is not negative, and the number"),
        (lambda: Top2Router()(torch.zeros(3, 1)), r"shape \(3, 1\).*of at least k = 2 experts"),
        (lambda: NormalNoiseGenerator(0), "num_experts is 0"),
        (lambda: UniformNoiseGenerator(-0.1), "eps is -0.1"),
    ],
)
def test_bad_arguments(build: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.unit
def test_the_size_of_the_noise() -> None:
    torch.manual_seed(0)
    noise = NormalNoiseGenerator(8)(torch.zeros(100_000))
    assert noise.std().item() == pytest.approx(1 / 8, rel=0.02)
    assert abs(noise.mean().item()) < 2e-3
    factors = UniformNoiseGenerator(0.1)(torch.ones(100_000))
    assert factors.min() >= 0.9
    assert factors.max() <= 1.1
    assert factors.std().item() == pytest.approx(0.2 / math.sqrt(12), rel=0.02)


def noise_of_ranks() -> tuple[list[float], list[float], bool]:
    colossalai.launch_from_torch({"parallel": {"tensor": {"size": 2, "mode": "1d"}}}, verbose=False)
    router = Top1Router(noisy_func=NormalNoiseGenerator(4), select_policy="random", min_capacity=0)
    logits = torch.zeros(6, 4, requires_grad=True)
    routes: list[Routes] = []

    def block(logits: Tensor) -> Tensor:
        routes.append(router(logits))
        torch.rand(3)  # what others draw
        return routes[-1].weights.square()  # saved: the forward is repeated up to here

    checkpoint(block, False, logits).sum().backward()
    first, again = routes
    replays = torch.equal(first.probabilities, again.probabilities)
    assert router.eval()(logits).probabilities.eq(0.25).all(), "there is no noise in evaluation"
    gpc.destroy()
    return first.probabilities.flatten().tolist(), first.served.flatten().tolist(), replays


@pytest.mark.dist
def test_noise_differs_between_tokens_and_replays() -> None:
    """Ranks 0 and 1 share tokens, 0 and 2 do not."""
    results = run_ranks(noise_of_ranks, 4)
    assert all(replays for *_, replays in results)
    noise, served = [each[0] for each in results], [each[1] for each in results]
    assert noise[0] == noise[1] != noise[2] == noise[3]
    assert served[0] == served[1]


@pytest.mark.unit
def test_the_bias_moves_against_the_load() -> None:
    router = TopKRouter(1, bias_update_rate=0.25, num_experts=3)
    logits = torch.tensor([[0.2, 0.1, 0.0]] * 4)
    routes = router(logits)
    assert routes.experts.flatten().tolist() == [0] * 4
    with torch.no_grad():
        router(logits)  # an evaluation without eval() does not count
    load = router.take_load()
    assert load.tolist() == [4, 0, 0]
    router.move_bias(load)
    assert router.e_score_correction_bias.tolist() == [-0.25, 0.25, 0.25]
    routes = router(logits)
    assert routes.experts.flatten().tolist() == [1] * 4
    assert routes.weights.flatten().tolist() == [1.0] * 4
    plain = TopKRouter(1, norm_topk_prob=False, bias_update_rate=0.25, num_experts=3)
    plain.load_state_dict(router.state_dict())
    weights = plain(logits).weights
    assert torch.equal(weights[:, 0], logits.softmax(-1)[:, 1]), "the bias chooses, and weighs nothing"
    router.take_load()
    checkpoint(lambda x: router(x).weights.square(), False, logits.requires_grad_()).sum().backward()
    assert router.take_load().tolist() == [0, 4, 0], "counted once under recomputation"


@pytest.mark.unit
def test_the_bias_is_float32_under_every_precision() -> None:
    def make() -> nn.Module:
        return nn.ModuleList([TopKRouter(1, bias_update_rate=0.001, num_experts=3), nn.Linear(2, 2)])

    for change in (
        lambda model: model.to(torch.bfloat16),
        lambda model: model.double(),
        lambda model: copy.deepcopy(model).half(),
        lambda model: PureBF16().convert_model(model, float32_grads=False) and model,
        lambda model: NaiveFP16().convert_model(copy.deepcopy(model).float(), float32_grads=False) and model,
    ):
        model = make()
        model[0].move_bias(torch.tensor([4, 0, 0]))
        before = model[0].e_score_correction_bias.clone()
        changed = change(model)
        model = model if changed is None or not isinstance(changed, nn.Module) else changed
        assert model[0].e_score_correction_bias.dtype == torch.float32
        assert torch.equal(model[0].e_score_correction_bias, before)
    assert model[0].to("meta").to_empty(device="cpu").e_score_correction_bias.dtype == torch.float32
