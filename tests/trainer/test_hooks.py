"""The hooks that do something with what others measure: schedules, logs, events."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import pytest
import torch

from colossalai.nn.metric import Accuracy
from colossalai.registry import HOOKS
from colossalai.trainer import MultiTimer, Trainer, hooks
from colossalai.trainer.hooks import (
    AccuracyHook,
    LogMemoryByEpochHook,
    LogMetricByEpochHook,
    LogMetricByStepHook,
    LogTimingByEpochHook,
    LossHook,
    LRSchedulerHook,
    TensorboardHook,
    ThroughputHook,
)
from tests.trainer.fakes import FakeEngine, Lines, Probe, make_batches

pytestmark = pytest.mark.unit

NAMES = [
    "LossHook",
    "AccuracyHook",
    "LogMetricByStepHook",
    "LogMetricByEpochHook",
    "LRSchedulerHook",
    "SaveCheckpointHook",
    "TensorboardHook",
    "ThroughputHook",
    "LogMemoryByEpochHook",
    "LogTimingByEpochHook",
]


def halving(engine: FakeEngine) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(engine.optimizer, gamma=0.5)


def rates(engine: FakeEngine, *, by_epoch: bool, epochs: int = 2) -> tuple[list[float], list[float]]:
    """The rate of each iteration, and what the hook says it was."""
    real: list[float] = []
    told: list[float] = []
    Trainer(engine).fit(
        make_batches((2, 2, 2, 2)),
        epochs=epochs,
        hooks=[
            LRSchedulerHook(halving(engine), by_epoch=by_epoch),
            Probe("before_train_iter", lambda _: real.append(engine.optimizer.param_groups[0]["lr"])),
            Probe("after_train_iter", lambda trainer, *_: told.append(trainer.states["lr"])),
        ],
    )
    return real, told


def test_every_hook_is_registered() -> None:
    for name in NAMES:
        assert HOOKS.get_module(name) is getattr(hooks, name)


def test_lr_by_epoch() -> None:
    real, told = rates(FakeEngine(), by_epoch=True)
    assert real == told == [0.5] * 4 + [0.25] * 4


def test_lr_by_iteration() -> None:
    real, told = rates(FakeEngine(), by_epoch=False, epochs=1)
    assert real == told == [0.5, 0.25, 0.125, 0.0625]


def test_lr_waits_for_the_update_of_an_accumulation_window_and_skips_overflows() -> None:
    real, told = rates(FakeEngine(accumulation_steps=2, overflows=(1,)), by_epoch=False)
    assert real == told == [0.5, 0.5, 0.25, 0.25, 0.25, 0.25, 0.125, 0.125]


def test_lr_is_not_stored_if_not_wanted() -> None:
    engine = FakeEngine()
    trainer = Trainer(engine)
    trainer.fit(
        make_batches(), epochs=1, hooks=[LRSchedulerHook(halving(engine), True, store_lr_in_state=False)]
    )
    assert "lr" not in trainer.states


def test_epochs_are_logged_with_what_the_hooks_measured() -> None:
    engine, lines = FakeEngine(), Lines()
    trainer = Trainer(engine)
    trainer.fit(
        make_batches(),
        epochs=4,
        test_dataloader=make_batches(),
        test_interval=3,
        hooks=[
            LogMetricByEpochHook(lines, interval=2),
            LRSchedulerHook(halving(engine), by_epoch=True),
            LossHook(),
            AccuracyHook(Accuracy()),
        ],
    )
    assert [line.split(":")[0] for line in lines.lines] == ["Epoch 2 train", "Epoch 3 test", "Epoch 4 train"]
    values = trainer.metrics["train"].epoch_values
    assert lines.lines[-1] == (
        f"Epoch 4 train: Loss {values['Loss']:.5g} | Accuracy {values['Accuracy']:.5g} | lr 0.0625"
    )


def test_steps_are_shown_beside_the_bar() -> None:
    texts: list[str] = []
    Trainer(FakeEngine()).fit(
        make_batches(),
        epochs=1,
        test_dataloader=make_batches((2,)),
        hooks=[
            LossHook(),
            LogMetricByStepHook(),
            Probe("after_train_iter", lambda trainer, *_: texts.append(trainer.states["step_metrics"])),
            Probe("after_test_iter", lambda trainer, *_: texts.append(trainer.states["step_metrics"])),
        ],
    )
    assert len(set(texts)) == 4
    assert all(text.startswith("Loss 0.") or text.startswith("Loss 1.") for text in texts)


def test_memory_is_logged() -> None:
    lines = Lines()
    Trainer(FakeEngine()).fit(
        make_batches(),
        epochs=2,
        test_dataloader=make_batches(),
        hooks=[LogMemoryByEpochHook(lines, interval=2, report_cpu=True)],
    )
    moments = ["before training", "after epoch 2 train", "after epoch 2 test"]
    assert [line.split(":")[0] for line in lines.lines] == [f"Memory {moment}" for moment in moments]
    resident = float(lines.lines[0].split("process ")[1].split(" MiB")[0])
    assert 50 < resident < 50_000


def test_times_are_logged() -> None:
    lines, timer = Lines(), MultiTimer()
    trainer = Trainer(FakeEngine(), timer=timer)
    trainer.fit(
        make_batches(),
        epochs=2,
        test_dataloader=make_batches(),
        hooks=[LogTimingByEpochHook(timer, lines)],
    )
    titles = [line.split(":")[0] for line in lines.lines]
    assert titles == ["Epoch 1 train", "Epoch 1 test", "Epoch 2 train", "Epoch 2 test"]
    step, epoch = timer.get_timer("Train-step"), timer.get_timer("Train-epoch")
    assert 3 * step.get_history_mean() == pytest.approx(step.get_history_sum()), "the steps of one epoch only"
    assert 0 < step.get_history_sum() < epoch.get_elapsed_time() < epoch.get_history_sum()


def test_times_of_tests_may_be_left_out() -> None:
    lines, timer = Lines(), MultiTimer()
    hook = LogTimingByEpochHook(timer, lines, log_eval=False)
    Trainer(FakeEngine(), timer=timer).fit(
        make_batches(), epochs=1, test_dataloader=make_batches(), hooks=[hook]
    )
    assert [line.split(":")[0] for line in lines.lines] == ["Epoch 1 train"]


@pytest.mark.parametrize("timer", [None, MultiTimer(), MultiTimer(on=False)])
def test_a_timer_that_measures_nothing_is_refused(timer: MultiTimer | None) -> None:
    trainer = Trainer(FakeEngine(), timer=None if timer is None or timer.is_on else timer)
    with pytest.raises(ValueError, match="give the same timer, switched on"):
        trainer.fit(make_batches(), 1, hooks=[LogTimingByEpochHook(timer or MultiTimer(), Lines())])


@pytest.mark.parametrize(
    "make",
    [
        LogMetricByEpochHook,
        LogMemoryByEpochHook,
        lambda lines, n: LogTimingByEpochHook(MultiTimer(), lines, n),
    ],
)
def test_an_interval_must_be_positive(make: Any) -> None:
    with pytest.raises(ValueError, match="interval=0 is out of range"):
        make(Lines(), 0)


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]
    }


def test_tensorboard_events_can_be_read_back(tmp_path: Path) -> None:
    engine = FakeEngine()
    losses: list[float] = []
    trainer = Trainer(engine)
    trainer.fit(
        make_batches(),
        epochs=2,
        test_dataloader=make_batches(),
        hooks=[
            TensorboardHook(log_dir=tmp_path / "tb", ranks=[0]),
            LossHook(),
            ThroughputHook(),
            LRSchedulerHook(halving(engine), by_epoch=True),
            Probe("after_train_iter", lambda trainer, output, label, loss: losses.append(loss.item())),
        ],
    )
    read = scalars(tmp_path / "tb")
    assert [step for step, _ in read["train/Loss"]] == [1, 2, 3, 4, 5, 6]
    assert [value for _, value in read["train/Loss"]] == pytest.approx(losses, rel=1e-6)
    assert read["train/lr"] == [(1, 0.5), (2, 0.5), (3, 0.5), (4, 0.25), (5, 0.25), (6, 0.25)]
    assert [step for step, _ in read["train_epoch/Loss"]] == [1, 2]
    assert read["test_epoch/Loss"][-1] == (
        2,
        pytest.approx(trainer.metrics["test"].epoch_values["Loss"], rel=1e-6),
    )
    assert {"train/Throughput", "train_epoch/Throughput", "test_epoch/Throughput"} < read.keys()


def test_tensorboard_follows_a_test_without_a_training(tmp_path: Path) -> None:
    trainer = Trainer(FakeEngine())
    values = trainer.evaluate(make_batches(), hooks=[LossHook(), TensorboardHook(tmp_path)])
    assert scalars(tmp_path)["test_epoch/Loss"] == [(0, pytest.approx(values["Loss"], rel=1e-6))]


def test_other_ranks_write_no_events(tmp_path: Path) -> None:
    Trainer(FakeEngine()).fit(
        make_batches(), epochs=1, hooks=[LossHook(), TensorboardHook(tmp_path, ranks=[1])]
    )
    assert not list(tmp_path.iterdir())


def test_a_missing_tensorboard_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real_import = builtins.__import__

    def without_tensorboard(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith(("tensorboard", "torch.utils.tensorboard")):
            raise ModuleNotFoundError(f"No module named {name!r}")
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_tensorboard)
    with pytest.raises(ValueError, match=r"pip install colossalai\[tensorboard\]"):
        TensorboardHook(tmp_path)
