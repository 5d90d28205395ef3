"""HybridAdam, CPUAdam, FusedAdam, FusedSGD and FusedLAMB against torch.optim and against formulas."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from colossalai.nn.optimizer import (
    AdamOptions,
    CPUAdam,
    FusedAdam,
    FusedLAMB,
    FusedSGD,
    HybridAdam,
    Lamb,
    Slot,
    mixed_adam_step,
)
from colossalai.registry import OPTIMIZERS
from tests.tiers import further

pytestmark = pytest.mark.unit

STEPS = 100


def make_params(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    """A matrix, a vector, a scalar, channels last, one with holes in memory, and one without a gradient."""
    torch.manual_seed(0)
    tensors = [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in [(7, 5), (33,), ()]]
    tensors.append(torch.randn(2, 3, 4, 5).to(dtype).to(memory_format=torch.channels_last))
    tensors.append(torch.randn(6, 8).to(dtype)[:, :3])
    tensors.append(torch.randn(3).to(dtype))
    return [nn.Parameter(tensor) for tensor in tensors]


def grads_of(params: list[nn.Parameter], step: int) -> list[Tensor | None]:
    """Gradients, contiguous whatever the layout of the parameter; the last parameter has one now and then."""
    generator = torch.Generator().manual_seed(step)
    grads: list[Tensor | None] = [
        torch.randn(param.shape, generator=generator, dtype=torch.float64).to(param.dtype) for param in params
    ]
    if step % 3 != 1:
        grads[-1] = None
    return grads


def train(optimizer: Optimizer, params: list[nn.Parameter], steps: int = STEPS, first: int = 0) -> None:
    for step in range(first, first + steps):
        for param, grad in zip(params, grads_of(params, step), strict=True):
            param.grad = grad
        optimizer.step()


def assert_equal(mine: list[nn.Parameter], theirs: list[nn.Parameter], tolerance: float = 1e-10) -> None:
    for mine_one, theirs_one in zip(mine, theirs, strict=True):
        torch.testing.assert_close(mine_one, theirs_one, rtol=tolerance, atol=tolerance)


ADAM_OPTIONS = [
    {"lr": lr, "betas": betas, "eps": eps, "weight_decay": decay}
    for (lr, betas), eps, decay in itertools.product(
        [(1e-2, (0.9, 0.999)), (3e-3, (0.7, 0.95)), (1e-2, (0.0, 0.0))], [1e-8, 1e-3], [0.0, 0.1]
    )
]


ADAM_CASES = [
    *((HybridAdam, options) for options in ADAM_OPTIONS[1::5]),  # each value of each option
    *((kind, ADAM_OPTIONS[1]) for kind in (CPUAdam, FusedAdam)),
    *(further(HybridAdam, options) for number, options in enumerate(ADAM_OPTIONS) if number % 5 != 1),
    *(further(kind, ADAM_OPTIONS[0]) for kind in (CPUAdam, FusedAdam)),
]


@pytest.mark.parametrize("is_adamw", [True, False])
@pytest.mark.parametrize(("kind", "options"), ADAM_CASES, ids=str)
def test_adam_is_that_of_torch(kind: Any, options: dict[str, Any], is_adamw: bool) -> None:
    mine = make_params()
    theirs = copy.deepcopy(mine)
    reference = torch.optim.AdamW if is_adamw else torch.optim.Adam
    train(kind(mine, adamw_mode=is_adamw, **options), mine)
    train(reference(theirs, foreach=False, **options), theirs)
    assert_equal(mine, theirs)


@pytest.mark.parametrize("is_adamw", [True, False])
def test_adam_without_bias_correction(is_adamw: bool) -> None:
    lr, beta1, beta2, eps, decay = 1e-2, 0.8, 0.9, 1e-6, 0.1
    param = nn.Parameter(torch.randn(9, dtype=torch.float64))
    w, m, v = param.detach().clone(), torch.zeros(9).double(), torch.zeros(9).double()
    optimizer = HybridAdam(
        [param],
        lr=lr,
        bias_correction=False,
        betas=(beta1, beta2),
        eps=eps,
        weight_decay=decay,
        adamw_mode=is_adamw,
    )
    for step in range(STEPS):
        param.grad = torch.randn(9, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        g = param.grad.clone()
        optimizer.step()
        if is_adamw:
            w = w * (1 - lr * decay)
        else:
            g = g + decay * w
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
        w = w - lr * m / (v.sqrt() + eps)
    torch.testing.assert_close(param.detach(), w, rtol=1e-10, atol=1e-10)
    assert optimizer.state[param]["step"] == STEPS


def test_float32_is_bitwise_that_of_torchs_fused_kernel() -> None:
    mine = make_params(torch.float32)[:3]
    theirs = copy.deepcopy(mine)
    train(HybridAdam(mine, weight_decay=0.1), mine)
    train(torch.optim.AdamW(theirs, fused=True, weight_decay=0.1), theirs)
    assert_equal(mine, theirs, tolerance=0.0)


def test_groups_have_their_own_options_and_a_schedule_reaches_them() -> None:
    mine = make_params()
    theirs = copy.deepcopy(mine)
    for kind, params in ((HybridAdam, mine), (torch.optim.AdamW, theirs)):
        groups = [{"params": params[:2], "lr": 0.1, "weight_decay": 0.3}, {"params": params[2:]}]
        optimizer = kind(groups, lr=torch.tensor(0.01, dtype=torch.float64), weight_decay=0.0)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        for step in range(5):
            train(optimizer, params, steps=1, first=step)
            scheduler.step()
    assert_equal(mine, theirs)


SGD_OPTIONS = [
    {"momentum": momentum, "dampening": dampening, "weight_decay": decay, "nesterov": nesterov}
    for momentum, dampening, decay, nesterov in itertools.product(
        [0.0, 0.9], [0.0, 0.3], [0.0, 0.1], [False, True]
    )
    if not nesterov or (momentum and not dampening)
]


@pytest.mark.parametrize("options", SGD_OPTIONS, ids=str)
def test_sgd_is_that_of_torch(options: dict[str, Any]) -> None:
    mine = make_params()
    theirs = copy.deepcopy(mine)
    train(FusedSGD(mine, lr=1e-2, **options), mine)
    train(torch.optim.SGD(theirs, lr=1e-2, foreach=False, **options), theirs)
    assert_equal(mine, theirs)


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_with_decay_after_the_momentum(nesterov: bool) -> None:
    lr, momentum, decay = 0.05, 0.9, 0.2
    param = nn.Parameter(torch.randn(5, dtype=torch.float64))
    w, u = param.detach().clone(), None
    optimizer = FusedSGD(
        [param], lr=lr, momentum=momentum, weight_decay=decay, nesterov=nesterov, wd_after_momentum=True
    )
    for step in range(STEPS):
        g = torch.randn(5, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        param.grad = g.clone()
        optimizer.step()
        u = g if u is None else momentum * u + g
        w = w - lr * ((g + momentum * u if nesterov else u) + decay * w)
    torch.testing.assert_close(param.detach(), w, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("bias_correction", [True, False])
def test_lamb_is_ours(decay: float, bias_correction: bool) -> None:
    mine = make_params()
    theirs = copy.deepcopy(mine)
    options = {"lr": 1e-2, "weight_decay": decay, "bias_correction": bias_correction}
    train(FusedLAMB(mine, max_grad_norm=0.0, **options), mine)
    train(Lamb(theirs, adam=decay == 0, **options), theirs)
    assert_equal(mine, theirs)


def test_lamb_options() -> None:
    """Each option against the formula, over one tensor."""
    lr, (beta1, beta2), eps, decay = 0.01, (0.8, 0.9), 1e-6, 0.1
    for adamw_mode, averaging, nvlamb, wd in itertools.product(
        [True, False], [True, False], [True, False], [0.0, decay]
    ):
        param = nn.Parameter(torch.randn(9, dtype=torch.float64))
        w, m, v = param.detach().clone(), torch.zeros(9).double(), torch.zeros(9).double()
        optimizer = FusedLAMB(
            [param],
            lr=lr,
            betas=(beta1, beta2),
            eps=eps,
            weight_decay=wd,
            adamw_mode=adamw_mode,
            grad_averaging=averaging,
            max_grad_norm=1.0,
            use_nvlamb=nvlamb,
        )
        for step in range(1, STEPS + 1):
            g = torch.randn(9, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
            param.grad = g.clone()
            optimizer.step()
            torch.testing.assert_close(param.grad, g, rtol=0, atol=0)
            g = g * min(1.0, 1.0 / g.norm().item())
            if not adamw_mode:
                g = g + wd * w
            m = beta1 * m + ((1 - beta1) if averaging else 1.0) * g
            v = beta2 * v + (1 - beta2) * g * g
            r = (m / (1 - beta1**step)) / ((v / (1 - beta2**step)).sqrt() + eps)
            if adamw_mode:
                r = r + wd * w
            w = w - lr * (w.norm() / r.norm() if nvlamb or wd else 1.0) * r
        torch.testing.assert_close(param.detach(), w, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", [HybridAdam, FusedAdam])
def test_half_parameters_have_float32_masters(kind: Any, dtype: torch.dtype) -> None:
    """Bit for bit the three passes: cast the gradient, update the master, cast the weight."""
    mine = make_params(dtype)[:4]
    masters = [nn.Parameter(param.detach().float()) for param in mine]
    optimizer = kind(mine, lr=1e-4, weight_decay=0.1)
    reference = torch.optim.AdamW(masters, lr=1e-4, weight_decay=0.1, fused=True)
    for step in range(STEPS):
        for param, master, grad in zip(mine, masters, grads_of(mine, step), strict=True):
            param.grad = grad
            master.grad = torch.empty_like(master).copy_(grad) if grad is not None else None
        optimizer.step()
        reference.step()
    for param, master in zip(mine, masters, strict=True):
        if param in optimizer.state:
            torch.testing.assert_close(optimizer.state[param]["master"], master.detach(), rtol=0, atol=0)
        torch.testing.assert_close(param.detach(), master.detach().to(dtype), rtol=0, atol=0)


def test_a_half_parameter_with_holes() -> None:
    mine = make_params(torch.bfloat16)[4:5]
    twin = [nn.Parameter(mine[0].detach().contiguous())]
    rest = mine[0]._base.clone() if mine[0]._base is not None else None
    for params in (mine, twin):
        train_one(HybridAdam(params, lr=0.1), params)
    assert_equal(mine, twin, tolerance=0.0)
    assert rest is None or torch.equal(mine[0]._base[:, 3:], rest[:, 3:])


def train_one(optimizer: Optimizer, params: list[nn.Parameter]) -> None:
    for step in range(5):
        for param in params:
            param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(step)).to(
                param.dtype
            )
        optimizer.step()


@pytest.mark.parametrize("block_numel", [1024, 4096, 1024 * 1024])
def test_the_mixed_step_does_not_depend_on_its_blocks(block_numel: int) -> None:
    torch.manual_seed(0)
    results = []
    weights = [torch.randn(n).bfloat16() for n in (5000, 17, 3, 1024, 40)]
    grads = [torch.randn(weight.shape).bfloat16() for weight in weights]
    for size in (block_numel, 512 * 1024):
        slots = [
            Slot(
                weight.clone(),
                grad,
                torch.zeros(weight.shape),
                torch.zeros(weight.shape),
                torch.tensor(1.0),
                weight.float(),
            )
            for weight, grad in zip(weights, grads, strict=True)
        ]
        for _ in range(3):
            mixed_adam_step(slots, AdamOptions(lr=0.1), block_numel=size)
        results.append([tensor for slot in slots for tensor in (slot.param, slot.master, slot.exp_avg_sq)])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
    with pytest.raises(ValueError, match="multiple of 1024"):
        mixed_adam_step([], AdamOptions(), block_numel=1000)


def test_what_is_written_into_a_half_parameter_reaches_its_master() -> None:
    param = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = HybridAdam([param], lr=1e-6)
    param.grad = torch.ones_like(param)
    optimizer.step()
    master = optimizer.state[param]["master"]
    assert (master < 1).all()
    before = master.clone()
    with torch.no_grad():
        param[0] = 3.0
    param.grad = torch.zeros_like(param)
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    torch.testing.assert_close(master, torch.cat([torch.tensor([3.0]), before[1:]]), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("is_adamw", [True, False])
def test_states_go_to_torch_and_back(dtype: torch.dtype, is_adamw: bool) -> None:
    straight = make_params(dtype)
    optimizer = HybridAdam(straight, lr=1e-2, weight_decay=0.1, adamw_mode=is_adamw)
    train(optimizer, straight, steps=4)
    halfway = copy.deepcopy(straight)
    content = copy.deepcopy(optimizer.state_dict())
    train(optimizer, straight, steps=4, first=4)
    # Into ours, in every bit also of half parameters.
    again = copy.deepcopy(halfway)
    loaded = HybridAdam(again)
    loaded.load_state_dict(copy.deepcopy(content))
    train(loaded, again, steps=4, first=4)
    assert_equal(again, straight, tolerance=0.0)
    if dtype == torch.float64:  # torch keeps no masters, and its fused kernel mixes up layouts
        other = [param.detach().contiguous().requires_grad_() for param in halfway]
        theirs = (torch.optim.AdamW if is_adamw else torch.optim.Adam)(other)
        plain = copy.deepcopy(content)
        for state in plain["state"].values():
            state.update({key: value.contiguous() for key, value in state.items()})
        theirs.load_state_dict(plain)
        train(theirs, other, steps=4, first=4)
        assert_equal(other, straight)
        # And back.
        back = [param.detach().clone().requires_grad_() for param in straight]
        mine = CPUAdam(back, adamw_mode=is_adamw)
        mine.load_state_dict(theirs.state_dict())
        train(mine, back, steps=4, first=8)
        train(optimizer, straight, steps=4, first=8)
        assert_equal(back, straight)


@pytest.mark.parametrize("make", [HybridAdam, FusedAdam, FusedSGD, FusedLAMB])
def test_a_deep_copy_goes_on_by_itself(make: Any) -> None:
    params = make_params()[:3]
    optimizer = make(params, lr=0.01)
    train(optimizer, params, steps=2)
    other_params, other = copy.deepcopy((params, optimizer))
    train(optimizer, params, steps=2, first=2)
    train(other, other_params, steps=2, first=2)
    assert_equal(params, other_params, tolerance=0.0)
    other.zero_grad()


def test_zero_grad_keeps_gradients_if_told() -> None:
    for kind in (FusedAdam, FusedSGD, FusedLAMB):
        params = make_params()[:1]
        params[0].grad = torch.ones_like(params[0])
        optimizer = kind(params, set_grad_none=False)
        optimizer.zero_grad()
        assert params[0].grad is not None
        assert not params[0].grad.any()
        optimizer.zero_grad(set_to_none=True)
        assert params[0].grad is None


def test_a_closure_gives_the_loss() -> None:
    param = nn.Parameter(torch.ones(2))

    def closure() -> Tensor:
        loss = param.square().sum()
        loss.backward()
        return loss

    for kind in (HybridAdam, FusedSGD, FusedLAMB):
        param.grad = None
        assert kind([param]).step(closure) > 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: HybridAdam(p, lr=-1.0), "lr=-1.0"),
        (lambda p: HybridAdam(p, betas=(1.0, 0.9)), "beta1=1.0"),
        (lambda p: HybridAdam(p, nvme_offload_fraction=1.5), r"nvme_offload_fraction=1.5"),
        (lambda p: HybridAdam([torch.ones(2, dtype=torch.int64)]), "torch.int64"),
        (lambda p: FusedAdam(p, amsgrad=True), "amsgrad"),
        (lambda p: FusedLAMB(p, amsgrad=True), "amsgrad"),
        (lambda p: FusedLAMB(p, max_grad_norm=-1.0), "max_grad_norm=-1.0"),
        (lambda p: FusedSGD(p, nesterov=True), "nesterov=True"),
    ],
)
def test_wrong_options(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(make_params())


def test_they_are_registered_and_say_how_they_may_be_cut() -> None:
    for kind in (HybridAdam, CPUAdam, FusedAdam, FusedSGD, FusedLAMB):
        assert OPTIMIZERS.get_module(kind.__name__) is kind
        assert kind.elementwise is (kind is not FusedLAMB)
