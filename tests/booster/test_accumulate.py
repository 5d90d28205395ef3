"""`booster.accumulate`: windows of microbatches under every method equal large batches in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import (
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    Plugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from colossalai.core import global_context as gpc
from colossalai.monitor import records
from colossalai.testing import assert_close, full_parameters
from tests.ranks import run_ranks
from tests.turns import run_each

pytestmark = pytest.mark.dist

GENERATOR = torch.Generator().manual_seed(0)
# Two ranks, 2 samples in a microbatch of a rank, windows of 2: two windows and a short one in each epoch.
X = torch.randn(20, 3, generator=GENERATOR, dtype=torch.float64)
Y = torch.randn(20, 2, generator=GENERATOR, dtype=torch.float64)
MAX_NORM = 0.5


PLUGINS: dict[str, Callable[[], Plugin]] = {
    "ddp": TorchDDPPlugin,
    "fsdp": TorchFSDPPlugin,
    "zero1": partial(LowLevelZeroPlugin, stage=1, precision="fp32"),
    "zero2": partial(LowLevelZeroPlugin, stage=2, precision="fp32"),
    "pipeline": partial(HybridParallelPlugin, pp_size=2, num_microbatches=2),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).tanh()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return Model().double()


def large_batches() -> nn.Module:
    """The same training on whole windows."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    for begin, end in [(0, 8), (8, 16), (16, 20)] * 2:
        nn.functional.mse_loss(model(X[begin:end]), Y[begin:end]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return model


def assert_trained(
    found: Iterable[dict[str, torch.Tensor]], model: nn.Module, tolerance: float = 1e-10
) -> None:
    """Assert that parameters of ranks are those of a model."""
    for params in found:
        for name, value in params.items():
            value = value.double() if tolerance > 1e-10 else value  # of low precision
            assert_close(value, model.get_parameter(name), rtol=tolerance, atol=tolerance)


class Sent:
    """Keeps the names of the collectives in its block, as groups over shared memory recorded them."""

    def __enter__(self) -> Sent:
        self._before = self._calls()
        return self

    def __exit__(self, *_: object) -> None:
        self.names = [call.op for call in self._calls() if call not in self._before]

    def _calls(self) -> list[Any]:
        return [call for record in records.open for call in record._last]


class Run:
    """A boosted model with its loop."""

    def __init__(self, method: str, *, own_loader: bool = False, weighted: bool = False) -> None:
        if not gpc.is_launched:
            colossalai.launch_from_torch({}, verbose=False)
        plugin = PLUGINS[method]()
        self.booster = Booster(plugin=plugin, gradient_accumulation=2)
        dataset = TensorDataset(X, Y)
        rank = gpc.mesh.axis_rank("dp")
        loader: Any = plugin.prepare_dataloader(dataset, batch_size=4 // gpc.data_parallel_size)
        if own_loader:  # which knows nothing of epochs
            loader = DataLoader(dataset, 2, sampler=[*range(rank, 20, 2)])
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        self.model, self.optimizer, _, self.loader, self.scheduler = self.booster.boost(
            model, optimizer, None, loader, scheduler
        )
        self.weighted = weighted
        self.norms: list[float] = []

    def microbatch(self, batch: Any) -> None:
        with self.booster.accumulate(self.model):
            if self.model.pipeline is not None:
                criterion = sum_and_count if self.weighted else nn.functional.mse_loss
                self.booster.execute_pipeline(iter([batch]), self.model, criterion, self.optimizer)
            else:
                loss = nn.functional.mse_loss(self.model(batch[0]), batch[1])
                self.booster.backward(loss, self.optimizer, len(batch[0]) if self.weighted else None)
            self.norms.append(float(self.optimizer.clip_grad_by_norm(MAX_NORM)))
            self.optimizer.step()
            if self.optimizer.stepped:
                self.scheduler.step()
            self.optimizer.zero_grad()

    def epoch(self) -> None:
        for batch in self.loader:
            self.microbatch(batch)


def sum_and_count(output: torch.Tensor, label: torch.Tensor) -> tuple[torch.Tensor, int]:
    return nn.functional.mse_loss(output, label, reduction="sum"), label.numel()


def train(method: str, own_loader: bool, weighted: bool) -> tuple[dict[str, torch.Tensor], list[float]]:
    run = Run(method, own_loader=own_loader, weighted=weighted)
    run.epoch()
    run.epoch()
    return full_parameters(run.model), run.norms


def test_windows_equal_large_batches() -> None:
    """Losses with weights are divided once, by the weight of their window: the short one needs no factor."""
    cases = [(method, False, False) for method in PLUGINS]
    cases += [("ddp", True, False), *((method, False, True) for method in ("ddp", "zero1", "pipeline"))]
    for (_, _, weighted), by_rank in zip(cases, run_each(2, train, cases), strict=True):
        assert_trained([params for params, _ in by_rank], large_batches())
        for _, norms in by_rank:
            assert (
                weighted or [norm == float("inf") for norm in norms] == [True, False, True, False, False] * 2
            )


def collectives(method: str) -> list[list[str]]:
    """The kinds of collectives in a microbatch within a window, and in its last."""
    run = Run(method)
    batches = [*run.loader]
    found = []
    for batch in batches[:4]:
        with Sent() as sent:
            run.microbatch(batch)
        found.append(sorted({name for name in sent.names if "reduce" in name or "all_to_all" in name}))
    return found[2:]  # the first window is the one in which methods settle


def test_within_a_window_no_gradient_is_sent() -> None:
    for by_rank in run_each(2, collectives, [("ddp",), ("fsdp",), ("zero1",)]):
        for inner, last in by_rank:
            assert inner == []
            assert last != []


def rules(folder: Path) -> None:
    run = Run("ddp")
    batches = [*run.loader]
    with pytest.raises(ValueError, match="a backward without a step"), run.booster.accumulate(run.model):
        run.booster.backward(run.model(batches[0][0]).sum(), run.optimizer)
    run.optimizer.restart_window()
    start = copy.deepcopy(full_parameters(run.model))
    with pytest.raises(ValueError, match="with accumulation leave it out"):
        run.optimizer.step(lambda: 0.0)
    # Saving within a window is refused; loading forgets the window, gradients and all.
    run.booster.save(folder, run.model, run.optimizer, step=0)
    run.microbatch(batches[0])
    with pytest.raises(ValueError, match="within an accumulation window"):
        run.booster.save(folder, run.model, run.optimizer, step=1)
    assert run.booster.load(folder, run.model, run.optimizer) is not None
    assert all(param.grad is None for param in run.model.parameters())
    run.microbatch(batches[0])
    assert not run.optimizer.stepped
    for name, value in full_parameters(run.model).items():
        assert torch.equal(value, start[name])
    run.microbatch(batches[1])
    assert run.optimizer.stepped
    # Without accumulation the context is there and does nothing.
    booster = Booster()
    model, optimizer, *_ = booster.boost(nn.Linear(3, 2), None)
    with booster.accumulate(model):
        assert optimizer is None
    with pytest.raises(ValueError, match="has not been boosted"), booster.accumulate(nn.Linear(1, 1)):
        pass
    for wrong in (0, 1.5, True, "2"):
        with pytest.raises(ValueError, match="gradient_accumulation is"):
            Booster(gradient_accumulation=wrong)  # type: ignore[arg-type]


def test_rules_of_windows(tmp_path: Path) -> None:
    run_ranks(rules, 1, tmp_path)
