"""Dispatch gives what a loop over tokens and their choices gives, whatever the ranks hold and send."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import colossalai
from colossalai.communication import ledger
from colossalai.context import Mesh
from colossalai.core import global_context as gpc
from colossalai.nn.layer.moe import dispatch
from tests.tiers import further
from tests.turns import run_each

NUM_EXPERTS, FEATURES, CHOICES = 8, 6, 3
NUM_TOKENS = (5, 0, 7, 3)  # by data-parallel rank; one has none
ALONE = Mesh({"edp": 1, "ep": 1, "pp": 1}, rank=0, views={"dp": ("edp", "ep")})


def by_loop(hidden: Tensor, experts: Tensor, weights: Tensor, matrices: Tensor, served: Tensor) -> Tensor:
    sums = [torch.zeros_like(token) for token in hidden]
    for token in range(len(hidden)):
        for choice in range(experts.shape[1]):
            if served[token, choice]:
                result = torch.tanh(matrices[experts[token, choice]] @ hidden[token])
                sums[token] = sums[token] + weights[token, choice] * result
    return torch.stack(sums) if sums else hidden * matrices.sum() * weights.sum()


def computing(matrices: Tensor) -> Any:
    def compute(rows: Tensor, sizes: list[int]) -> Tensor:
        parts = zip(rows.split(sizes), matrices.unbind(0), strict=True)
        return torch.cat([torch.tanh(part @ matrix.t()) for part, matrix in parts])

    return compute


def make_inputs(num_tokens: int, kind: str, generator: torch.Generator) -> list[Tensor]:
    """Return tokens, choices, weights, which count, and what the result is multiplied by for a loss."""
    hidden, factors = (
        torch.randn(num_tokens, FEATURES, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    experts = torch.rand(num_tokens, NUM_EXPERTS, generator=generator).topk(CHOICES, -1).indices
    if kind == "one expert":
        experts = torch.full_like(experts, 5)
    if kind == "first rank":
        experts = experts % 2
    served = torch.ones_like(experts, dtype=torch.bool)
    if kind == "dropped":
        served = torch.rand(num_tokens, CHOICES, generator=generator) > 0.4
    weights = torch.rand(num_tokens, CHOICES, generator=generator, dtype=torch.float64)
    return [hidden, experts, weights, served, factors]


def against_a_loop(tp_size: int, kind: str) -> None:
    tensor = {"tensor": {"size": tp_size, "mode": "1d"}} if tp_size > 1 else {}
    colossalai.launch_from_torch({"parallel": {"moe": {"size": 2}, **tensor}}, verbose=False)
    mesh, generator = gpc.mesh, torch.Generator().manual_seed(0)
    replicas, cutting = mesh.axis("dp"), mesh.axis(("ep", "tp"))
    matrices = torch.randn(NUM_EXPERTS, FEATURES, FEATURES, generator=generator, dtype=torch.float64)
    inputs = [make_inputs(number, kind, generator) for number in NUM_TOKENS[: replicas.size]]

    whole = matrices.clone().requires_grad_()
    truths = []
    for hidden, experts, weights, served, factors in inputs:
        leaves = hidden.clone().requires_grad_(), weights.clone().requires_grad_()
        result = by_loop(leaves[0], experts, leaves[1], whole, served)
        (result * factors).sum().backward()
        truths.append((result.detach(), *(leaf.grad for leaf in leaves)))

    hidden, experts, weights, served, factors = inputs[replicas.rank]
    hidden.requires_grad_()
    weights.requires_grad_()
    mine = matrices.chunk(cutting.size)[cutting.rank].clone().requires_grad_()
    with ledger() as book:
        result = dispatch(
            hidden,
            experts,
            weights,
            computing(mine),
            num_experts=NUM_EXPERTS,
            mesh=mesh,
            served=served if kind == "dropped" else None,
        )
    (result * factors).sum().backward()
    found = (result.detach(), hidden.grad, weights.grad)
    for name, ours, truth in zip(("result", "hidden", "weights"), found, truths[replicas.rank], strict=True):
        torch.testing.assert_close(ours, truth, atol=1e-12, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
    assert mine.grad is not None, "experts without tokens have gradients, too"
    total = colossalai.communication.all_reduce(mine.grad, mesh.axis("edp"))
    torch.testing.assert_close(total, whole.grad.chunk(cutting.size)[cutting.rank], atol=1e-12, rtol=0)
    if tp_size == 1:
        away = experts.ne(-1) & served & (experts // (NUM_EXPERTS // 2) != cutting.rank)
        sent = sum(entry.num_bytes for entry in book.entries if entry.op == "exchange")
        # There each row to another rank; back each row of another rank; counts of 64 bits.
        back = sum(
            int((e.ne(-1) & s & (e // (NUM_EXPERTS // 2) == cutting.rank)).sum())
            for number, (_, e, _, s, _) in enumerate(inputs)
            if number // 2 == replicas.rank // 2 and number != replicas.rank
        )
        assert sent == (int(away.sum()) + back) * FEATURES * 8 + NUM_EXPERTS // 2 * 8
    gpc.destroy()


@pytest.mark.dist
@pytest.mark.parametrize("world_size", [further(2), 4])
def test_against_a_loop(world_size: int) -> None:
    kinds = ("even", "one expert", "first rank", "dropped")
    tp_sizes = (1,) if world_size == 2 else (1, 2)
    run_each(world_size, against_a_loop, [(tp_size, kind) for tp_size in tp_sizes for kind in kinds])


@pytest.mark.unit
@given(
    num_tokens=st.integers(0, 9),
    choices=st.integers(1, 4),
    features=st.integers(1, 5),
    is_dropped=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_one_rank(num_tokens: int, choices: int, features: int, is_dropped: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    matrices = torch.randn(5, features, features, generator=generator, dtype=torch.float64)
    experts = torch.rand(num_tokens, 5, generator=generator).topk(choices, -1).indices
    served = torch.rand(num_tokens, choices, generator=generator) > (0.5 if is_dropped else -1)
    leaves = [
        torch.randn(num_tokens, size, generator=generator, dtype=torch.float64).requires_grad_()
        for size in (features, choices)
    ]
    factors = torch.randn(num_tokens, features, generator=generator, dtype=torch.float64)
    grads = []
    for result in (
        by_loop(leaves[0], experts, leaves[1], matrices, served),
        dispatch(
            leaves[0],
            experts,
            leaves[1],
            computing(matrices),
            num_experts=5,
            mesh=ALONE,
            served=served if is_dropped else None,
        ),
    ):
        loss = (result * factors).sum() + 0 * (leaves[0].sum() + leaves[1].sum())
        grads.append((result.detach(), *torch.autograd.grad(loss, leaves)))
    for truth, ours in zip(*grads, strict=True):
        torch.testing.assert_close(ours, truth, atol=1e-12, rtol=0)


@pytest.mark.unit
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_of_sixteen_bits_are_rounded_once(dtype: torch.dtype) -> None:
    """Choices are added in float32: each sum is the number of 16 bits that is nearest to the true one."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(64, 8, generator=generator).to(dtype).requires_grad_()
    experts = torch.rand(64, 5, generator=generator).topk(4, -1).indices
    weights = torch.rand(64, 4, generator=generator)
    factors = torch.rand(64, 8, generator=generator).to(dtype)

    def twice(rows: Tensor, sizes: list[int]) -> Tensor:
        return rows * 2  # exact

    result = dispatch(hidden, experts, weights, twice, num_experts=5, mesh=ALONE)
    assert result.dtype == dtype
    exact = sum(2 * hidden.detach().float() * weights[:, choice : choice + 1] for choice in range(4))
    assert torch.equal(result, exact.to(dtype))
    result.backward(factors)
    terms = [
        (2 * (factors.float() * weights[:, choice : choice + 1]).to(dtype)).float() for choice in range(4)
    ]
    assert torch.equal(hidden.grad, sum(terms).to(dtype))
