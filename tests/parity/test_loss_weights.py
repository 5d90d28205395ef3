"""Losses with weights: labels uneven over ranks, microbatches and windows train as one process does."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import colossalai
from colossalai.amp import AMP_TYPE
from colossalai.booster import Booster
from colossalai.booster.plugin import (
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from colossalai.core import global_context as gpc
from colossalai.model_zoo.gpt import GPTLMLoss
from colossalai.testing import full_parameters
from tests.model_zoo.tiny import VOCAB, build
from tests.parity.tasks import Block
from tests.parity.training import whole
from tests.ranks import run_ranks
from tests.tiers import further

pytestmark = pytest.mark.dist

Batch = tuple[Tensor, Tensor]
Criterion = Callable[[Tensor, Tensor], Any]

IGNORED, SEQ, MAX_NORM = -100, 16, 0.1
ADAM = partial(torch.optim.AdamW, lr=0.05, eps=1e-6)
# Samples of a batch, and how many of them have a label, by window, microbatch of the window, and replica.
# Some have none, one window has none at all; the last window is short, and its batch is ragged.
COUNTS = [
    [[(4, 4), (4, 1)], [(4, 2), (4, 4)]],
    [[(4, 0), (4, 3)], [(4, 0), (4, 1)]],
    [[(4, 0), (4, 0)], [(4, 0), (4, 0)]],
    [[(4, 3), (2, 1)]],
]


class Net(nn.Module):
    """A classifier with a block for each of two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(5, 7)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def mean(output: Tensor, label: Tensor) -> Tensor:
    """The mean of torch: NaN without labels, with a gradient of 0."""
    return nn.functional.cross_entropy(output, label, ignore_index=IGNORED)


def own_mean(output: Tensor, label: Tensor) -> Tensor:
    """The mean as people write it: without labels the gradient is NaN, too."""
    losses = nn.functional.cross_entropy(output, label.clamp(min=0), reduction="none")
    counted = label != IGNORED
    return (losses * counted).sum() / counted.sum()


def pair(output: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
    total = nn.functional.cross_entropy(output, label, ignore_index=IGNORED, reduction="sum")
    return total, (label != IGNORED).sum()


CRITERIA: dict[tuple[str, str], Callable[[], Criterion]] = {
    ("net", "pair"): lambda: pair,
    ("net", "mean"): lambda: mean,
    ("net", "own mean"): lambda: own_mean,
    ("gpt", "pair"): partial(GPTLMLoss, with_count=True),
    ("gpt", "mean"): GPTLMLoss,
}


def count(label: Tensor) -> Tensor:
    """Return the number of labels that count; the first token of a text is predicted by nobody."""
    return ((label if label.ndim == 1 else label[:, 1:]) != IGNORED).sum()


def start(kind: str) -> nn.Module:
    """Build the model, with the same values in every mode."""
    torch.manual_seed(3)
    if kind == "gpt":
        return build("gpt", max_position_embeddings=SEQ, vocab_parallel_limit=1).double()
    return Net().double()


def make_part(kind: str, num: int, num_labels: int, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    unlabelled = torch.randperm(num, generator=generator)[num_labels:]
    if kind == "gpt":
        x = torch.randint(VOCAB, (num, SEQ), generator=generator)
        y = x.masked_fill(torch.rand(num, SEQ, generator=generator) < 0.5, IGNORED)
    else:
        x = torch.randn(num, 5, generator=generator, dtype=torch.float64)
        y = torch.randint(5, (num,), generator=generator)
    y[unlabelled] = IGNORED
    return x, y


def windows(kind: str, num_replicas: int) -> list[list[list[Batch]]]:
    """Return the batches of each window, microbatch and replica."""
    seeds = itertools.count()
    return [
        [[make_part(kind, *cell, next(seeds)) for cell in microbatch[:num_replicas]] for microbatch in window]
        for window in COUNTS
    ]


def reference(
    model: nn.Module, criterion: Criterion, all_windows: list[list[list[Batch]]], max_norm: float
) -> list[tuple[float, dict[str, Tensor]]]:
    """Train in one process, by the mean over all labels of a window; return losses and parameters."""
    optimizer = ADAM(model.parameters())
    found = []
    for window in all_windows:
        parts = [part for microbatch in window for part in microbatch]
        x, y = (torch.cat(column) for column in zip(*parts, strict=True))
        optimizer.zero_grad()
        total, number = criterion(model(x), y)
        loss = total / max(int(number), 1)
        loss.backward()
        if max_norm:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        found.append((loss.item(), full_parameters(model)))
    return found


def check(model: nn.Module, optimizer: Any, expected: tuple[float, dict[str, Tensor]], where: str) -> None:
    """Compare loss and parameters of this rank with those of one process."""
    loss, params = expected
    assert abs(optimizer.mean_loss.item() - loss) < 1e-10, where
    if model.pipeline is None:
        found = {
            name: whole(param, full)
            for param, (name, full) in zip(
                dict(model.named_parameters()).values(), full_parameters(model).items(), strict=True
            )
        }
    else:
        found = {optimizer.param_names[param]: whole(param, param) for param in model.parameters()}
    for name, value in found.items():
        error = (value - params[name]).abs().max().item()
        assert error < 1e-10, f"{where}: {name} differs by {error:.3g}"


def through_engine(config: dict[str, Any], how: str) -> None:
    """Train by the config door, with criteria that return pairs, or with means that get a weight."""
    kind = "gpt" if "tensor" in config.get("parallel", {}) else "net"
    twin, twin_criterion = start(kind), CRITERIA[kind, "pair"]()  # built before there is a mode
    colossalai.launch_from_torch({"gradient_accumulation": 2, **config}, verbose=False)
    all_windows = windows(kind, gpc.data_parallel_size)
    expected = iter(reference(twin, twin_criterion, all_windows, config.get("clip_grad_norm", 0.0)))
    replica = gpc.mesh.axis_rank("dp")
    own = [microbatch[replica] for window in all_windows for microbatch in window]
    model, criterion = start(kind), CRITERIA[kind, how]()
    optimizer = ADAM(model.parameters())
    engine, loader, *_ = colossalai.initialize(model, optimizer, criterion, own, verbose=False)
    for number, (x, y) in enumerate(loader):
        engine.zero_grad()
        if how == "pair":
            _, _, loss = engine.execute_schedule(iter([(x, y)]), return_output_label=False)
            assert engine.loss_weight.item() == count(y)
            assert not loss.isnan()
        else:
            engine.backward(engine.criterion(engine(x), y), weight=count(y))
        if engine.step():
            check(engine.model, engine.optimizer, next(expected), f"{config}, {how}, microbatch {number}")
    assert next(expected, None) is None  # every window has had its step
    gpc.destroy()


def several(jobs: list[tuple[dict[str, Any], str]]) -> None:
    for job in jobs:
        through_engine(*job)


CLIPPED = {"clip_grad_norm": MAX_NORM}
HANDLER = {"gradient_handler": [{"type": "DataParallelGradientHandler"}]}


def pipeline(schedule: str = "1f1b", **parallel: Any) -> dict[str, Any]:
    stages = {"size": 2, "schedule": schedule, "partition": "uniform"}
    return {"parallel": {"pipeline": stages, **parallel}, "NUM_MICRO_BATCHES": 2, **CLIPPED}


def tensor(mode: str) -> dict[str, Any]:
    return {"parallel": {"tensor": {"size": 2, "mode": mode}}, **CLIPPED}


ON_TWO_RANKS: list[tuple[dict[str, Any], str]] = [
    (CLIPPED, "mean"),
    (CLIPPED | HANDLER, "pair"),
    ({"zero": {"stage": 2}}, "pair"),
    (CLIPPED | {"zero": {"stage": 3}}, "own mean"),
    (pipeline(), "pair"),
    (tensor("sequence"), "pair"),
]
FURTHER_ON_TWO: list[tuple[dict[str, Any], str]] = [
    ({}, "pair"),
    (CLIPPED | {"zero": {"stage": 1}}, "own mean"),
    (pipeline("zb-h1"), "pair"),
    (tensor("sequence"), "mean"),
]


@pytest.mark.parametrize("jobs", [ON_TWO_RANKS, further(FURTHER_ON_TWO)])
def test_two_ranks(jobs: list[tuple[dict[str, Any], str]]) -> None:
    run_ranks(several, 2, jobs)


ON_FOUR_RANKS: list[tuple[dict[str, Any], str]] = [
    (tensor("1d") | {"zero": {"stage": 2}}, "pair"),
]
FURTHER: list[tuple[dict[str, Any], str]] = [
    (pipeline(tensor={"size": 2, "mode": "sequence"}), "pair"),
    (pipeline() | {"zero": {"stage": 1}}, "pair"),
    (tensor("sequence") | {"zero": {"stage": 1}}, "mean"),
]


@pytest.mark.long
@pytest.mark.parametrize("jobs", [ON_FOUR_RANKS, FURTHER])
def test_all_together_on_four_ranks(jobs: list[tuple[dict[str, Any], str]]) -> None:
    run_ranks(several, 4, jobs)


PLUGINS = {
    "ddp": TorchDDPPlugin,
    "fsdp": TorchFSDPPlugin,
    "zero": partial(LowLevelZeroPlugin, stage=2, precision="fp32", max_norm=MAX_NORM),
}


def through_booster() -> None:
    """Train by the plugin door: nobody divides for accumulation."""
    for name, plugin in PLUGINS.items():
        colossalai.launch_from_torch({}, verbose=False)
        all_windows = windows("net", 2)
        expected = reference(start("net"), pair, all_windows, MAX_NORM)
        booster = Booster(plugin=plugin())
        model = start("net")
        model, optimizer, *_ = booster.boost(model, ADAM(model.parameters()))
        for window, result in zip(all_windows, expected, strict=True):
            optimizer.zero_grad()
            parts = [microbatch[gpc.get_global_rank()] for microbatch in window]
            for x, y in parts[:-1]:
                with booster.no_sync(model):
                    booster.backward(pair(model(x), y), optimizer)
            x, y = parts[-1]
            booster.backward(own_mean(model(x), y), optimizer, weight=int(count(y)))
            if name != "zero":
                optimizer.clip_grad_by_norm(MAX_NORM)
            optimizer.step()
            check(model, optimizer, result, name)
        gpc.destroy()


def accumulating() -> None:
    """The booster keeps the window, the short one included; the loop clips in every microbatch."""
    for plugin in (TorchDDPPlugin(), LowLevelZeroPlugin(stage=1, precision="fp32")):
        colossalai.launch_from_torch({}, verbose=False)
        all_windows = windows("net", 2)
        expected = iter(reference(start("net"), pair, all_windows, MAX_NORM))
        booster = Booster(plugin=plugin, gradient_accumulation=2)
        model = start("net")
        own = [microbatch[gpc.get_global_rank()] for window in all_windows for microbatch in window]
        model, optimizer, _, loader, _ = booster.boost(model, ADAM(model.parameters()), None, own)
        for x, y in loader:
            with booster.accumulate(model):
                booster.backward(own_mean(model(x), y), optimizer, weight=count(y))
                optimizer.clip_grad_by_norm(MAX_NORM)
                optimizer.step()
                if optimizer.stepped:
                    check(model, optimizer, next(expected), f"{plugin}")
                optimizer.zero_grad()
        assert next(expected, None) is None
        gpc.destroy()


def pipeline_through_booster() -> None:
    colossalai.launch_from_torch({}, verbose=False)
    all_windows = windows("net", 1)
    expected = reference(start("net"), pair, all_windows, MAX_NORM)
    booster = Booster(plugin=HybridParallelPlugin(pp_size=2, num_microbatches=4, max_norm=MAX_NORM))
    model = start("net")
    model, optimizer, *_ = booster.boost(model, ADAM(model.parameters()))
    for window, result in zip(all_windows, expected, strict=True):
        optimizer.zero_grad()
        for number, microbatch in enumerate(window):
            is_last = number == len(window) - 1
            model.set_sync(is_last)
            found = booster.execute_pipeline(iter(microbatch), model, pair, optimizer)
            assert not found["loss"].isnan()
        optimizer.step()
        check(model, optimizer, result, "pipeline")
    gpc.destroy()


def by_the_plugin_door() -> None:
    through_booster()
    accumulating()
    pipeline_through_booster()


def test_through_the_booster() -> None:
    run_ranks(by_the_plugin_door, 2)


def in_float16(mode: AMP_TYPE, scale: str) -> list[tuple[float, float]]:
    """Return (loss, loss scale) of ten steps, whose weights are of 4000 tokens."""
    config = {"fp16": {"mode": mode, scale: 2.0**14}, "gradient_accumulation": 2, **CLIPPED}
    colossalai.launch_from_torch(config, verbose=False)
    model = start("net").float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    engine, *_ = colossalai.initialize(model, optimizer, verbose=False)
    parts = [microbatch[gpc.get_global_rank()] for microbatch in windows("net", 2)[0]]
    found = []
    for _ in range(10):
        engine.zero_grad()
        for x, y in parts:
            total, number = pair(engine(x.float()), y)
            engine.backward((1000 * total, 1000 * number))
            engine.step()
        found.append((engine.optimizer.mean_loss.item(), engine.optimizer.scaler.scale))
    state = engine.optimizer.scaler.state_dict()
    assert state["weight_unit"] == 8192  # above 5500 labels on a rank, on the average
    gpc.destroy()
    return found


@pytest.mark.parametrize(
    ("mode", "scale"), [further(AMP_TYPE.TORCH, "init_scale"), (AMP_TYPE.NAIVE, "initial_scale")]
)
def test_float16_keeps_its_scale(mode: AMP_TYPE, scale: str) -> None:
    model = start("net")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x, y = (torch.cat(column) for column in zip(*itertools.chain(*windows("net", 2)[0]), strict=True))
    exact = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = mean(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        exact.append(loss.item())
    losses, scales = zip(*run_ranks(in_float16, 2, mode, scale)[0], strict=True)
    assert set(scales) == {2.0**14}  # no step was skipped: sums are as large as means
    assert losses == pytest.approx(exact, abs=4e-3)  # 11 bits over ten steps


def mistakes() -> None:
    colossalai.launch_from_torch({"gradient_accumulation": 2}, verbose=False)
    model = start("net")
    engine, *_ = colossalai.initialize(model, ADAM(model.parameters()), pair, verbose=False)
    x, y = make_part("net", 4, 3, 0)
    for loss, weight, message in [
        (3.0, None, "the loss is 3.0; it must be the tensor"),
        (pair(engine(x), y), 3, "a loss .sum, count. has its weight"),
        (mean(engine(x), y), -1, "the weight of a loss is -1; it must be at least 0"),
        (mean(engine(x), y), float("nan"), "the weight of a loss is nan"),
        (mean(engine(x), y), torch.ones(2), "must be one number"),
        (engine(x), 3, r"has shape \(4, 5\); it must have one value"),
    ]:
        with pytest.raises(ValueError, match=message):
            engine.backward(loss, weight=weight)
    engine.backward(mean(engine(x), y), weight=3)
    engine.step()
    with pytest.raises(ValueError, match="losses with a weight and losses without one"):
        engine.backward(mean(engine(x), y))
    engine.optimizer.zero_grad()
    engine.backward(mean(engine(x), y))
    with pytest.raises(ValueError, match="losses with a weight and losses without one"):
        engine.backward(mean(engine(x), y), weight=3)
    engine.optimizer.zero_grad()
    engine.backward(mean(engine(x), y), weight=3)
    engine.optimizer.clip_grad_by_norm(1.0)
    with pytest.raises(ValueError, match="divided by the weight of their losses already"):
        engine.backward(mean(engine(x), y), weight=3)
    engine.model.zero_grad()  # who drops the gradients otherwise is heard
    engine.backward(mean(engine(x), y), weight=3)
    gpc.destroy()


def test_mistakes() -> None:
    run_ranks(mistakes, 1)
