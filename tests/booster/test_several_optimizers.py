"""Several optimizers in one `boost`: parts of a model, or the players of a GAN, under every data method."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import (
    GeminiPlugin,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    Plugin,
    TorchDDPPlugin,
)
from colossalai.core import global_context as gpc
from colossalai.testing import full_parameters
from tests.booster import test_accumulate as accumulating
from tests.booster.test_accumulate import Model, assert_trained, make_model
from tests.ranks import run_ranks
from tests.tiers import further
from tests.turns import run_each

pytestmark = pytest.mark.dist

DTYPE = torch.float64


PLUGINS: dict[str, Callable[[], Plugin]] = {
    **accumulating.PLUGINS,
    "gemini": partial(
        GeminiPlugin, precision="fp32", min_chunk_size_mb=2e-5, search_range_mb=0, hidden_dim=1
    ),
    "zero1 fp16": partial(LowLevelZeroPlugin, stage=1, precision="fp16", initial_scale=2.0**8),
    "pipeline": partial(HybridParallelPlugin, pp_size=2, num_microbatches=2, max_norm=0.5),
}


def optimizers_of(model: Model) -> list[torch.optim.Optimizer]:
    """One for the blocks and one for the head."""
    return [
        torch.optim.SGD(model.blocks.parameters(), lr=0.1, momentum=0.9),
        torch.optim.AdamW(model.head.parameters(), lr=0.01),
    ]


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return tuple(torch.randn(8, n, generator=generator, dtype=DTYPE) for n in (3, 2))  # type: ignore[return-value]


def twin(max_norm: float) -> nn.Module:
    model = make_model()
    optimizers = optimizers_of(model)
    for step in range(3):
        x, y = batch_of(step)
        nn.functional.mse_loss(model(x), y).backward()
        for optimizer in optimizers:
            if max_norm:
                params = [param for group in optimizer.param_groups for param in group["params"]]
                nn.utils.clip_grad_norm_(params, max_norm)
            optimizer.step()
            optimizer.zero_grad()
    return model


def values_of(model: Any, method: str) -> dict[str, torch.Tensor]:
    with model.gathered() if method == "gemini" else nullcontext():
        return {name: value.clone() for name, value in full_parameters(model).items()}


def train(method: str, kind: type, num_microbatches: int) -> dict[str, torch.Tensor]:
    colossalai.launch_from_torch({}, verbose=False)
    booster = Booster(plugin=PLUGINS[method](), gradient_accumulation=num_microbatches)
    model = make_model()
    given = kind(optimizers_of(model))
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 100) for each in given]
    boosted, optimizers, _, _, returned = booster.boost(model, given, lr_scheduler=schedulers)
    assert type(optimizers) is kind
    assert returned is schedulers
    assert [each.unwrap() for each in optimizers] == [*given]
    assert optimizers[0].scaler is optimizers[1].scaler
    replica, replicas = gpc.mesh.axis_rank("dp"), gpc.data_parallel_size
    for step in range(3):
        x, y = (each.chunk(replicas)[replica] for each in batch_of(step))
        if "fp16" in method:
            x = x.half()
        for part in zip(x.chunk(num_microbatches), y.chunk(num_microbatches), strict=True):
            with booster.accumulate(boosted):
                if boosted.pipeline is not None:
                    booster.execute_pipeline(
                        iter([part]), boosted, nn.functional.mse_loss, optimizers[step % 2]
                    )
                else:
                    loss = nn.functional.mse_loss(boosted(part[0]), part[1])
                    booster.backward(loss, optimizers[step % 2])
                for optimizer in optimizers:
                    optimizer.step()
                for optimizer in optimizers:
                    optimizer.zero_grad()
    with pytest.raises(ValueError, match="a training state holds one optimizer"):
        booster.save("nowhere", boosted, optimizers, step=1)
    return values_of(boosted, method)


METHODS = ("ddp", "fsdp", "zero1", "zero2", "gemini", "pipeline")
CASES = [
    *((method, (tuple, list)[number % 2], 1 + number % 2) for number, method in enumerate(METHODS)),
    ("zero1 fp16", list, 1),
]
FURTHER = [(method, kind, num) for method in METHODS for kind, num in ((tuple, 1), (list, 2))]


@pytest.mark.parametrize("cases", [CASES, further(FURTHER)], ids=["each method", "each window"])
def test_parts_of_a_model_with_an_optimizer_each(cases: list[tuple[str, type, int]]) -> None:
    """Under each method; in fp16 both have one loss scale."""
    for (method, *_), by_rank in zip(cases, run_each(2, train, cases), strict=True):
        # some twenty operations, each rounded by 2^-11
        tolerance = 0.01 if method == "zero1 fp16" else 1e-10
        assert_trained(by_rank, twin(0.5 if method == "pipeline" else 0.0), tolerance)


class GAN(nn.Module):
    """Both players in one module; each loss runs through the parts that it names."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.generator = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(DTYPE)
        self.critic = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)).to(DTYPE)

    def forward(self, noise: torch.Tensor, real: torch.Tensor | None = None) -> torch.Tensor:
        if real is None:
            return -self.critic(self.generator(noise)).mean()
        return self.critic(self.generator(noise).detach()).mean() - self.critic(real).mean()


def play(model: nn.Module, players: Any, backward: Any, share: Any) -> None:
    generator, critic = players
    for step in range(3):
        noise, real = map(share, batch_of(step))
        critic.zero_grad()
        backward(model(noise, real), critic)
        critic.step()
        generator.zero_grad()
        backward(model(noise), generator)
        generator.step()


def players_of(model: GAN) -> tuple[torch.optim.Optimizer, ...]:
    return tuple(torch.optim.Adam(each.parameters(), lr=0.01) for each in (model.generator, model.critic))


def gan(method: str) -> dict[str, torch.Tensor]:
    colossalai.launch_from_torch({}, verbose=False)
    plugin = TorchDDPPlugin(find_unused_parameters=True) if method == "ddp" else PLUGINS[method]()
    booster = Booster(plugin=plugin)
    raw = GAN()
    model, players, *_ = booster.boost(raw, players_of(raw))
    play(model, players, booster.backward, lambda x: x.chunk(2)[gpc.get_global_rank()])
    return values_of(model, method)


@pytest.mark.parametrize("methods", [("ddp", "gemini"), further(("zero1", "fsdp"))], ids="-".join)
def test_a_gan_in_one_module(methods: tuple[str, ...]) -> None:
    expected = GAN()
    play(expected, players_of(expected), lambda loss, _: loss.backward(), lambda x: x)
    for by_rank in run_each(2, gan, [(method,) for method in methods]):
        assert_trained(by_rank, expected)


def mistakes() -> None:
    colossalai.launch_from_torch({}, verbose=False)
    booster = Booster()
    model = make_model()
    blocks, head = optimizers_of(model)
    whole = torch.optim.SGD(model.parameters(), lr=0.1)
    for wrong, message in (
        ([], "optimizer is empty"),
        ([blocks, None], "the optimizer is a NoneType"),
        ([blocks, model], "the optimizer is a Model"),
        ([head, whole], r"a parameter of shape \(2, 3\) is in two optimizers"),
        ({"a": head}, "the optimizer is a dict"),
    ):
        with pytest.raises(ValueError, match=message):
            booster.boost(model, wrong)


def test_what_does_not_go_is_refused() -> None:
    run_ranks(mistakes, 1)
