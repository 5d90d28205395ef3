"""A run that was stopped goes on bit for bit, by both doors: dropout, data order, schedule, loss scale."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin
from colossalai.core import global_context as gpc
from colossalai.model_zoo.gpt import GPT, GPTConfig, GPTLMLoss
from colossalai.utils import get_dataloader
from tests.ranks import run_ranks

pytestmark = pytest.mark.dist

SAVED_AT = 3  # in the middle of an epoch of 4 batches
STEPS = 6

SHAPE = {"hidden_size": 16, "num_layers": 2, "num_attention_heads": 2, "vocab_size": 32}

PLUGINS = {
    "dp": TorchDDPPlugin,
    "tp2": lambda: HybridParallelPlugin(tp_size=2),
    "pp2": lambda: HybridParallelPlugin(pp_size=2, num_microbatches=2),
    # The scale grows on the way: it has to be saved, too.
    "zero1": lambda: LowLevelZeroPlugin(precision="fp16", initial_scale=16, growth_interval=2),
}
CONFIGS: dict[str, dict[str, Any]] = {
    "dp": {},
    "tp2": {"parallel": {"tensor": {"size": 2, "mode": "1d"}}},
    "pp2": {"parallel": {"pipeline": {"size": 2, "partition": "uniform"}}, "NUM_MICRO_BATCHES": 2},
    "zero1": {"zero": {"stage": 1}},
}


class Texts(Dataset[torch.Tensor]):
    """Eight tokens each; which ones differ with every reading, as augmented data do."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = torch.randint(4, (8,))
        return (torch.arange(8) * (index + 1) + noise) % 32


def build_model(dropout: float = 0.1) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    rates = dict.fromkeys(("dropout", "embedding_dropout", "attention_dropout"), dropout)
    model = GPT(GPTConfig(**SHAPE, max_position_embeddings=8, **rates))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def own_tensors(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
    states = [value for state in optimizer.state.values() for value in state.values()]
    return [*model.state_dict().values(), *(value for value in states if isinstance(value, torch.Tensor))]


def with_booster(kind: str, folder: str, *, resumes: bool, save_async: bool) -> Any:
    colossalai.launch_from_torch({}, verbose=False)
    booster = Booster(plugin=PLUGINS[kind]())
    model, optimizer, scheduler = build_model()
    loader = booster.plugin.prepare_dataloader(Texts(4 * 4 * gpc.data_parallel_size), 4, shuffle=True)
    criterion = GPTLMLoss()
    model, optimizer, criterion, loader, scheduler = booster.boost(
        model, optimizer, criterion, loader, scheduler
    )
    step, losses = 0, []
    if resumes:
        resumed = booster.load(folder, model, optimizer, scheduler, loader)
        assert (resumed.step, resumed.epoch, resumed.extra) == (SAVED_AT, 0, {"best": 0.5})
        step = resumed.step
    while step < STEPS:
        for batch in loader:
            optimizer.zero_grad()
            if booster.plan.pipeline is not None:
                result = booster.execute_pipeline(iter([batch]), model, criterion, optimizer)
                losses.append(result["loss"].item())
            else:
                loss = criterion(model(batch), batch)
                booster.backward(loss, optimizer)
                losses.append(loss.item())
            optimizer.step()
            scheduler.step()
            step += 1
            if not resumes:
                booster.save(
                    folder, model, optimizer, scheduler, loader, step=step, extra={"best": 0.5},
                    save_async=save_async, every=SAVED_AT if step < STEPS else 100,
                )  # fmt: skip
            if step == STEPS:
                break
    tensors = own_tensors(model, optimizer)
    gpc.destroy()
    return losses, tensors


def with_engine(kind: str, folder: str, *, resumes: bool, save_async: bool) -> Any:
    colossalai.launch_from_torch(CONFIGS[kind], verbose=False)
    model, optimizer, scheduler = build_model()
    loader = get_dataloader(Texts(4 * 4 * gpc.data_parallel_size), batch_size=4, shuffle=True)
    engine, loader, _, scheduler = colossalai.initialize(
        model, optimizer, GPTLMLoss(), loader, lr_scheduler=scheduler, verbose=False
    )
    step, losses = 0, []
    if resumes:
        resumed = engine.load(folder)
        assert (resumed.step, resumed.epoch) == (SAVED_AT, 0)
        step = resumed.step
    while step < STEPS:
        for batch in loader:
            engine.zero_grad()
            *_, loss = engine.execute_schedule(iter([(batch, batch)]), return_output_label=False)
            losses.append(loss.item())
            engine.step()
            scheduler.step()
            step += 1
            if step == SAVED_AT and not resumes:
                engine.save(folder, step=step, save_async=save_async)
            if step == STEPS:
                break
    tensors = own_tensors(engine.model, engine.optimizer)
    gpc.destroy()
    return losses, tensors


def run(door: str, kind: str, folder: str, resumes: bool, save_async: bool) -> Any:
    function = {"booster": with_booster, "engine": with_engine}[door]
    return function(kind, folder, resumes=resumes, save_async=save_async)


CELLS = [(door, kind) for kind in CONFIGS for door in ("booster", "engine")]
FIRSTS = (("booster", "pp2"), ("engine", "zero1"))  # dp is in the next test


@pytest.mark.parametrize(
    ("door", "kind"),
    [pytest.param(*cell, marks=[pytest.mark.long] * (cell not in FIRSTS)) for cell in CELLS],
)
def test_a_run_goes_on_bit_for_bit(door: str, kind: str, tmp_path: Path) -> None:
    save_async = (door == "engine") != (kind == "zero1")  # each kind once so, once so
    goes_on(2, door, kind, tmp_path, save_async)


@pytest.mark.parametrize(
    ("door", "kind", "world_size"),
    [("engine", "dp", 3), pytest.param("booster", "zero1", 3, marks=pytest.mark.long)],
)
def test_so_it_does_where_the_order_of_a_sum_counts(
    door: str, kind: str, world_size: int, tmp_path: Path
) -> None:
    goes_on(world_size, door, kind, tmp_path, save_async=False)


def goes_on(world_size: int, door: str, kind: str, tmp_path: Path, save_async: bool) -> None:
    undisturbed = run_ranks(run, world_size, door, kind, str(tmp_path), False, save_async)
    assert os.listdir(tmp_path) == [f"step-{SAVED_AT:08d}"]
    resumed = run_ranks(run, world_size, door, kind, str(tmp_path), True, False)
    for (all_losses, expected), (losses, found) in zip(undisturbed, resumed, strict=True):
        assert losses == all_losses[SAVED_AT:]
        assert len(found) == len(expected) > 20
        assert all(map(torch.equal, found, expected))
