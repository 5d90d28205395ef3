"""`Booster.save` and `Booster.load`: what goes along, what is refused, and going on under another plan."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import LowLevelZeroPlugin, TorchDDPPlugin
from colossalai.context import random_state
from colossalai.core import global_context as gpc
from colossalai.testing import assert_close, full_parameters
from colossalai.utils import get_dataloader
from tests.ranks import run_ranks

pytestmark = pytest.mark.dist

DATA = TensorDataset(torch.randn(48, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def boosted(**plugin: Any) -> Any:
    booster = Booster(plugin=LowLevelZeroPlugin(**plugin) if plugin else TorchDDPPlugin())
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    model, optimizer, *_, scheduler = booster.boost(model, optimizer, lr_scheduler=scheduler)
    return booster, model, optimizer, scheduler


def refusals(folder: str) -> None:
    colossalai.launch_from_torch({"note": "mine", "lr": 0.1}, verbose=False)
    booster, model, optimizer, scheduler = boosted()
    path = Path(folder)
    assert booster.load(path / "nothing", model, optimizer) is None
    assert booster.save(path, model, optimizer, step=3, every=2) is None
    assert not list(path.iterdir())
    with pytest.raises(ValueError, match="every is 0"):
        booster.save(path, model, optimizer, step=3, every=0)
    with pytest.raises(ValueError, match=r"DataLoader, has no state_dict.*prepare_dataloader"):
        booster.save(path, model, optimizer, None, DataLoader(DATA), step=1)
    before = random_state()
    saved = booster.save(path, model, optimizer, scheduler, step=4, epoch=1, extra={"best": 0.5}, every=2)
    assert repr(random_state()) == repr(before)  # saving draws nothing
    assert saved == path / "step-00000004"
    config = json.loads((saved / "manifest.json").read_text())["manifest"]["config"]
    assert config["mesh"] == {"edp": 1, "ep": 1, "pp": 1, "sp": 1, "tp": 1}
    assert config["config"] == {"note": "mine", "lr": 0.1}
    assert config["plan"]["type"] == "Plan"
    assert config["plan"]["data"]["type"] == "Replicated"
    booster.save(path / "model only", model, step=1)
    with pytest.raises(ValueError, match="holds no lr_scheduler, scaler, optimizer: leave that out"):
        booster.load(path / "model only", model, optimizer, scheduler)
    resumed = booster.load(saved, model, optimizer, scheduler)
    assert (resumed.step, resumed.epoch, resumed.extra) == (4, 1, {"best": 0.5})
    (saved / "parts.pt").unlink()
    with pytest.raises(ValueError, match="step-00000004, of which none is a complete training state"):
        booster.load(path, model, optimizer)
    gpc.destroy()


def test_refusals(tmp_path: Path) -> None:
    run_ranks(refusals, 1, str(tmp_path))


def saves_in_no_sync(folder: Path) -> None:
    colossalai.launch_from_torch({}, verbose=False)
    for plugin in ({}, {"stage": 1}):
        booster, model, optimizer, _ = boosted(**plugin)
        x = torch.ones(2, 3, dtype=torch.float64)

        def refused(booster: Any = booster, model: Any = model, optimizer: Any = optimizer) -> None:
            assert booster.save(folder, model, optimizer, step=1, every=2) is None
            with pytest.raises(ValueError, match=r"within an accumulation window.*optimizer\.step\(\)"):
                booster.save(folder, model, optimizer, step=1)

        with booster.no_sync(model):
            refused()
            with pytest.raises(ValueError, match="within an accumulation window"):
                booster.save(folder, model, step=1)
            booster.backward(model(x).mean(), optimizer)
            refused()
            booster.save_model(model, folder / "weights.pt")
        booster.save(folder, model, optimizer, step=0)  # a loop can drop what is left
        booster.backward(model(x).mean(), optimizer)
        optimizer.step()
        booster.save(folder, model, optimizer, step=1)
        optimizer.zero_grad()
        booster.backward(model(x).mean(), optimizer)
        optimizer.zero_grad()
        booster.save(folder, model, optimizer, step=2)
        booster.backward(model(x).mean(), optimizer)
        assert booster.load(folder, model, optimizer).step == 2
        booster.save(folder, model, optimizer, step=3)
    gpc.destroy()


def test_a_save_in_no_sync_is_refused(tmp_path: Path) -> None:
    run_ranks(saves_in_no_sync, 1, tmp_path)


def with_precision(precision: str) -> Any:
    booster = Booster(mixed_precision=precision)
    model = make_model().float()
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters()))
    return booster, model, optimizer


def to_a_loss_scale(folder: str) -> tuple[float, ...]:
    colossalai.launch_from_torch({}, verbose=False)
    booster, model, optimizer = with_precision("fp32")
    booster.save(folder, model, optimizer, step=1)
    booster, model, optimizer = with_precision("fp16")
    assert booster.load(folder, model, optimizer).step == 1
    fresh = optimizer.scaler.scale
    optimizer.scaler.scale = 32.0
    booster.save(folder, model, optimizer, step=2)
    booster, model, optimizer = with_precision("fp16")
    booster.load(folder, model, optimizer)
    loaded = optimizer.scaler.scale
    booster, model, optimizer = with_precision("fp32")
    booster.load(folder, model, optimizer)
    gpc.destroy()
    return fresh, loaded


def test_into_a_precision_with_a_loss_scale_and_back(tmp_path: Path) -> None:
    assert run_ranks(to_a_loss_scale, 1, str(tmp_path)) == [(2.0**16, 32.0)]


def booster_part(folder: str, steps: int) -> Any:
    colossalai.launch_from_torch({}, verbose=False)
    booster, model, optimizer, scheduler = boosted(precision="fp32")
    loader = booster.plugin.prepare_dataloader(DATA, 4, shuffle=True)
    for step, (x,) in enumerate(loader, start=1):
        optimizer.zero_grad()
        booster.backward(model(x).square().mean(), optimizer)
        optimizer.step()
        scheduler.step()
        booster.save(folder, model, optimizer, scheduler, loader, step=step, every=3)
        if step == steps:
            break
    params = full_parameters(model)
    gpc.destroy()
    return params


def engine_part(folder: str, steps: int) -> Any:
    colossalai.launch_from_torch({}, verbose=False)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    loader = get_dataloader(DATA, batch_size=8, shuffle=True)
    engine, loader, _, scheduler = colossalai.initialize(
        model, optimizer, None, loader, lr_scheduler=scheduler, verbose=False
    )
    step = engine.load(folder).step
    for (x,) in loader:
        engine.zero_grad()
        engine.backward(engine(x).square().mean())
        engine.step()
        scheduler.step()
        step += 1
        if step == steps:
            break
    params = full_parameters(engine.model)
    gpc.destroy()
    return params


def test_an_engine_goes_on_with_what_a_booster_saved_under_another_plan(tmp_path: Path) -> None:
    expected = run_ranks(booster_part, 2, str(tmp_path), 5)[0]
    (found,) = run_ranks(engine_part, 1, str(tmp_path), 5)
    for name, value in found.items():
        assert_close(value, expected[name], rtol=1e-10, atol=1e-10)
