"""`fit(resume=...)`, early ends and the best model on two ranks: the same on all of them, and bit for bit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import colossalai
from colossalai.checkpoint_io import load_model
from colossalai.trainer import JsonLinesLogger, Trainer, hooks
from colossalai.trainer.hooks import BaseHook, MetricHook
from colossalai.utils import get_dataloader
from tests.ranks import RanksError, run_ranks
from tests.trainer.fakes import Probe

pytestmark = pytest.mark.dist

DATA = TensorDataset(torch.randn(14, 3, generator=torch.Generator().manual_seed(0)), torch.zeros(14, 2))


class Kill(BaseHook):
    """Ends the training by an error after some steps."""

    def __init__(self, step: int) -> None:
        super().__init__(90)
        self.step = step

    def after_train_iter(self, trainer: Trainer, *_: Any) -> None:
        if trainer.cur_step == self.step:
            raise RuntimeError("killed")


class Scattered(MetricHook):
    """A broken metric: rank 0 gets worse, rank 1 gets better, and no reduction makes them equal."""

    names = ("Loss",)

    def measure(self, trainer: Trainer, table: Any, results: Any) -> None:
        table.add("Loss", 1.0, 1.0)

    def after_train_epoch(self, trainer: Trainer) -> None:
        trainer.metrics["train"]._epoch_values["Loss"] = float(
            trainer.cur_epoch * (1 - 2 * trainer.engine.mesh.rank)
        )


def build(**config: Any) -> tuple[Trainer, Any, Any]:
    colossalai.launch_from_torch(config, verbose=False)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    loader = get_dataloader(DATA, batch_size=2, shuffle=True)
    engine, loader, _, scheduler = colossalai.initialize(
        model, optimizer, nn.MSELoss(), loader, lr_scheduler=scheduler, verbose=False
    )
    return Trainer(engine), loader, scheduler


def train(folder: Path, kill_at: int = -1, own_loader: bool = False) -> tuple[list[torch.Tensor], Any, int]:
    """Three epochs of four steps, with a training state after every third step, from where `folder` is."""
    trainer, loader, scheduler = build()
    if own_loader:  # one that did not go through initialize
        trainer.engine.train_dataloader = None
    stopping = hooks.EarlyStoppingHook("Loss", patience=9, phase="train")
    steps: list[int] = []
    trainer.fit(
        loader,
        3,
        hooks=[
            hooks.LossHook(),
            hooks.LRSchedulerHook(scheduler, by_epoch=True),
            hooks.SaveCheckpointHook(3, folder, save_by_iter=True, keep_last=2),
            stopping,
            Probe("after_train_iter", lambda trainer, *_: steps.append(trainer.cur_step)),
            Kill(kill_at),
        ],
        resume=folder,
    )
    assert (trainer.cur_step, trainer.cur_epoch) == (12, 3)
    params = [param.detach().clone() for param in trainer.engine.model.parameters()]
    return params, stopping.state_dict(), len(steps)


def test_fit_goes_on_from_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that is killed after ten steps goes on after nine, in the third epoch, as if it were not."""
    expected = run_ranks(train, 2, tmp_path / "undisturbed")
    for own_loader in (False, True):
        folder = tmp_path / f"killed, {own_loader=}"
        with pytest.raises(RanksError, match="killed"):
            run_ranks(train, 2, folder, 10, own_loader)
        found = run_ranks(train, 2, folder, -1, own_loader)
        for (params, state, num_steps), (wanted, wanted_state, _) in zip(found, expected, strict=True):
            assert all(map(torch.equal, params, wanted))
            assert num_steps == 3
            if wanted_state["best_epoch"] < 3:  # the third one is measured from its second step on
                assert state == wanted_state
        output = capsys.readouterr().out
        if not own_loader:
            assert f"no training state in {tmp_path / 'undisturbed'}: the training begins" in output
        assert f"going on from {folder}: 9 steps and 2 epochs are complete" in output


def stop_and_keep(folder: Path) -> list[int]:
    trainer, loader, _ = build()
    world = trainer.engine.mesh.world_size
    ends = []
    # A figure that differs between ranks: rank 0's counts, which gets worse from the first epoch on.
    trainer.fit(
        loader,
        9,
        hooks=[
            Scattered(),
            hooks.EarlyStoppingHook(patience=1, phase="train"),
            hooks.SaveBestHook(phase="train", path=folder / "best"),
        ],
    )
    ends.append(trainer.cur_epoch)
    assert sorted(path.name for path in (folder / "best").iterdir() if path.is_dir()) == ["step-00000004"]

    class Last(BaseHook):
        def after_train_iter(self, trainer: Trainer, *_: Any) -> None:
            if trainer.engine.mesh.rank == world - 1:
                trainer.request_stop("told to, on one rank only")

    trainer.fit(loader, 9, hooks=[Last()])
    ends.append(trainer.cur_epoch)
    assert trainer.stop_reason is not None
    # Weights of the best epoch in a file; a trace for each rank; figures by rank 0.
    trainer.fit(
        loader,
        ends[-1] + 2,
        test_dataloader=[DATA[:4]],
        hooks=[
            hooks.LossHook(),
            hooks.SaveBestHook("Loss", folder / "best.safetensors", mode="max"),
            hooks.ProfilerHook(folder / "traces", skip=0, steps=1),
            hooks.LoggerHook(JsonLinesLogger(folder / f"metrics_{os.environ['RANK']}.jsonl"), interval=3),
        ],
    )
    best = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2))
    load_model(best, folder / "best.safetensors")
    best.eval()
    loss = nn.functional.mse_loss(best(DATA[:4][0]), DATA[:4][1]).item()
    hook = trainer.hooks[1]
    assert isinstance(hook, hooks.SaveBestHook)
    assert hook.best_value == pytest.approx(loss, rel=1e-6)
    return ends


def test_ranks_stop_together_and_keep_the_best(tmp_path: Path) -> None:
    assert run_ranks(stop_and_keep, 2, tmp_path) == [[3, 4]] * 2
    traces = sorted(path.name for path in (tmp_path / "traces").iterdir())
    assert [trace.rpartition("_step_")[0] for trace in traces] == ["rank_0", "rank_1"]
    assert (tmp_path / "metrics_0.jsonl").read_text().count('"train"') == 3
    assert not (tmp_path / "metrics_1.jsonl").exists()


def ask_before_the_first_epoch() -> tuple[int, str | None]:
    trainer, loader, _ = build()

    class Ask(BaseHook):
        def before_train(self, trainer: Trainer) -> None:
            if trainer.engine.mesh.rank == 1:
                trainer.request_stop("nothing to do, says one rank")

    trainer.fit(loader, 2, hooks=[Ask()])
    return trainer.cur_step, trainer.stop_reason


def test_one_rank_asks_before_the_first_epoch() -> None:
    """The others would wait in the first step's collectives for one that has left."""
    (steps, heard), (steps_of_asking, reason) = run_ranks(ask_before_the_first_epoch, 2)
    assert (steps, steps_of_asking) == (0, 0)
    assert (heard, reason) == ("another rank has asked for it", "nothing to do, says one rank")
