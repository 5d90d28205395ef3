"""Steps in windows: what an optimizer keeps besides the states of parameters counts steps, not calls."""

import copy
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from colossalai.zero._windows import step_in_windows
from colossalai.zero.gemini.planning import Home
from tests.parity.training import Task, train
from tests.ranks import run_ranks
from tests.zero.gemini.test_parity import in_chunks


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


def on_disk(folder: str) -> tuple[list[Any], list[Any], int]:
    """Train with chunks on disk and without Gemini; return numbers of both, and how many chunks are there."""
    made: list[Counting] = []
    models: list[Any] = []

    def counting(params: Iterable[Any]) -> Counting:
        made.append(Counting(params))
        return made[-1]

    task = Task(
        build=lambda: nn.Sequential(*(nn.Linear(32, 32) for _ in range(6))),
        batches=lambda: [(torch.ones(2, 32),)] * 3,
        criterion=None,
        loss=lambda model, batch: model(*batch).square().mean(),
        optimizer=counting,
    )
    disk = {"placement_policy": "nvme", "offload_dir": folder, "memory_budget": 80_000}
    run = in_chunks(task, 1, min_chunk_size_mb=0.001, **disk)
    train(replace(run, check=models.append))
    num_on_disk = sum(chunk.states_home is Home.DISK for chunk in models[0].data.cache.chunks)
    its_twin, one = made
    return numbers_of(one), numbers_of(its_twin), num_on_disk


@pytest.mark.dist
def test_chunks_on_disk_count_as_one_process_does(tmp_path: Path) -> None:
    ((found, wanted, num_on_disk),) = run_ranks(on_disk, 1, str(tmp_path))
    assert num_on_disk > 1
    assert found == wanted
