"""Experts: how they start, what they compute, and what is refused; `MoeLayer` and `MoeModule` around them."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import colossalai
from colossalai.context import MOE_CONTEXT, moe_set_seed
from colossalai.core import global_context as gpc
from colossalai.lazy import LazyInitContext
from colossalai.nn.layer import Linear1D_Col
from colossalai.nn.layer.moe import (
    Experts,
    FFNExperts,
    MoeLayer,
    MoeModule,
    Routes,
    Top1Router,
    Top2Router,
    TopKRouter,
    TPExperts,
    build_ffn_experts,
)
from colossalai.tensor import gradient_sync, spec_of
from tests.ranks import run_ranks
from tests.tiers import further
from tests.turns import run_each

WIDTH, NUM_EXPERTS = 6, 4


class Expert(nn.Module):
    """A feed-forward expert, with its layers one floor down."""

    def __init__(self, width: int, inner: int = 5, drop_rate: float = 0.0) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(width, inner), nn.Tanh(), nn.Dropout(drop_rate), nn.Linear(inner, width)
        )
        self.scale = nn.Parameter(torch.ones(width), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * self.scale


def routes_of(num_tokens: int, num_experts: int, k: int = 2, seed: int = 0) -> Routes:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_tokens, num_experts, generator=generator, dtype=torch.float64)
    return TopKRouter(k)(logits)


def each_alone(experts: Experts, build: Callable[[], nn.Module]) -> list[nn.Module]:
    """Return each expert as a module by itself."""
    alone = [build().double() for _ in range(experts.num_experts)]
    for number, one in enumerate(alone):
        one.load_state_dict({name: value[number] for name, value in experts.state_dict().items()})
    return alone


@pytest.mark.unit
def test_each_expert_computes_its_tokens() -> None:
    experts = Experts(Expert, NUM_EXPERTS, width=WIDTH).double()
    names = {name: tuple(param.shape) for name, param in experts.named_parameters()}
    assert names == {
        "scale": (4, 6),
        "net.0.weight": (4, 5, 6),
        "net.0.bias": (4, 5),
        "net.3.weight": (4, 6, 5),
        "net.3.bias": (4, 6),
    }
    hidden = torch.randn(9, WIDTH, dtype=torch.float64)
    routes = routes_of(9, NUM_EXPERTS)
    result, alone = experts(hidden, routes), each_alone(experts, partial(Expert, WIDTH))
    for token in range(9):
        wanted = sum(
            weight * alone[number](hidden[token : token + 1])[0]
            for number, weight in zip(routes.experts[token], routes.weights[token], strict=True)
        )
        torch.testing.assert_close(result[token], wanted, atol=1e-12, rtol=0)


class TiedExpert(nn.Module):
    """An expert whose two layers share their weight; only the second has a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


@pytest.mark.unit
def test_weights_that_are_tied_inside_an_expert_stay_tied() -> None:
    experts = Experts(TiedExpert, 2).double()
    assert [name for name, _ in experts.named_parameters()] == ["first.weight", "second.bias"]
    assert set(experts.state_dict()) == {"first.weight", "second.weight", "second.bias"}
    alone = each_alone(experts, TiedExpert)
    hidden = torch.randn(5, WIDTH, dtype=torch.float64)
    routes = routes_of(5, 2, k=1)
    result = experts(hidden, routes)
    chosen = routes.experts[:, 0].tolist()
    wanted = torch.stack([alone[expert](row) for expert, row in zip(chosen, hidden, strict=True)])
    torch.testing.assert_close(result, wanted * routes.weights, atol=1e-12, rtol=0)
    result.square().sum().backward()
    (wanted * routes.weights).square().sum().backward()
    for name, param in experts.named_parameters():
        for number, one in enumerate(alone):
            grad = one.get_parameter(name).grad
            torch.testing.assert_close(param.grad[number], grad, atol=1e-12, rtol=0)


@pytest.mark.unit
def test_an_expert_without_tokens_has_zero_gradients() -> None:
    for experts in (Experts(Expert, 3, width=WIDTH), FFNExperts(3, WIDTH, 5)):
        routes = Routes(torch.ones(4, 1, dtype=torch.long), torch.ones(4, 1), None, *[torch.ones(4, 3)] * 2)
        experts(torch.randn(4, WIDTH), routes).sum().backward()
        for name, param in experts.named_parameters():
            if param.requires_grad:
                assert param.grad[0].eq(0).all(), name
                assert param.grad[1].ne(0).any(), name
        none = Routes(torch.ones(0, 1, dtype=torch.long), torch.ones(0, 1), None, *[torch.ones(0, 3)] * 2)
        experts.zero_grad()
        experts(torch.randn(0, WIDTH), none).sum().backward()
        assert all(param.grad.eq(0).all() for param in experts.parameters() if param.requires_grad)


@pytest.mark.unit
def test_how_experts_start() -> None:
    def build(seed: int | None = 1) -> tuple[Experts, Experts]:
        if seed is not None:
            torch.manual_seed(3)
            moe_set_seed(seed)
        return Experts(Expert, NUM_EXPERTS, width=WIDTH), Experts(Expert, NUM_EXPERTS, width=WIDTH)

    (first, second), (again, _), (other, _) = build(), build(), build(2)
    weights = {id(each): each.get_parameter("net.0.weight") for each in (first, second, again, other)}
    assert torch.equal(weights[id(first)], weights[id(again)])
    assert not torch.equal(weights[id(first)], weights[id(second)]), "two layers"
    assert not torch.equal(weights[id(first)], weights[id(other)]), "another seed"
    rows = weights[id(first)].flatten(1)
    assert all(not torch.equal(rows[0], row) for row in rows[1:])
    bound = 1 / WIDTH**0.5  # of nn.Linear
    assert rows.abs().max() <= bound
    assert rows.abs().mean().item() == pytest.approx(bound / 2, rel=0.3)
    torch.manual_seed(3)
    state = torch.get_rng_state()
    torch.randint(2**31, ())
    wanted = torch.rand(1)
    torch.set_rng_state(state)
    build(None)[0]
    torch.set_rng_state(state)
    Experts(Expert, NUM_EXPERTS, width=WIDTH)
    assert torch.equal(torch.rand(1), wanted), "what is drawn next does not depend on the experts"
    moe_set_seed(0)


@pytest.mark.unit
def test_a_lazy_layer_has_the_values_of_an_eager_one() -> None:
    torch.manual_seed(5)
    eager = Experts(Expert, NUM_EXPERTS, width=WIDTH)
    torch.manual_seed(5)
    with LazyInitContext():
        lazy = Experts(Expert, NUM_EXPERTS, width=WIDTH)
    assert all(param.is_meta for param in lazy.parameters())
    LazyInitContext.materialize(lazy)
    for name, param in eager.named_parameters():
        assert torch.equal(lazy.get_parameter(name), param), name
    hidden = torch.randn(5, WIDTH)
    routes = routes_of(5, NUM_EXPERTS)
    assert torch.equal(lazy(hidden, routes), eager(hidden, routes))


@pytest.mark.unit
def test_training_and_evaluation_reach_the_experts() -> None:
    experts = Experts(Expert, NUM_EXPERTS, width=WIDTH, drop_rate=0.5)
    hidden, routes = torch.randn(9, WIDTH), routes_of(9, NUM_EXPERTS)
    assert not torch.equal(experts(hidden, routes), experts(hidden, routes))
    experts = copy.deepcopy(experts).eval()
    assert torch.equal(experts(hidden, routes), experts(hidden, routes))


class Wider(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH + 1)


class Silent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))


class TwoInputs(Silent):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x


@pytest.mark.unit
@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Experts(Expert, 0, width=WIDTH), "num_experts is 0; it must be at least 1"),
        (lambda: Experts(Silent, 2), r"expert=Silent has no forward\(x\)"),
        (lambda: Experts(TwoInputs, 2), r"expert=TwoInputs has no forward\(x\)"),
        (lambda: Experts(nn.Identity, 2), "expert=Identity has no parameters"),
        (lambda: Experts(nn.BatchNorm1d, 2, num_features=3), "has the buffer 'running_mean'"),
        (lambda: Experts(dict, 2), "expert=dict returned a dict"),
        (
            lambda: Experts(Wider, 2)(torch.zeros(3, WIDTH), routes_of(3, 2)),
            r"a Wider, made \(\d, 7\) of rows \(\d, 6\).*keep the width",
        ),
        (
            lambda: MoeLayer(WIDTH, 3, Top1Router(), FFNExperts(4, WIDTH, 8)),
            "num_experts is 3, and experts are 4",
        ),
        (
            lambda: MoeLayer(WIDTH, 4, Top1Router(), FFNExperts(4, WIDTH, 8))(torch.zeros(2, 3)),
            r"shape \(2, 3\): its last dimension must be dim_model = 6",
        ),
        (lambda: MoeLayer(WIDTH, 4, nn.Identity(), FFNExperts(4, WIDTH, 8)), "must be a MoeRouter"),
        (lambda: MoeLayer(WIDTH, 4, Top1Router(), nn.Identity()), "experts is a Identity"),
        (lambda: MoeModule(WIDTH, 4), "pass expert_cls and its arguments, or expert_instance"),
        (
            lambda: MoeModule(WIDTH, 4, noisy_policy="White", expert_cls=Expert, width=WIDTH),
            "noisy_policy is 'White'; it must be 'Jitter', 'Gaussian' or None",
        ),
        (
            lambda: MoeModule(WIDTH, 4, residual_instance=nn.Identity(), expert_cls=Expert, width=WIDTH),
            "without use_residual=True",
        ),
        (
            lambda: MoeModule(WIDTH, 4, use_residual=True, expert_instance=FFNExperts(4, WIDTH, 8)),
            "needs residual_instance",
        ),
    ],
)
def test_bad_arguments(build: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


def mistakes_of_ranks() -> None:
    early = nn.Sequential(Experts(Expert, NUM_EXPERTS, width=WIDTH))
    colossalai.launch_from_torch({"parallel": {"moe": {"size": 2}}}, verbose=False)
    with pytest.raises(ValueError, match="0, a Experts, was built for expert 1, and the plan has 2"):
        colossalai.initialize(early, torch.optim.SGD(early.parameters(), lr=0.1), verbose=False)
    with pytest.raises(ValueError, match=r"has 3 experts, which 2 ranks along ep do not divide.* \[1, 3\]"):
        Experts(Expert, 3, width=WIDTH)
    # No rank waits for another, even where the number of one of them would be refused anyway.
    number = 4 if gpc.get_global_rank() == 0 else 3
    with pytest.raises(ValueError, match=rf"num_experts={number} here.*have \[4, 3\]"):
        Experts(Expert, number, width=WIDTH)
    with pytest.raises(ValueError, match="divide neither num_experts=3 nor d_ff=7"):
        build_ffn_experts(3, WIDTH, 7)
    assert isinstance(build_ffn_experts(3, WIDTH, 8), TPExperts)
    assert isinstance(build_ffn_experts(4, WIDTH, 8), FFNExperts)
    gpc.destroy()
    colossalai.launch_from_torch({"parallel": {"tensor": {"size": 2, "mode": "1d"}}}, verbose=False)
    with pytest.raises(ValueError, match="expert=Linear1D_Col: weight is cut over tp by itself"):
        Experts(Linear1D_Col, 4, in_features=WIDTH, out_features=WIDTH)
    gpc.destroy()
    colossalai.launch_from_torch({"parallel": {"sequence": {"size": 2}}}, verbose=False)
    with pytest.raises(ValueError, match="experts and sequence parallelism cannot be combined"):
        FFNExperts(4, WIDTH, 8)
    gpc.destroy()


@pytest.mark.dist
def test_mistakes_of_ranks() -> None:
    run_ranks(mistakes_of_ranks, 2)


def in_two_dimensions(mode: str, size: int, depth: int) -> None:
    tensor = {"size": size, "mode": mode, **({"depth": depth} if depth > 1 else {})}
    colossalai.launch_from_torch({"parallel": {"tensor": tensor}}, verbose=False)
    with pytest.raises(ValueError, match=f"experts and tensor mode '{mode}' cannot be combined"):
        FFNExperts(4, WIDTH, 8)
    gpc.destroy()


@pytest.mark.dist
@pytest.mark.parametrize(("size", "modes"), [(4, ("2d", "2.5d")), further(8, ("3d",))])
def test_other_tensor_modes(size: int, modes: tuple[str, ...]) -> None:
    run_each(size, in_two_dimensions, [(mode, size, 1) for mode in modes])


@pytest.mark.unit
def test_a_module_with_one_beside_its_experts() -> None:
    module = MoeModule(WIDTH, 4, top_k=2, use_residual=True, expert_cls=Expert, width=WIDTH).double().eval()
    x = torch.randn(2, 3, WIDTH, dtype=torch.float64)
    shares = module.residual_mix(x).softmax(-1)
    wanted = shares[..., :1] * module.residual(x) + shares[..., 1:] * module.moe_layer(x)
    torch.testing.assert_close(module(x), wanted)
    assert isinstance(module.moe_layer.router, Top2Router)
    plain = MoeModule(WIDTH, 4, expert_instance=FFNExperts(4, WIDTH, 8), noisy_policy="Jitter")
    assert isinstance(plain.moe_layer.router, Top1Router)
    assert plain(torch.randn(5, WIDTH)).shape == (5, WIDTH)
    three = MoeModule(WIDTH, 4, top_k=3, expert_cls=Expert, width=WIDTH, noisy_policy="Gaussian")
    assert three.moe_layer.router.drop_tks
    MOE_CONTEXT.reset_loss()


@pytest.mark.unit
def test_the_gate_is_in_float32() -> None:
    layer = MoeLayer(WIDTH, 4, TopKRouter(1), FFNExperts(4, WIDTH, 8)).to(torch.bfloat16)
    x = torch.randn(5, WIDTH).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = layer.gate(x)
    assert torch.equal(logits, x.float() @ layer.gate.weight.float().t())
    assert layer(x).dtype == torch.bfloat16
    assert layer.gate.weight.abs().max() <= 2 * (0.1 / WIDTH) ** 0.5
    MOE_CONTEXT.reset_loss()


NUM_TOKENS = (5, 0, 7, 3)  # by data-parallel rank


def parts_of_experts(tp_size: int) -> None:
    """Experts that are cut within give what whole ones give, with uneven tokens, some of them dropped."""
    torch.manual_seed(0)
    whole = FFNExperts(3, WIDTH, 8).double()
    torch.nn.init.normal_(whole.b1)
    torch.nn.init.normal_(whole.b2)
    colossalai.launch_from_torch(
        {"parallel": {"moe": {"size": 2}, "tensor": {"size": tp_size, "mode": "1d"}}}, verbose=False
    )
    replicas = gpc.mesh.axis("dp")
    experts = copy.deepcopy(TPExperts(3, WIDTH, 8)).double()
    with torch.no_grad():
        for name, param in experts.named_parameters():
            param.copy_(spec_of(param).slice_of(whole.get_parameter(name)))
    router = Top2Router(0.5, min_capacity=0)
    generator = torch.Generator().manual_seed(1)
    results = []
    for number in NUM_TOKENS[: replicas.size]:
        hidden, factors = (
            torch.randn(number, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2)
        )
        logits = torch.randn(number, 3, generator=generator, dtype=torch.float64)
        results.append((hidden, logits, factors))

    def run(module: Any, part: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden, logits, factors = part
        leaves = hidden.clone().requires_grad_(), logits.clone().requires_grad_()
        result = module(leaves[0], router(leaves[1]))
        (result * factors).sum().backward()
        return result.detach(), leaves[0].grad, leaves[1].grad

    truths = [run(whole, part) for part in results]
    found = run(experts, results[replicas.rank])
    for ours, truth in zip(found, truths[replicas.rank], strict=True):
        torch.testing.assert_close(ours, truth, atol=1e-12, rtol=0)
    for name, param in experts.named_parameters():
        sync = gradient_sync(param, replicas)
        grad = colossalai.communication.all_reduce(param.grad, sync.axis)
        torch.testing.assert_close(
            spec_of(param).whole(grad), whole.get_parameter(name).grad, atol=1e-12, rtol=0, msg=name
        )
    gpc.destroy()


@pytest.mark.dist
@pytest.mark.parametrize("tp_size", [further(1), 2])
def test_parts_of_experts(tp_size: int) -> None:
    run_ranks(parts_of_experts, 4, tp_size)
