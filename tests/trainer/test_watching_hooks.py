"""Hooks that watch a metric: when a training ends early, which model is kept; and the profiler's hook."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from colossalai.registry import HOOKS
from colossalai.trainer import Trainer, hooks
from colossalai.trainer.hooks import (
    BaseHook,
    EarlyStoppingHook,
    LossHook,
    MetricHook,
    MetricWatchHook,
    ProfilerHook,
    SaveBestHook,
)
from tests.trainer.fakes import FakeEngine, Lines, make_batches

pytestmark = pytest.mark.unit

NAN = math.nan


class Figures(MetricHook):
    """Measures given figures, one for each epoch; the last one stays."""

    names = ("Loss",)

    def __init__(self, *figures: float) -> None:
        super().__init__(0)
        self.figures = figures

    def measure(self, trainer: Trainer, table: Any, results: Any) -> None:
        done = trainer.cur_epoch - (table is trainer.metrics["test"])
        table.add("Loss", self.figures[min(done, len(self.figures) - 1)], 1.0)


class Best(MetricWatchHook):
    """Keeps the epochs in which a figure was better."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.epochs: list[int] = []

    def after_judgment(self, trainer: Trainer, value: float, *, is_better: bool) -> None:
        self.epochs += [trainer.cur_epoch] if is_better else []


def fit(given: Sequence[BaseHook], epochs: int = 9, *, tests: bool = True) -> tuple[Trainer, Lines]:
    lines = Lines()
    trainer = Trainer(FakeEngine(), logger=lines)
    trainer.fit(make_batches(), epochs, test_dataloader=make_batches((2,)) if tests else None, hooks=given)
    return trainer, lines


@pytest.mark.parametrize("phase", ["train", "test"])
@pytest.mark.parametrize(
    ("figures", "options", "last_epoch"),
    [
        ((3.0, 2.0, 2.5, 2.0, 9.0), {"patience": 2}, 5),
        ((3.0, 2.0, 2.5, 1.0, 1.0), {"patience": 2}, 7),
        ((3.0, 2.9, 2.8), {"patience": 1, "min_delta": 0.15}, 5),
        ((NAN, NAN), {"patience": 0}, 1),
        ((3.0, NAN, 2.0, NAN), {"patience": 1}, 5),
        ((1.0, 2.0, 3.0), {"mode": "max", "patience": 0}, 4),
        ((9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0), {"patience": 0}, 9),
    ],
)
def test_a_training_ends_when_the_metric_gets_no_better(
    phase: str, figures: tuple[float, ...], options: dict[str, Any], last_epoch: int
) -> None:
    trainer, lines = fit([EarlyStoppingHook("Loss", phase=phase, **options), Figures(*figures)])
    assert trainer.cur_epoch == last_epoch
    assert (trainer.stop_reason is None) == (last_epoch == 9)
    if last_epoch < 9:
        assert lines.lines[-1].startswith(f"Training ends after epoch {last_epoch}: {phase} Loss is ")


def test_a_second_fit_is_not_stopped_by_the_first() -> None:
    trainer, _ = fit([Figures(1.0), EarlyStoppingHook(patience=1)])
    assert trainer.cur_epoch == 3
    trainer.fit(make_batches(), 5, hooks=[LossHook()])
    assert (trainer.cur_epoch, trainer.stop_reason) == (5, None)


def test_a_hook_of_the_users_own_may_ask_for_the_end() -> None:
    class Enough(BaseHook):
        def after_train_iter(self, trainer: Trainer, *_: Any) -> None:
            if trainer.cur_step == 4:
                trainer.request_stop("enough")

    trainer, lines = fit([Enough()])
    assert (trainer.cur_epoch, trainer.cur_step) == (2, 6)
    assert lines.lines == ["Training ends after epoch 2: enough"]


def test_the_best_epochs() -> None:
    best = Best("Loss")
    trainer, _ = fit([best, Figures(3.0, NAN, 2.0, 2.0, 1.5, 4.0)], epochs=6)
    assert best.epochs == [1, 3, 5]
    assert (best.best_value, best.best_epoch) == (1.5, 5)
    state = best.state_dict()
    trainer.evaluate(make_batches())
    assert best.state_dict() == state, "a test outside of a training does not count"
    other = Best("Loss")
    other.load_state_dict(json.loads(json.dumps(state)))
    fit([other, Figures(2.0, 1.0)], epochs=2)
    assert other.epochs == [2]


@pytest.mark.parametrize("cls", [EarlyStoppingHook, SaveBestHook])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"metric": "F1"}, "mode of the metric 'F1' is None; it must be 'min' if less is better, else 'max'"),
        ({"mode": "least"}, "mode of the metric 'Loss' is 'least'"),
        ({"phase": "eval"}, "phase is 'eval'; it must be 'train' or 'test'"),
        ({"min_delta": -1.0}, "min_delta is -1.0; it must be 0 or greater"),
    ],
)
def test_what_cannot_be_watched_is_refused(cls: type, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cls(**options)


def test_other_mistakes_are_told_before_the_training() -> None:
    with pytest.raises(ValueError, match="patience=-1 is out of range"):
        EarlyStoppingHook(patience=-1)
    with pytest.raises(ValueError, match="save_async=True is for training states"):
        SaveBestHook(path="best.pt", save_async=True)
    with pytest.raises(
        ValueError, match=r"watches 'Accuracy', which no hook measures \(measured are: \['Loss'\]"
    ):
        fit([LossHook(), SaveBestHook("Accuracy")])
    with pytest.raises(ValueError, match="watches 'Loss' of tests, and there are none"):
        fit([LossHook(), EarlyStoppingHook()], tests=False)


def test_the_profiler_writes_a_trace_of_some_steps(tmp_path: Path) -> None:
    hook = ProfilerHook(tmp_path / "traces", skip=1, warmup=1, steps=2)
    fit([hook], epochs=3)
    (path,) = (tmp_path / "traces").iterdir()
    assert path.name == "rank_0_step_4.pt.trace.json"
    names = {event.get("name") for event in json.loads(path.read_text())["traceEvents"]}
    assert {"ProfilerStep#2", "ProfilerStep#3", "aten::linear"} <= names
    assert not names & {"ProfilerStep#1", "ProfilerStep#4"}


def test_a_training_that_fails_leaves_no_profiler(tmp_path: Path) -> None:
    class Failing(BaseHook):
        def after_train_iter(self, trainer: Trainer, *_: Any) -> None:
            raise RuntimeError("lost")

    with pytest.raises(RuntimeError, match="lost"):
        fit([ProfilerHook(tmp_path, skip=0, steps=5), Failing()])
    fit([ProfilerHook(tmp_path, skip=0, steps=1)], epochs=1)
    assert (tmp_path / "rank_0_step_2.pt.trace.json").exists()


def test_a_training_without_a_trace_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit([ProfilerHook(tmp_path, skip=7)], epochs=2)
    assert "no trace: the training had 6 steps, and the first 8 are left out" in capsys.readouterr().err
    with pytest.raises(ValueError, match="steps=0 is out of range"):
        ProfilerHook(tmp_path, steps=0)
    with pytest.raises(ValueError, match="skip=-1 is out of range"):
        ProfilerHook(tmp_path, skip=-1)


def test_the_hooks_are_registered() -> None:
    for name in ("EarlyStoppingHook", "SaveBestHook", "ProfilerHook", "LoggerHook"):
        assert HOOKS.get_module(name) is getattr(hooks, name)
