"""GPT-2 of transformers, cut by the documented recipe, trains as one process: alone and under every door."""

import functools
from collections.abc import Callable
from pathlib import Path
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
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from colossalai.communication import ledger
from colossalai.core import global_context as gpc
from colossalai.nn.parallel import GeminiDDP
from colossalai.runtime import Plan, assemble
from colossalai.tensor import ColoParameter, ProcessGroup, as_colo_parameter
from colossalai.zero import ColoInitContext, GeminiAdamOptimizer
from tests.launched import on_ranks
from tests.ranks import run_ranks
from tests.tensor.colo.gpt2 import batch, build, cut, loss_of, slice_like, trained_alone
from tests.tiers import after_the_first, further
from tests.turns import in_turn

pytestmark = pytest.mark.dist

SMALL: dict[str, Any] = {
    "min_chunk_size_mb": 0.004,
    "search_range_mb": 0,
    "hidden_dim": 32,
    "precision": "fp32",
}
LARGE = 1e6  # a bound that no norm here comes to
PLUGINS: dict[str, Callable[[], Any]] = {
    "ddp": TorchDDPPlugin,
    "zero1": functools.partial(LowLevelZeroPlugin, stage=1, precision="fp32"),
    "zero2": functools.partial(LowLevelZeroPlugin, stage=2, precision="fp32"),
    "hybrid": functools.partial(HybridParallelPlugin, tp_size=2, pp_size=1, zero_stage=1),
    "gemini": functools.partial(GeminiPlugin, **SMALL),
}


def built(group: ProcessGroup) -> nn.Module:
    """Return the model with ColoParameters, cut."""
    with ColoInitContext(device=torch.device("cpu"), default_pg=group):
        model = build()
    assert all(type(param) is ColoParameter for param in model.parameters())
    cut(model, group)
    return model


def compare(model: nn.Module, losses: list[float], num_parts: int) -> None:
    """Compare losses and parameters with those of one process; losses are those of a part of the batch."""
    wanted, alone, _ = trained_alone()
    if num_parts == 1:
        assert losses == pytest.approx(wanted, abs=1e-10)
    for (name, param), other in zip(model.named_parameters(), alone.parameters(), strict=True):
        found = param.detach()
        torch.testing.assert_close(
            torch.Tensor(found.data), slice_like(other.detach(), param), rtol=0, atol=1e-10, msg=name
        )


def steps(
    model: Any, optimizer: Any, backward: Callable[..., Any], group: ProcessGroup, num_steps: int = 3
) -> list[float]:
    """Train on the part of the batch of this rank; return the losses."""
    losses = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = loss_of(model, batch(group.dp_world_size(), group.dp_local_rank()))
        backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_plainly(tp_degree: int) -> int:
    """Train without a door; return how many collectives a step took."""
    colossalai.launch_from_torch({}, verbose=False)
    group = ProcessGroup(tp_degree=tp_degree)
    model = built(group)
    with ledger() as book:
        losses = steps(model, torch.optim.AdamW(model.parameters(), lr=1e-2), torch.Tensor.backward, group)
    grads = trained_alone()[2]
    for name, param in model.named_parameters():
        torch.testing.assert_close(param.grad, slice_like(grads[name], param), rtol=0, atol=1e-10)
    compare(model, losses, 1)
    return book.count()


@pytest.mark.parametrize("tp_degree", [1, further(2), 4])
def test_the_recipe_is_one_process(tp_degree: int) -> None:
    """Of two blocks each two gathers and a sum forward, two sums backward; embeddings, and the head."""
    for num_collectives in run_ranks(train_plainly, tp_degree, tp_degree):
        assert num_collectives == (0 if tp_degree == 1 else 3 * 16)


@functools.cache
def norm_alone() -> float:
    """Return the norm of the first gradients of one process."""
    model = build()
    loss_of(model, batch(1, 0)).backward()
    return float(nn.utils.clip_grad_norm_(model.parameters(), LARGE))


def train_boosted(name: str) -> None:
    """Train by a plugin, 2 x 2."""
    colossalai.launch_from_torch({}, verbose=False)
    booster = Booster(plugin=PLUGINS[name]())
    group = ProcessGroup(tp_degree=2)
    raw = built(group)
    model, optimizer, *_ = booster.boost(raw, torch.optim.AdamW(raw.parameters(), lr=1e-2))
    norms = []

    def backward(loss: torch.Tensor) -> None:
        booster.backward(loss, optimizer)
        norms.append(float(optimizer.clip_grad_by_norm(LARGE)))

    losses = steps(model, optimizer, backward, group)
    assert norms[0] == pytest.approx(norm_alone(), abs=1e-10)
    with model.gathered():
        compare(raw, losses, 2)
    second = built(group)  # the ranks are laid out for it by now
    another, *_ = booster.boost(second)
    assert loss_of(another, batch(1, 0)).item() == pytest.approx(trained_alone()[0][0], abs=1e-10)


def train_by_engine() -> None:
    """Train by the door of a config, which lays the ranks out."""
    config = {"parallel": {"tensor": {"size": 2, "mode": "1d"}}, "zero": {"stage": 1}}
    colossalai.launch_from_torch(config, verbose=False)
    group = ProcessGroup(tp_degree=2)
    raw = built(group)
    optimizer = torch.optim.AdamW(raw.parameters(), lr=1e-2)
    engine, *_ = colossalai.initialize(raw, optimizer)
    compare(raw, steps(engine, engine, engine.backward, group), 2)


def train_in_chunks() -> None:
    """Train by the documented door without a Booster, 2 x 2, and checkpoint activations."""
    colossalai.launch_from_torch({}, verbose=False)
    group = ProcessGroup(tp_degree=2)
    raw = built(group)
    raw.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    raw.train()
    model = GeminiDDP(raw, placement_policy="auto", **SMALL)
    optimizer = GeminiAdamOptimizer(model, lr=1e-2, weight_decay=1e-2)
    losses = steps(model, optimizer, optimizer.backward, group)
    with model.gathered():
        compare(raw, losses, 2)


@pytest.mark.parametrize("names", [("hybrid", "gemini"), further(("ddp", "zero1", "zero2"))])
def test_every_door_trains_it_as_one_process(names: tuple[str, ...]) -> None:
    """Plugins, a config, and chunks without a Booster, beside one training in one process."""
    plugins = [(train_boosted, name) for name in names]
    run_ranks(in_turn, 4, [*plugins, (train_by_engine,), (train_in_chunks,)])


def checkpoint(folder: str, tp_degree: int, saves: bool) -> None:
    """Save a model that was trained, or load it and compare it."""
    colossalai.launch_from_torch({}, verbose=False)
    booster = Booster(plugin=LowLevelZeroPlugin(stage=1, precision="fp32"))
    group = ProcessGroup(tp_degree=tp_degree)
    raw = built(group)
    model, optimizer, *_ = booster.boost(raw, torch.optim.AdamW(raw.parameters(), lr=1e-2))
    if not saves:
        booster.load_model(model, folder + "/model")
        booster.load_optimizer(optimizer, folder + "/optimizer")
    backward = functools.partial(booster.backward, optimizer=optimizer)
    steps(model, optimizer, backward, group, 2 if saves else 1)
    if saves:
        booster.save_model(model, folder + "/model", shard=True)
        booster.save_optimizer(optimizer, folder + "/optimizer", shard=True)
    else:
        compare(raw, [], 2)


@pytest.mark.parametrize(
    ("saved", "loaded"), after_the_first([((2, 2), (4, 4)), ((4, 2), (1, 1)), ((1, 1), (4, 2))])
)
def test_a_checkpoint_loads_at_another_size(
    tmp_path: Path, saved: tuple[int, int], loaded: tuple[int, int]
) -> None:
    """Two steps there and one here are three of one process."""
    run_ranks(checkpoint, saved[0], str(tmp_path), saved[1], True)
    run_ranks(checkpoint, loaded[0], str(tmp_path), loaded[1], False)


@on_ranks(4)
def test_what_does_not_know_such_parameters_refuses_them() -> None:
    in_stages = HybridParallelPlugin(tp_size=1, pp_size=2, num_microbatches=2)
    for plugin, said in ((TorchFSDPPlugin(), "ZeRO stage 3 by FSDP"), (in_stages, "pipeline|laid out")):
        with pytest.raises(ValueError, match=said):  # noqa: PT012 - by either call
            booster = Booster(plugin=plugin)
            raw = built(ProcessGroup(tp_degree=2))
            booster.boost(raw, torch.optim.AdamW(raw.parameters()))


@on_ranks(4)
def test_a_cut_over_other_ranks_than_the_job_is_refused() -> None:
    """The plan has no layout."""
    raw = built(ProcessGroup(tp_degree=4))
    with pytest.raises(
        ValueError, match=r"is cut over ProcessGroup\(tp_degree=4, dp_degree=1\), and "
    ) as refused:
        assemble(Plan(), raw, mesh=gpc.mesh, device=torch.device("cpu"))
    assert "parallel=dict(tensor=dict(size=4, mode='1d'))" in str(refused.value)


@on_ranks(2)
def test_what_is_whole_is_as_fast_as_ever() -> None:
    """Parameters that are not cut are ordinary ones behind a door."""
    model = nn.Linear(4, 4)
    for param in model.parameters():
        as_colo_parameter(param)
    booster = Booster(plugin=TorchDDPPlugin())
    boosted, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert {type(param) for param in boosted.unwrap().parameters()} == {nn.Parameter}
