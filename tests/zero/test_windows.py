"""Steps in windows: what an optimizer keeps besides the states of parameters counts steps, not calls."""

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import GeminiPlugin
from colossalai.core import global_context as gpc
from colossalai.zero._windows import step_in_windows
from colossalai.zero.gemini._hooks import handle_of
from colossalai.zero.gemini.planning import Home
from tests.ranks import run_ranks


class Counting(torch.optim.Optimizer):
    """Gradient descent whose rate depends on counters in groups, attributes and states."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, {"lr": 0.1, "k": 0, "is_first": True})
        for group in self.param_groups:
            group["warm"] = torch.zeros(())
        self.num_steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.num_steps += 1
        self.last_step = getattr(self, "last_step", 10) + 1  # made by the first step
        self.state["all"] = self.state.get("all", 0) + 2
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if not params:
                continue
            group["k"] += 1
            group["warm"] += 1.0
            group["late"] = group.get("late", 100) + 1
            scale = group["lr"] / (group["k"] + float(group["warm"]) + self.num_steps + self.state["all"])
            for param in params:
                param -= (2 * scale if group["is_first"] else scale) * param.grad
            group["is_first"] = False


def numbers_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    in_groups = [
        {key: float(value) for key, value in group.items() if key in ("k", "warm", "late", "is_first")}
        for group in optimizer.param_groups
    ]
    return [optimizer.num_steps, optimizer.last_step, optimizer.state["all"], in_groups]


@pytest.mark.unit
def test_numbers_besides_states_see_one_step() -> None:
    params = [nn.Parameter(torch.full((2,), float(n))) for n in range(5)]
    optimizer, twin = (
        Counting([{"params": each[:3]}, {"params": each[3:]}]) for each in (params, copy.deepcopy(params))
    )
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    warm = optimizer.param_groups[0]["warm"]
    for step in range(3):
        for one in (optimizer, twin):
            for number, param in enumerate(p for group in one.param_groups for p in group["params"]):
                param.grad = torch.full((2,), float(step + number))
        windows = [[params[0]], [params[1], params[3]], [params[2]], [params[4]]]
        step_in_windows(optimizer, windows, after_call=lambda window: None)
        twin.step()
        assert numbers_of(optimizer) == numbers_of(twin)
    assert numbers_of(optimizer)[0] == 3
    for group, its_twin in zip(optimizer.param_groups, twin.param_groups, strict=True):
        assert len(group["params"]) == len(its_twin["params"])
        assert all(map(torch.equal, group["params"], its_twin["params"]))
    assert seen == ["before", "after"] * 3
    assert optimizer.param_groups[0]["warm"] is warm, "a scheduler can hold it"


def on_disk(folder: str) -> tuple[list[Any], list[Any], int, float]:
    """Train with chunks on disk and without Gemini; return numbers, chunks on disk, and an error."""
    colossalai.launch_from_torch({}, verbose=False)
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(32, 32) for _ in range(6)))
    twin = copy.deepcopy(net)
    one, other = Counting(net.parameters()), Counting(twin.parameters())
    plugin = GeminiPlugin(
        placement_policy="nvme",
        offload_dir=folder,
        memory_budget=40_000,
        precision="fp32",
        min_chunk_size_mb=0.001,
        search_range_mb=0,
        hidden_dim=1,
    )
    booster = Booster(plugin=plugin)
    model, optimizer, *_ = booster.boost(net, one)
    for _ in range(3):
        x = torch.ones(2, 32)
        booster.backward(model(x).square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
        twin(x).square().mean().backward()
        other.step()
        other.zero_grad()
    chunks = handle_of(next(net.parameters())).hooks.cache.chunks
    num_on_disk = sum(chunk.states_home is Home.DISK for chunk in chunks)
    with model.gathered():
        pairs = zip(net.parameters(), twin.parameters(), strict=True)
        error = max(float((mine - its).abs().max()) for mine, its in pairs)
    gpc.destroy()
    return numbers_of(one), numbers_of(other), num_on_disk, error


@pytest.mark.dist
def test_chunks_on_disk_count_as_one_process_does(tmp_path: Path) -> None:
    ((found, wanted, num_on_disk, error),) = run_ranks(on_disk, 1, str(tmp_path))
    assert num_on_disk > 1
    assert found == wanted
    assert error < 1e-6
