"""Loggers: what is in their files and what services hear, also after a kill, an error, a new column."""

from __future__ import annotations

import csv
import json
import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from colossalai.trainer import (
    CSVLogger,
    JsonLinesLogger,
    MetricLogger,
    MLflowLogger,
    TensorboardLogger,
    Trainer,
    WandbLogger,
)
from colossalai.trainer.hooks import BaseHook, LoggerHook, LossHook, LRSchedulerHook
from tests.trainer.fakes import FakeEngine, Probe, make_batches
from tests.trainer.test_hooks import halving

pytestmark = pytest.mark.unit


class RecordingLogger(MetricLogger):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def start(self, settings: Any) -> None:
        self.calls.append("start")

    def log(self, group: str, values: Any, *, step: int, epoch: int) -> None:
        self.calls.append((group, step, epoch, sorted(values)))

    def close(self, *, failed: bool = False) -> None:
        self.calls.append(f"close{' failed' * failed}")


def fit(logger: MetricLogger, *hooks: BaseHook, epochs: int = 2, interval: int = 1) -> FakeEngine:
    engine = FakeEngine()
    Trainer(engine).fit(
        make_batches(),
        epochs=epochs,
        test_dataloader=make_batches((2,)),
        hooks=[
            LossHook(),
            LRSchedulerHook(halving(engine), by_epoch=True),
            LoggerHook(logger, interval=interval),
            *hooks,
        ],
    )
    return engine


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_what_a_logger_hears() -> None:
    logger = RecordingLogger()
    fit(logger, epochs=1, interval=2)
    assert logger.calls == [
        "start",
        ("train", 2, 0, ["Loss", "lr"]),
        ("train_epoch", 3, 1, ["Loss"]),
        ("test_epoch", 3, 1, ["Loss"]),
        "close",
    ]
    logger.calls.clear()
    Trainer(FakeEngine()).evaluate(make_batches(), hooks=[LossHook(), LoggerHook(logger)])
    assert logger.calls == ["start", ("test_epoch", 0, 0, ["Loss"]), "close"]


@pytest.mark.parametrize("error", [RuntimeError("lost"), KeyboardInterrupt()], ids=["error", "ctrl-c"])
def test_loggers_are_closed_when_a_training_fails(error: BaseException) -> None:
    logger, second = RecordingLogger(), RecordingLogger()

    def fail(*_: Any) -> None:
        raise error

    def fail_again(**_: Any) -> None:
        raise OSError("no server")

    second.close = fail_again  # type: ignore[method-assign]
    with pytest.raises(type(error)) as raised:
        fit(logger, LoggerHook(second), Probe("after_train_iter", fail))
    assert logger.calls[-1] == "close failed"
    assert raised.value.__notes__ == ["and LoggerHook.on_exception: OSError: no server"]


def test_what_is_no_logger_is_refused() -> None:
    with pytest.raises(ValueError, match=r"JsonLinesLogger'> is not a MetricLogger; give objects"):
        LoggerHook(JsonLinesLogger)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="LoggerHook has no logger"):
        LoggerHook()


def test_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "metrics.jsonl"
    fit(JsonLinesLogger(path), Probe("after_train_epoch", lambda trainer: trainer.states.update(lr=math.nan)))
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    found = [(row["group"], row["step"], row["epoch"]) for row in rows]
    epoch = [("train", 1, 0), ("train", 2, 0), ("train", 3, 0), ("train_epoch", 3, 1), ("test_epoch", 3, 1)]
    assert found[:5] == epoch
    assert len(found) == 10
    assert rows[0]["lr"] == 0.5
    assert 0.1 < rows[0]["Loss"] < 2
    assert rows[0]["time"] > 1.7e9
    # A killed run has left half a line; the next one goes on behind it, and inf is written as JSON can.
    with path.open("a") as file:
        file.write('{"group": "tr')
    logger = JsonLinesLogger(path)
    logger.start({})
    logger.log("train", {"Loss": math.inf}, step=4, epoch=1)
    logger.close()
    lines = path.read_text().splitlines()
    assert lines[10] == '{"group": "tr'
    assert json.loads(lines[11])["Loss"] is None


def test_csv(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    fit(logger)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "test_epoch.csv",
        "train.csv",
        "train_epoch.csv",
    ]
    rows = rows_of(tmp_path / "train.csv")
    assert list(rows[0]) == ["step", "epoch", "Loss", "lr"]
    assert [row["step"] for row in rows] == ["1", "2", "3", "4", "5", "6"]
    assert [row["lr"] for row in rows] == ["0.5"] * 3 + ["0.25"] * 3
    # Another process goes on, with a figure more and one less.
    again = CSVLogger(tmp_path)
    again.start({})
    again.log("train", {"lr": 0.125, "Throughput": 9.0}, step=7, epoch=2)
    again.close()
    rows = rows_of(tmp_path / "train.csv")
    assert len(rows) == 7
    assert rows[0]["Throughput"] == ""
    assert rows[6] == {"step": "7", "epoch": "2", "Loss": "", "lr": "0.125", "Throughput": "9.0"}


def test_wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    run = SimpleNamespace(
        log=lambda values, step: calls.append((values, step)),
        finish=lambda exit_code: calls.append(exit_code),
    )

    def init(**options: Any) -> Any:
        calls.append(options)
        return run

    module = ModuleType("wandb")
    module.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    engine = fit(WandbLogger(project="p", mode="offline"), epochs=1)
    assert calls[0] == {"project": "p", "mode": "offline", "config": engine.settings}
    values, step = calls[1]
    assert step == 1
    assert values.keys() == {"train/Loss", "train/lr", "epoch"}
    assert [step for _, step in calls[1:-1]] == [1, 2, 3, 3, 3], "never back: wandb would drop it"
    assert calls[-1] == 0


def test_mlflow(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    module = ModuleType("mlflow")
    for name in ("set_tracking_uri", "set_experiment", "start_run", "log_params", "log_metrics", "end_run"):
        setattr(module, name, lambda *args, name=name, **kwargs: calls.append((name, args, kwargs)))
    monkeypatch.setitem(sys.modules, "mlflow", module)
    fit(MLflowLogger("e", tracking_uri="file:runs", run_name="r"), epochs=1)
    assert calls[:4] == [
        ("set_tracking_uri", ("file:runs",), {}),
        ("set_experiment", ("e",), {}),
        ("start_run", (), {"run_name": "r"}),
        ("log_params", ({"mesh.dp": "1"},), {}),
    ]
    name, (values,), options = calls[4]
    assert (name, values.keys(), options) == ("log_metrics", {"train/Loss", "train/lr"}, {"step": 1})
    assert calls[-1] == ("end_run", (), {"status": "FINISHED"})


@pytest.mark.parametrize(
    ("make", "package", "requirement"),
    [
        (lambda: TensorboardLogger("x"), "torch.utils.tensorboard", r"colossalai\[tensorboard\]"),
        (lambda: WandbLogger(), "wandb", "wandb"),
        (lambda: MLflowLogger(), "mlflow", "mlflow"),
    ],
)
def test_a_package_that_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, make: Any, package: str, requirement: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError, match=f"is not installed; run: pip install {requirement}$"):
        make()
