"""The two parts of a backward together are the backward: the same gradients, the same work."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from colossalai.pipeline.execution._split_backward import input_grads

pytestmark = pytest.mark.unit

WIDTH = 6


class Scale(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        Scale.calls += 1
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).sum(0)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        return Scale.apply(x.tanh(), self.weight).sin()


class ScaledByDerived(Scaled):
    def forward(self, x):
        return Scale.apply(x.tanh(), Scale.apply(self.weight.exp()[None], self.weight).sum(0) + self.weight)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.layer(self.layer(x).tanh())


class RawTied(nn.Module):
    """The same leaf under two products, and behind a transpose."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x):
        hidden = (x @ self.weight).tanh() @ self.weight
        return torch.nn.functional.linear(hidden.sin(), self.weight) * self.weight[0]


class SharedDerived(nn.Module):
    """Pieces of one normalised weight, used at different depths."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2 * WIDTH, WIDTH))
        self.unused = nn.Parameter(torch.randn(3))

    def forward(self, x):
        first, second = nn.functional.normalize(self.weight).chunk(2)
        return ((x @ first).tanh() @ second) + first.sum()


class Attention(nn.Module):
    def __init__(self, heads=2):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        split = self.qkv(x).unflatten(-1, (3, self.heads, -1)).movedim(-3, 0).transpose(-2, -3)
        mixed = nn.functional.scaled_dot_product_attention(*split)
        return self.out(mixed.transpose(-2, -3).flatten(-2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attention, self.norm2 = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.mlp(self.norm2(x))


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.block, self.last = nn.Linear(WIDTH, WIDTH), Block(), nn.Linear(WIDTH, WIDTH)
        self.runs = 0

    def forward(self, x):
        return self.last(checkpoint(self.count, self.first(x), use_reentrant=False))

    def count(self, x):
        self.runs += 1
        return self.block(x)


class Branches(nn.Module):
    """Two outputs of which one depends on parameters only, and an input that skips."""

    def __init__(self):
        super().__init__()
        self.layer, self.bias = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        derived = self.bias.exp()
        return self.layer(x) + x + derived, derived, self.bias * 2, x


def conv():
    return nn.Sequential(nn.Unflatten(-1, (2, 3)), nn.Conv1d(2, 2, 2), nn.BatchNorm1d(2), nn.Flatten(-2))


def mlp():
    return nn.Sequential(
        nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)
    )


CASES = {
    "mlp": mlp,
    "without bias": lambda: nn.Linear(WIDTH, WIDTH, bias=False),
    "block": Block,
    "blocks": lambda: nn.Sequential(Block(), Block()),
    "conv": conv,
    "python function": Scaled,
    "python functions": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Scaled(), Block(), Scaled()),
    "python function on parameters": ScaledByDerived,
    "module used twice": Twice,
    "tied leaf": RawTied,
    "tied across": lambda: nn.Sequential(shared := Twice(), Block(), shared),
    "shared derived weight": SharedDerived,
    "checkpointed": Checkpointed,
    "branches": Branches,
    "no parameters": nn.Tanh,
    "identity": nn.Identity,
    "input ignored": lambda: IgnoresInput(),
}


class IgnoresInput(RawTied):
    def forward(self, x):
        return self.weight * 2


def as_tuple(value):
    return value if isinstance(value, tuple) else (value,)


def prepare(name, *, seed=0):
    torch.manual_seed(seed)
    module = CASES[name]().double()
    x = torch.randn(4, WIDTH, dtype=torch.float64, requires_grad=True)
    if name in ("block", "blocks", "checkpointed", "python functions", "tied across"):
        x = torch.randn(2, 3, WIDTH, dtype=torch.float64, requires_grad=True)
    return module, x


def plain(module, x):
    outputs = as_tuple(module(x))
    grads = [torch.randn_like(output) for output in outputs]
    torch.autograd.backward(outputs, grads)
    return grads


def assert_same(module, twin):
    for (name, param), other in zip(module.named_parameters(), twin.parameters(), strict=True):
        if other.grad is None:
            assert param.grad is None, name
        else:
            torch.testing.assert_close(param.grad, other.grad, rtol=1e-12, atol=1e-12, msg=name)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("rounds", [1, 2])
def test_both_parts_are_the_backward(name, rounds):
    module, x = prepare(name)
    twin, y = copy.deepcopy(module), x.detach().clone().requires_grad_()
    found = None
    for _ in range(rounds):  # gradients of microbatches add up
        grads = plain(twin, y)
        outputs = as_tuple(module(x))
        (found,), pending = input_grads(outputs, grads, [x])
        del outputs
        assert all(param.grad is None for param in module.parameters()) or rounds > 1
        pending.weight_grads()
        assert x.grad is None
        if found is not None:
            torch.testing.assert_close(found, y.grad, rtol=1e-12, atol=1e-12)
        else:
            assert y.grad is None
        y.grad = None
    assert_same(module, twin)


@pytest.mark.parametrize("name", ["mlp", "block", "checkpointed", "python functions", "tied leaf"])
def test_without_inputs_all_is_left_for_later(name):
    module, x = prepare(name)
    twin, x = copy.deepcopy(module), x.detach()
    grads = plain(twin, x)
    found, pending = input_grads(as_tuple(module(x)), grads, [])
    assert found == ()
    assert all(param.grad is None for param in module.parameters())
    pending.weight_grads()
    assert_same(module, twin)


@pytest.mark.parametrize("name", ["mlp", "block", "conv", "checkpointed", "module used twice", "tied leaf"])
def test_no_product_is_computed_twice(name):
    module, x = prepare(name)
    output = module(x)
    with FlopCounterMode(display=False) as whole:
        output.backward(torch.ones_like(output))
    output = module(x)
    with FlopCounterMode(display=False) as first:
        _, pending = input_grads([output], [torch.ones_like(output)], [x])
    with FlopCounterMode(display=False) as second:
        pending.weight_grads()
    assert first.get_total_flops() + second.get_total_flops() == whole.get_total_flops()
    if name in ("mlp", "block", "conv"):  # half of each product's work is left
        assert second.get_total_flops() > 0.3 * whole.get_total_flops()


def test_a_python_function_runs_once_and_a_block_is_recomputed_once():
    module, x = prepare("python functions")
    output, Scale.calls = module(x), 0
    _, pending = input_grads([output], [torch.ones_like(output)], [x])
    pending.weight_grads()
    assert Scale.calls == 2
    module, x = prepare("checkpointed")
    output = module(x)
    _, pending = input_grads([output], [torch.ones_like(output)], [x])
    pending.weight_grads()
    assert module.runs == 2


@pytest.mark.parametrize("name", ["mlp", "python functions", "module used twice", "tied leaf"])
def test_hooks_of_parameters_run_once(name):
    module, x = prepare(name)
    seen = {}
    for key, param in module.named_parameters():
        param.register_hook(lambda grad, key=key: seen.setdefault(key, []).append("gradient") or grad * 2)
        param.register_post_accumulate_grad_hook(
            lambda _, key=key: seen.setdefault(key, []).append("accumulated")
        )
    twin, y = prepare(name)
    grads = plain(twin, y)
    _, pending = input_grads(as_tuple(module(x)), grads, [x])
    pending.weight_grads()
    assert seen == {key: ["gradient", "accumulated"] for key, _ in module.named_parameters()}
    for param, other in zip(module.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(param.grad, 2 * other.grad, rtol=1e-12, atol=1e-12)
