"""`torch.utils.checkpoint` around layers that are cut: recomputation draws what the forward drew."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import colossalai
from colossalai.context import ParallelMode, random_state, seed, set_random_state
from colossalai.nn.layer.moe import FFNExperts, MoeLayer, NormalNoiseGenerator, Top1Router, TPExperts
from colossalai.nn.layer.sequence_parallel import TransformerSelfAttentionRing
from colossalai.tensor import (
    ColoParameter,
    ColoTensorSpec,
    ComputePattern,
    ComputeSpec,
    ProcessGroup,
    ShardSpec,
)
from tests.model_zoo.tiny import build, make_batch
from tests.shardformer.models import Translator, gpt2
from tests.turns import run_each

pytestmark = pytest.mark.dist

Made = tuple[nn.Module, Callable[[bool], None], Callable[[], Tensor]]
"""A model, what lets parts of it be computed again, given `use_reentrant`, and what computes a loss."""

RATES = {"embedding_dropout": 0.3, "dropout": 0.3, "attention_dropout": 0.3}
IDS = torch.arange(12).reshape(2, 6)


def again(parts: Iterable[nn.Module]) -> Callable[[bool], None]:
    """Return a function that lets modules be computed again."""
    forwards = [(part, part.forward) for part in parts]

    def start(is_reentrant: bool) -> None:
        for part, forward in forwards:
            part.forward = partial(checkpoint, forward, use_reentrant=is_reentrant)

    return start


def of_transformers(model: nn.Module, inner: Any) -> Made:
    def start(is_reentrant: bool) -> None:
        inner.gradient_checkpointing_enable({"use_reentrant": is_reentrant})

    inner.config.use_cache = False
    return model, start, lambda: model(IDS).logits.square().mean()


def of_gpt2() -> Made:
    return of_transformers(model := gpt2(dropout=0.3), model)


def of_t5() -> Made:
    return of_transformers(model := Translator(dropout_rate=0.3), model.model)


def of_zoo(name: str, **options: Any) -> Made:
    model = build(name, **RATES, **options)
    for block in model.blocks:
        block.drop_path.p = 0.3
    inputs = make_batch(name, 8, 0)[0] if name == "vit" else torch.arange(64).reshape(8, 8) % 16
    return model, again(model.blocks), lambda: model(inputs).square().mean()


class Dropped(nn.Module):
    """A dropout, by a function, of what a column layer leaves to a row layer."""

    def __init__(self) -> None:
        super().__init__()
        group = ProcessGroup(tp_degree=2)

        def cut(shape: tuple[int, int], dim: int) -> ColoParameter:
            compute_spec = ComputeSpec(ComputePattern.TP1D)
            compute_spec.set_output_replicate(False)
            spec = ColoTensorSpec(group, ShardSpec([dim], [2]), compute_spec)
            return ColoParameter(torch.randn(shape), spec=spec)

        self.column, self.row = cut((4, 6), 0), cut((6, 4), 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.dropout(functional.linear(x, self.column), 0.4)
        return functional.linear(hidden, self.row)


def of_colo_tensors() -> Made:
    model, x = Dropped(), torch.randn(3, 6, requires_grad=True)
    return model, again([model]), lambda: (model(x) ** 2).sum()


def of_experts(make_experts: Callable[[], Any]) -> Made:
    layer = MoeLayer(
        6, 4, Top1Router(noisy_func=NormalNoiseGenerator(1), select_policy="random"), make_experts()
    )
    layers = nn.Sequential(nn.Linear(6, 6), layer)
    x = torch.randn(10, 6)
    return layers, again([layer]), lambda: layers(x).square().sum()


def of_scores() -> Made:
    layer = TransformerSelfAttentionRing(8, 2, 0.4, lambda scores, mask: scores, 1)
    x = torch.randn(6, 2, 8, requires_grad=True)
    return layer, again([layer]), lambda: layer(x).square().sum()


TENSOR = {"tensor": {"size": 2, "mode": "1d"}}
SEQUENCES = {"sequence": {"size": 2, "attention": "ring"}}
CASES: dict[str, tuple[dict[str, Any], Callable[[], Made]]] = {
    "gpt2": (TENSOR, of_gpt2),
    "t5": (TENSOR, of_t5),
    "colo tensors": (TENSOR, of_colo_tensors),
    "experts": (
        {"moe": {"size": 2}, "data": 2},
        partial(of_experts, partial(FFNExperts, 4, 6, 8, None, 0.4)),
    ),
    "cut experts": (
        {**TENSOR, "moe": {"size": 1}},
        partial(of_experts, partial(TPExperts, 4, 6, 8, None, 0.4)),
    ),
    "1d": (TENSOR, partial(of_zoo, "gpt", max_position_embeddings=8)),
    "2d": ({"tensor": {"size": 4, "mode": "2d"}}, partial(of_zoo, "vit")),
    "ring": (SEQUENCES, partial(of_zoo, "gpt", max_position_embeddings=8)),
    "ulysses": (
        {"sequence": {"size": 2, "attention": "ulysses"}},
        partial(of_zoo, "gpt", max_position_embeddings=8),
    ),
    "sequences and layers": ({**SEQUENCES, **TENSOR}, partial(of_zoo, "gpt", max_position_embeddings=8)),
    "scores": (SEQUENCES, of_scores),
}


def gradients(model: nn.Module, compute: Callable[[], Tensor]) -> list[Tensor]:
    """Return the loss and the gradients."""
    model.zero_grad()
    loss = compute()
    with seed(ParallelMode.TENSOR):  # the backward draws nothing by itself, but what is in force may differ
        loss.backward()
    return [loss.detach(), *(param.grad.clone() for param in model.parameters() if param.grad is not None)]


def compared(name: str) -> tuple[list[float], float]:
    """Return how far gradients are from those without recomputation, by `use_reentrant`, and other masks'."""
    torch.set_default_dtype(torch.float64)
    parallel, make = CASES[name]
    colossalai.launch_from_torch({"parallel": parallel}, verbose=False)
    torch.manual_seed(0)
    model, start_again, compute = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    colossalai.initialize(model, optimizer, verbose=False)
    model.train()
    start = random_state()
    truth, others = gradients(model, compute), gradients(model, compute)
    worst = []
    for is_reentrant in (False, True):
        start_again(is_reentrant)
        set_random_state(start)
        found = [gradients(model, compute), gradients(model, compute)]
        worst.append(max(map(largest_difference, found, (truth, others))))
    return worst, largest_difference(truth, others)


def largest_difference(first: list[Tensor], second: list[Tensor]) -> float:
    assert len(first) == len(second)
    return max((a - b).abs().max().item() for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(
    ("num_ranks", "names"),
    [
        (2, [name for name in CASES if name not in ("2d", "sequences and layers")]),
        (4, ["2d", "sequences and layers"]),
    ],
)
def test_gradients_are_those_without_recomputation(num_ranks: int, names: list[str]) -> None:
    for name, of_ranks in zip(names, run_each(num_ranks, compared, [(name,) for name in names]), strict=True):
        for worst, of_other_masks in of_ranks:
            assert max(worst) < 1e-12, (name, worst)
            assert of_other_masks > 1e-3, name


def moves_the_state(parallel: dict[str, Any], make: Callable[[], Made]) -> bool:
    """Return whether a forward without dropout moves the random state that a user draws from."""
    colossalai.launch_from_torch({"parallel": parallel}, verbose=False)
    torch.manual_seed(0)
    model, _, compute = make()
    colossalai.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), verbose=False)
    model.train()
    before = torch.get_rng_state()
    compute().backward()
    return not torch.equal(torch.get_rng_state(), before)


def without_dropout() -> Made:
    return of_transformers(model := gpt2(), model)


def without_dropout_of_experts() -> Made:
    layer = MoeLayer(6, 4, Top1Router(), FFNExperts(4, 6, 8))
    model, x = nn.Sequential(nn.Linear(6, 6), layer), torch.ones(5, 6)
    return model, lambda _: None, lambda: model(x).square().sum()


def test_without_dropout_users_draw_what_they_draw_in_one_process() -> None:
    cases = [(TENSOR, without_dropout), ({"moe": {"size": 2}}, without_dropout_of_experts)]
    assert run_each(2, moves_the_state, cases) == [[False, False]] * 2
