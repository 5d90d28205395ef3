"""`Engine.save` and `Engine.load`: the engine's own parts, accumulation windows, the hook of the Trainer."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import colossalai
from colossalai.checkpoint_io import wait_for_saves
from colossalai.core import global_context as gpc
from colossalai.engine import Engine
from colossalai.trainer import Trainer
from colossalai.trainer.hooks import LRSchedulerHook, SaveCheckpointHook
from colossalai.utils import get_dataloader
from tests.checkpoint_io.storage.test_background import make_slow
from tests.ranks import run_ranks

pytestmark = pytest.mark.dist

DATA = TensorDataset(torch.randn(12, 3, generator=torch.Generator().manual_seed(0)), torch.zeros(12, 2))


def build(*, loader: Any = None, **config: Any) -> tuple[Engine, Any, Any]:
    if not gpc.is_launched:
        colossalai.launch_from_torch(config, verbose=False)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    loader = get_dataloader(DATA, batch_size=4, shuffle=True) if loader is None else loader
    engine, loader, _, scheduler = colossalai.initialize(
        model, optimizer, nn.MSELoss(), loader, lr_scheduler=scheduler, verbose=False
    )
    return engine, loader, scheduler


def windows(folder: str) -> None:
    engine, *_ = build(gradient_accumulation=2)
    x = torch.ones(2, 3)

    def microbatch() -> bool:
        engine.zero_grad()
        engine.backward(engine(x).mean())
        return engine.step()

    microbatch()
    with pytest.raises(ValueError, match="within an accumulation window"):
        engine.save(folder, step=1)
    assert engine.save(folder, step=1, every=2) is None
    assert microbatch()
    engine.save(folder, step=1)
    microbatch()
    assert engine.load(folder).step == 1
    # The window that was under way is forgotten, gradients and all.
    assert all(param.grad is None for param in engine.model.parameters())
    assert not microbatch()
    assert microbatch()
    gpc.destroy()


def test_accumulation_windows(tmp_path: Path) -> None:
    run_ranks(windows, 1, str(tmp_path))


def loads_while_saving(folder: str) -> None:
    engine, *_ = build()
    make_slow(0.1)
    engine.save(folder, step=1, save_async=True)
    assert engine.load(folder).step == 1
    path = engine.save(folder, step=2, save_async=True)
    assert engine.load(path).step == 2
    gpc.destroy()


def test_a_load_waits_for_what_is_being_saved(tmp_path: Path) -> None:
    run_ranks(loads_while_saving, 2, str(tmp_path))


def without_position(folder: str) -> None:
    engine, *_ = build(loader=DataLoader(DATA, batch_size=4))
    engine.save(folder, step=1)
    assert engine.load(folder).epoch is None
    assert engine.load(folder + "/nothing") is None
    gpc.destroy()


def test_a_loader_without_a_position_is_left_out_and_that_is_said(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_ranks(without_position, 1, str(tmp_path))
    written = capfd.readouterr()
    assert (written.out + written.err).count("will not hold the position in the data: DataLoader") == 1


def by_the_hook(folder: str, interval: int, save_by_iter: bool, save_async: bool, max_steps: int) -> Any:
    """Train four epochs of three steps, then go on from the middle in new objects."""

    def fit(*, resumes: bool = False, saves: bool = False) -> Any:
        engine, loader, scheduler = build()
        trainer = Trainer(engine)
        if resumes:
            resumed = engine.load(folder, lr_scheduler=scheduler)
            trainer.cur_epoch, trainer.cur_step = resumed.epoch, resumed.step
        hooks = [LRSchedulerHook(scheduler, by_epoch=True)]
        if saves:
            hooks.append(
                SaveCheckpointHook(
                    interval, folder, save_by_iter=save_by_iter, keep_last=1, save_async=save_async
                )
            )
        start = trainer.cur_step
        trainer.fit(loader, 4, max_steps=max_steps if saves else None, hooks=hooks)
        return start, trainer.cur_step, [value.clone() for value in engine.model.state_dict().values()]

    torch.manual_seed(5)
    state = torch.get_rng_state()
    _, _, expected = fit()
    gpc.destroy()
    torch.set_rng_state(state)
    fit(saves=True)
    wait_for_saves()
    gpc.destroy()
    start, end, found = fit(resumes=True)
    gpc.destroy()
    return start, end, all(map(torch.equal, found, expected))


@pytest.mark.parametrize(
    ("interval", "save_by_iter", "save_async", "saved_at"),
    [(2, False, False, 6), (4, True, True, 8), (6, True, False, 6)],  # 6 is the end of an epoch
)
def test_the_hook_saves_what_the_trainer_needs_to_go_on(
    interval: int, save_by_iter: bool, save_async: bool, saved_at: int, tmp_path: Path
) -> None:
    (result,) = run_ranks(by_the_hook, 1, str(tmp_path), interval, save_by_iter, save_async, 8)
    assert result == (saved_at, 12, True)
    assert [path.name for path in tmp_path.iterdir()] == [f"step-{saved_at:08d}"]


@pytest.mark.unit
def test_options_of_the_hook() -> None:
    with pytest.raises(ValueError, match="give the number to keep in keep_last"):
        SaveCheckpointHook(save_async=True)
    with pytest.raises(ValueError, match="give a folder"):
        SaveCheckpointHook(checkpoint_dir="last.pt", keep_last=1)
