"""A pipeline with what it is combined with: recomputation, cut sequences, checkpoints for other plans."""

import copy
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import HybridParallelPlugin
from colossalai.builder import build_pipeline_model
from colossalai.core import global_context as gpc
from colossalai.testing import ParityCase, Subject, check_parity
from colossalai.utils import load_checkpoint, save_checkpoint
from tests.model_zoo.test_sequence_mode import BUILD, MAX_NORM, make_batch
from tests.model_zoo.tiny import criterion_of
from tests.parity.subjects.doors import Block, Net, make_case
from tests.parity.subjects.pipeline import NUM_MICROBATCHES, slice_of_batch, subject_of, through_engine
from tests.ranks import run_ranks
from tests.tiers import further

pytestmark = pytest.mark.dist


def pipeline_config(size: int, schedule: str = "1f1b", **config: Any) -> dict[str, Any]:
    """Return a config in which the whole model is cut into `size` parts."""
    pipeline = {"size": size, "schedule": schedule, "partition": "uniform"}
    return {"parallel": {"pipeline": pipeline}, "NUM_MICRO_BATCHES": NUM_MICROBATCHES, **config}


class FourBlocks(Net):
    """A block for each of four stages."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))


def case_of(num_steps: int = 3) -> ParityCase:
    case = make_case(max_norm=0.1, num_steps=num_steps)
    return ParityCase(**{**vars(case), "build_model": FourBlocks})


def recompute(size: int, schedule: str, select: bool | list[str]) -> int:
    config = pipeline_config(size, schedule, recompute=select, clip_grad_norm=0.1)
    colossalai.launch_from_torch(config, verbose=False)
    calls = []

    def apply(model: nn.Module) -> Subject:
        for block in model.blocks:
            block.fc.register_forward_hook(lambda *_: calls.append(1))
        return through_engine(case, model)

    case = case_of(num_steps=2)
    check_parity(case, apply, **slice_of_batch())
    gpc.destroy()
    return len(calls)


@pytest.mark.parametrize("select", [True, ["blocks.0", "blocks.3"]])
@pytest.mark.parametrize(("size", "schedule"), [(4, "1f1b"), further(2, "zb-h1"), (2, "zb-v")])
def test_recomputation(size: int, schedule: str, select: bool | list[str]) -> None:
    counts = run_ranks(recompute, size, size, schedule, select)
    num_forwards = 2 * NUM_MICROBATCHES * (4 + (4 if select is True else 2))  # in two steps
    assert sum(counts) == num_forwards


class FiveLayers(nn.Sequential):
    """Of two stages the first holds one block and the second two."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 7), Block(), Block(), Block(), nn.Linear(7, 5))


def recompute_in_parts() -> int:
    config = {"parallel": {"pipeline": 2}, "NUM_MICRO_BATCHES": 2, "recompute": True, "clip_grad_norm": 0.1}
    colossalai.launch_from_torch(config, verbose=False)
    calls = []

    def apply(model: nn.Module) -> Subject:
        part = build_pipeline_model(model)
        for layer in part:
            layer.register_forward_pre_hook(lambda *_: calls.append(1))
            for inner in layer.children():
                inner.register_forward_pre_hook(lambda *_: calls.append(1))
        return through_engine(case, part)

    case = ParityCase(**{**vars(case_of(num_steps=1)), "build_model": FiveLayers})
    check_parity(case, apply, **slice_of_batch())
    gpc.destroy()
    return len(calls)


def test_recomputation_where_a_stage_holds_one_block() -> None:
    linear, once, again = 1, 1 + 2, 2  # a block's own hook runs outside of what is recomputed
    assert run_ranks(recompute_in_parts, 2) == [
        2 * (linear + once + again),
        2 * (linear + 2 * (once + again)),
    ]


def unknown() -> None:
    colossalai.launch_from_torch(pipeline_config(2, recompute=["blocks.9"]), verbose=False)
    with pytest.raises(ValueError, match=r"recompute names 'blocks.9', .* sub-module of any stage"):
        colossalai.initialize(FourBlocks(), verbose=False)
    gpc.destroy()


def test_a_module_of_no_stage_is_not_recomputed() -> None:
    run_ranks(unknown, 2)


def sequence_case(criterion: nn.Module) -> tuple[ParityCase, nn.Module]:
    """Return the case, and the plain model; built before there is a mode."""
    torch.manual_seed(3)
    plain = BUILD("gpt")
    plain_criterion = criterion_of("gpt")
    case = ParityCase(
        build_model=partial(copy.deepcopy, plain),
        build_optimizer=partial(torch.optim.AdamW, lr=0.01),
        compute_loss=lambda model, batch: plain_criterion(model(*batch[:2]), batch[2]),
        batches=[tuple(part.repeat(2, 1) for part in make_batch("gpt", seed)) for seed in range(3)],
        max_norm=MAX_NORM,
        seed=3,
    )
    return case, plain


def cut_sequences(door: str) -> None:
    torch.set_default_dtype(torch.float64)
    case, _ = sequence_case(criterion_of("gpt"))
    parallel = pipeline_config(2)["parallel"] | {"tensor": {"size": 2, "mode": "sequence"}}
    config = {"parallel": parallel, "NUM_MICRO_BATCHES": 2, "clip_grad_norm": MAX_NORM}
    colossalai.launch_from_torch(config if door == "engine" else {}, verbose=False)

    def apply(_: nn.Module) -> Subject:
        if door == "booster":
            booster = Booster(
                plugin=HybridParallelPlugin(
                    tp_size=2, pp_size=2, sequence_parallel=True, num_microbatches=2, max_norm=MAX_NORM
                )
            )
        torch.manual_seed(case.seed)
        model, criterion = BUILD("gpt"), criterion_of("gpt")
        optimizer = case.build_optimizer(model.parameters())
        if door == "booster":
            model, optimizer, *_ = booster.boost(model, optimizer)

            def step(batch: tuple[Tensor, ...]) -> Tensor:
                optimizer.zero_grad()
                pair = (batch[:2], batch[2])
                found = booster.execute_pipeline(iter([pair]), model, criterion, optimizer)
                optimizer.step()
                return found["loss"]

            return subject_of(model, optimizer, step)
        engine, *_ = colossalai.initialize(model, optimizer, criterion, verbose=False)

        def engine_step(batch: tuple[Tensor, ...]) -> Tensor:
            engine.zero_grad()
            loss = engine.execute_schedule(iter([(batch[:2], batch[2])]))[2]
            engine.step()
            return loss

        return subject_of(engine.model, engine.optimizer, engine_step)

    inner = 4
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    check_parity(case, apply, slice_index=rank // inner, num_slices=size // inner)
    gpc.destroy()


@pytest.mark.parametrize(("door", "num_ranks"), [("booster", 4), further("engine", 8)])
def test_cut_sequences(door: str, num_ranks: int) -> None:
    run_ranks(cut_sequences, num_ranks, door)


def resume(size: int, schedule: str, door: str, source: str | None, target: str) -> list[float]:
    """Train two steps, from a checkpoint or from the beginning, and save; return the losses."""
    first = 0 if source is None else 2
    batches = case_of(num_steps=4).batches[first : first + 2]
    config = pipeline_config(size, schedule) if size > 1 else {}
    colossalai.launch_from_torch(config if door == "engine" else {}, verbose=False)
    torch.manual_seed(7 if source is None else 8)  # what is loaded does not depend on it
    model = FourBlocks().double()
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
    model = FourBlocks().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    losses = []
    for x, y in case_of(num_steps=4).batches:
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
