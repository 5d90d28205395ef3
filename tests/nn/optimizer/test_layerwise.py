"""Lamb and Lars against their papers' formulas, written out one tensor at a time."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from colossalai.nn import Lamb, Lars
from colossalai.registry import OPTIMIZERS

pytestmark = pytest.mark.unit

Update = Callable[[Tensor, Tensor, dict[str, Tensor], int], Tensor]


def naive_lamb(
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    bias_correction: bool = True,
    adam: bool = False,
) -> Update:
    def update(w: Tensor, g: Tensor, state: dict[str, Tensor], t: int) -> Tensor:
        m = state["m"] = betas[0] * state.get("m", torch.zeros_like(w)) + (1 - betas[0]) * g
        v = state["v"] = betas[1] * state.get("v", torch.zeros_like(w)) + (1 - betas[1]) * g**2
        if bias_correction:
            m, v = m / (1 - betas[0] ** t), v / (1 - betas[1] ** t)
        r = m / (v.sqrt() + eps) + weight_decay * w
        w_norm, r_norm = w.norm(), r.norm()
        ratio = w_norm / r_norm if not adam and w_norm > 0 and r_norm > 0 else 1.0
        return w - lr * ratio * r

    return update


def naive_lars(
    *,
    lr: float,
    momentum: float = 0.0,
    eeta: float = 1e-3,
    weight_decay: float = 0.0,
    epsilon: float = 0.0,
) -> Update:
    def update(w: Tensor, g: Tensor, state: dict[str, Tensor], t: int) -> Tensor:
        w_norm, g_norm = w.norm(), g.norm()
        ratio = 1.0
        if w_norm > 0 and g_norm > 0:
            ratio = eeta * w_norm / (g_norm + weight_decay * w_norm + epsilon)
        u = momentum * state.get("u", torch.zeros_like(w)) + lr * ratio * (g + weight_decay * w)
        state["u"] = u
        return w - u

    return update


CASES = [
    (Lamb, naive_lamb, {"lr": 0.1}),
    (Lamb, naive_lamb, {"lr": 0.1, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.1}),
    (Lamb, naive_lamb, {"lr": 0.1, "bias_correction": False}),
    (Lamb, naive_lamb, {"lr": 0.1, "weight_decay": 0.1, "adam": True}),
    (Lars, naive_lars, {"lr": 0.3}),
    (Lars, naive_lars, {"lr": 0.3, "momentum": 0.9, "eeta": 0.02, "weight_decay": 0.1, "epsilon": 1e-2}),
]


def make_params(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    """A matrix, a vector, a vector of zeros (a new bias), a scalar, and one that gets no gradient."""
    torch.manual_seed(0)
    shapes = [(4, 3), (5,), (2,), (), (3,)]
    params = [nn.Parameter(torch.randn(shape, dtype=torch.float64).to(dtype)) for shape in shapes]
    params[2].data.zero_()
    return params


def set_grads(params: list[nn.Parameter], step: int) -> None:
    """Fresh gradients for all but the last; the vector has none at step 2, the matrix zeros at step 4."""
    torch.manual_seed(100 + step)
    for index, param in enumerate(params[:-1]):
        param.grad = torch.randn(param.shape, dtype=torch.float64).to(param.dtype)
        if (index, step) == (1, 2):
            param.grad = None
        if (index, step) == (0, 4):
            param.grad = torch.zeros_like(param)


def naive_steps(params: list[nn.Parameter], updates: list[Update], num_steps: int) -> None:
    states: list[dict[str, Tensor]] = [{} for _ in params]
    own_steps = [0] * len(params)
    for step in range(1, num_steps + 1):
        set_grads(params, step)
        for index, (param, update) in enumerate(zip(params, updates, strict=True)):
            if param.grad is not None:
                own_steps[index] += 1
                param.data = update(param.data, param.grad, states[index], own_steps[index])


@pytest.mark.parametrize(("optimizer_class", "naive", "options"), CASES)
def test_six_steps_are_the_formula(
    optimizer_class: type[torch.optim.Optimizer], naive: Callable[..., Update], options: dict[str, float]
) -> None:
    params, twins = make_params(), make_params()
    optimizer = optimizer_class(params, **options)
    for step in range(1, 7):
        set_grads(params, step)
        grads = [copy.deepcopy(param.grad) for param in params]
        optimizer.step()
        for param, grad in zip(params, grads, strict=True):
            assert grad is None or torch.equal(param.grad, grad), "the step changed a gradient"
    naive_steps(twins, [naive(**options)] * len(twins), 6)
    for param, twin in zip(params, twins, strict=True):
        torch.testing.assert_close(param, twin, rtol=1e-13, atol=1e-14)
    assert not torch.equal(params[2], torch.zeros(2)), "a parameter of zeros stayed there"
    assert params[-1] not in optimizer.state


@pytest.mark.parametrize(("optimizer_class", "naive"), [(Lamb, naive_lamb), (Lars, naive_lars)])
def test_groups_have_their_own_options(
    optimizer_class: type[torch.optim.Optimizer], naive: Callable[..., Update]
) -> None:
    params, twins = make_params(), make_params()
    optimizer = optimizer_class(
        [{"params": params[:2]}, {"params": params[2:], "lr": 0.5, "weight_decay": 0.0}],
        lr=0.1,
        weight_decay=0.2,
    )
    for step in range(1, 4):
        set_grads(params, step)
        optimizer.step()
    first, second = naive(lr=0.1, weight_decay=0.2), naive(lr=0.5, weight_decay=0.0)
    naive_steps(twins, [first, first, second, second, second], 3)
    for param, twin in zip(params, twins, strict=True):
        torch.testing.assert_close(param, twin, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize(("optimizer_class", "naive", "options"), CASES)
def test_a_saved_state_goes_on_bit_for_bit(
    optimizer_class: type[torch.optim.Optimizer],
    naive: Callable[..., Update],
    options: dict[str, float],
    tmp_path: Path,
) -> None:
    params = make_params()
    optimizer = optimizer_class(params, **options)
    for step in range(1, 4):
        set_grads(params, step)
        optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    others = copy.deepcopy(params)
    resumed = optimizer_class(others, lr=77.0)
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for step in range(4, 7):
        for one, its_params in ((optimizer, params), (resumed, others)):
            set_grads(its_params, step)
            one.step()
    for param, other in zip(params, others, strict=True):
        assert torch.equal(param, other)


@pytest.mark.parametrize(("optimizer_class", "naive", "options"), CASES)
def test_bfloat16_and_mixed_dtypes(
    optimizer_class: type[torch.optim.Optimizer], naive: Callable[..., Update], options: dict[str, float]
) -> None:
    """One step from the same bfloat16 numbers: off by a few roundings to bfloat16 (2^-8 each)."""
    params = [*make_params(torch.bfloat16)[:2], *make_params(torch.float32)[:2]]
    twins = [nn.Parameter(param.data.double()) for param in params]
    optimizer = optimizer_class(params, **options)
    torch.manual_seed(5)
    for param, twin in zip(params, twins, strict=True):
        param.grad = torch.randn_like(param)
        twin.data = naive(**options)(twin.data, param.grad.double(), {}, 1)
    optimizer.step()
    for param, twin in zip(params, twins, strict=True):
        tolerance = 3e-2 if param.dtype is torch.bfloat16 else 1e-5
        torch.testing.assert_close(param.double(), twin, rtol=tolerance, atol=tolerance)


def test_norms_of_half_precision_tensors_do_not_overflow() -> None:
    """2^16 elements of 256 have the norm 65536, too large for float16; the ratio must be 1, not 0 or inf."""
    param = nn.Parameter(torch.full((2**16,), 256.0, dtype=torch.float16))
    param.grad = torch.full_like(param, 256.0)
    Lars([param], lr=0.5, eeta=1.0).step()
    assert torch.equal(param.data, torch.full_like(param, 128.0))


@pytest.mark.parametrize("optimizer_class", [Lamb, Lars])
def test_closure_is_called_with_gradients_on(optimizer_class: type[torch.optim.Optimizer]) -> None:
    param = nn.Parameter(torch.ones(3))
    optimizer = optimizer_class([param], lr=0.1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (param**2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 3.0
    assert (param < 1).all()


@pytest.mark.parametrize("optimizer_class", [Lamb, Lars])
def test_a_rate_that_is_a_tensor_is_read_anew(optimizer_class: type[torch.optim.Optimizer]) -> None:
    params, twins = make_params(), make_params()
    rate = torch.tensor(0.1, dtype=torch.float64)
    optimizer, twin_optimizer = optimizer_class(params, lr=rate), optimizer_class(twins, lr=0.1)
    for step in (1, 2):
        set_grads(params, step)
        set_grads(twins, step)
        optimizer.step()
        twin_optimizer.step()
        rate.mul_(0.5)
        twin_optimizer.param_groups[0]["lr"] *= 0.5
    for param, twin in zip(params, twins, strict=True):
        torch.testing.assert_close(param, twin, rtol=1e-14, atol=0)


@pytest.mark.parametrize("optimizer_class", [Lamb, Lars])
def test_says_that_it_needs_whole_tensors_and_is_registered(
    optimizer_class: type[torch.optim.Optimizer],
) -> None:
    assert optimizer_class.elementwise is False
    assert OPTIMIZERS.get_module(optimizer_class.__name__) is optimizer_class


@pytest.mark.parametrize(
    ("optimizer_class", "options"),
    [
        (Lamb, {"lr": -1.0}),
        (Lamb, {"eps": -1e-6}),
        (Lamb, {"betas": (0.9, 1.0)}),
        (Lamb, {"betas": (-0.1, 0.9)}),
        (Lamb, {"weight_decay": math.nan}),
        (Lars, {"lr": -1.0}),
        (Lars, {"momentum": 1.0}),
        (Lars, {"eeta": -0.1}),
        (Lars, {"epsilon": -0.1}),
    ],
)
def test_options_out_of_range(
    optimizer_class: type[torch.optim.Optimizer], options: dict[str, object]
) -> None:
    with pytest.raises(ValueError, match="out of range; give a number"):
        optimizer_class(make_params(), **options)


def test_a_sparse_gradient_is_refused() -> None:
    embedding = nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="sparse=False"):
        Lamb(embedding.parameters()).step()
