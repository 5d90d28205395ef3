"""A pipeline with recomputation, and with checkpoints for other plans."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import HybridParallelPlugin
from colossalai.builder import build_pipeline_model
from colossalai.core import global_context as gpc
from colossalai.utils import load_checkpoint, save_checkpoint
from tests.parity.table import NUM_MICROBATCHES, stages
from tests.parity.tasks import NET, Block, Net, vectors
from tests.parity.training import Run, train
from tests.ranks import run_ranks
from tests.tiers import further

pytestmark = pytest.mark.dist

FOUR_BLOCKS = replace(NET, build=partial(Net, 4))
"""A block for each of four stages."""


def recompute(run: Run) -> int:
    """Make a run; return how often the inner layers of its blocks have been called."""
    calls: list[int] = []

    def count(model: nn.Module) -> nn.Module:
        for block in model.blocks:
            block.fc.register_forward_hook(lambda *_: calls.append(1))
        return model

    train(replace(run, task=replace(run.task, place=count)))
    return len(calls)


@pytest.mark.parametrize("select", [True, ["blocks.0", "blocks.3"]])
@pytest.mark.parametrize(("size", "schedule"), [(4, "1f1b"), further(2, "zb-h1"), (2, "zb-v")])
def test_recomputation(size: int, schedule: str, select: bool | list[str]) -> None:
    config = {**stages(size, schedule, partition="uniform"), "recompute": select}
    counts = run_ranks(recompute, size, Run(task=FOUR_BLOCKS, num_ranks=size, config=config, max_norm=0.1))
    assert sum(counts) == 3 * NUM_MICROBATCHES * (4 + (4 if select is True else 2))  # in three steps


class FiveLayers(nn.Sequential):
    """Of two stages the first holds one block and the second two."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 7), Block(), Block(), Block(), nn.Linear(7, 5))


def recompute_in_parts() -> int:
    calls: list[int] = []

    def part_of(model: nn.Module) -> nn.Module:
        part = build_pipeline_model(model)
        for layer in part:
            layer.register_forward_pre_hook(lambda *_: calls.append(1))
            for inner in layer.children():
                inner.register_forward_pre_hook(lambda *_: calls.append(1))
        return part

    config = {"parallel": {"pipeline": 2}, "NUM_MICRO_BATCHES": 2, "recompute": True}
    task = replace(FOUR_BLOCKS, build=FiveLayers, place=part_of, batches=partial(vectors, num_steps=1))
    train(Run(task=task, num_ranks=2, config=config, max_norm=0.1))
    return len(calls)


def test_recomputation_where_a_stage_holds_one_block() -> None:
    linear, once, again = 1, 1 + 2, 2  # a block's own hook runs outside of what is recomputed
    assert run_ranks(recompute_in_parts, 2) == [
        2 * (linear + once + again),
        2 * (linear + 2 * (once + again)),
    ]


def unknown() -> None:
    config = {**stages(2, partition="uniform"), "recompute": ["blocks.9"]}
    colossalai.launch_from_torch(config, verbose=False)
    with pytest.raises(ValueError, match=r"recompute names 'blocks.9', .* sub-module of any stage"):
        colossalai.initialize(Net(4), verbose=False)
    gpc.destroy()


def test_a_module_of_no_stage_is_not_recomputed() -> None:
    run_ranks(unknown, 2)


def resume(size: int, schedule: str, door: str, source: str | None, target: str) -> list[float]:
    """Train two steps, from a checkpoint or from the beginning, and save; return the losses."""
    first = 0 if source is None else 2
    batches = vectors(num_steps=4)[first : first + 2]
    config = stages(size, schedule, partition="uniform") if size > 1 else {}
    colossalai.launch_from_torch(config if door == "engine" else {}, verbose=False)
    torch.manual_seed(7 if source is None else 8)  # what is loaded does not depend on it
    model = Net(4).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train = engine_steps if door == "engine" else booster_steps
    losses = train(model, optimizer, batches, {"pp_size": size, "schedule": schedule}, source, target)
    gpc.destroy()
    return losses


def engine_steps(model, optimizer, batches, options, source, target) -> list[float]:
    engine, *_ = colossalai.initialize(model, optimizer, nn.functional.cross_entropy, verbose=False)
    if source is not None:
        assert load_checkpoint(source, engine.model, engine.optimizer) == 2
    losses = []
    for x, y in batches:
        engine.zero_grad()
        loss = engine.execute_schedule(iter([(x.double(), y)]))[2]
        engine.step()
        losses.append(loss.item())
    save_checkpoint(target, 2, engine.model, engine.optimizer)
    return losses


def booster_steps(model, optimizer, batches, options, source, target) -> list[float]:
    options = options | {"num_microbatches": NUM_MICROBATCHES} if options["pp_size"] > 1 else {}
    booster = Booster(plugin=HybridParallelPlugin(**options))
    criterion = nn.functional.cross_entropy
    model, optimizer, *_ = booster.boost(model, optimizer)
    if source is not None:
        booster.load_model(model, f"{source}/model")
        booster.load_optimizer(optimizer, f"{source}/optimizer")
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        if options:
            loss = booster.execute_pipeline(iter([(x.double(), y)]), model, criterion, optimizer)["loss"]
        else:
            loss = criterion(model(x.double()), y)
            booster.backward(loss, optimizer)
        optimizer.step()
        losses.append(loss.item())
    Path(target).mkdir(exist_ok=True)
    booster.save_model(model, f"{target}/model", shard=True)
    booster.save_optimizer(optimizer, f"{target}/optimizer", shard=True)
    return losses


def plain_losses() -> list[float]:
    torch.manual_seed(7)
    model = Net(4).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    losses = []
    for x, y in vectors(num_steps=4):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x.double()), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("door", ["engine", "booster"])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((4, "gpipe"), (2, "zb-v")),
        ((2, "zb-v"), (1, "none")),
        further((2, "1f1b"), (4, "1f1b")),
        further((1, "none"), (2, "1f1b")),
    ],
)
def test_a_run_goes_on_under_another_plan(
    tmp_path: Path, door: str, before: tuple[int, str], after: tuple[int, str]
) -> None:
    """One file at one door, folders of shards at the other; embedding and head are tied."""
    paths = [str(tmp_path / "first"), str(tmp_path / "second")]
    first = run_ranks(resume, before[0], *before, door, None, paths[0])[0]
    second = run_ranks(resume, after[0], *after, door, paths[0], paths[1])[0]
    assert first + second == pytest.approx(plain_losses(), abs=1e-10)
