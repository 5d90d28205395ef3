"""`colossalai.tracker`: the loggers of the hooks in one's own loop, on rank 0, with checked arguments."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import colossalai
from colossalai.trainer import CSVLogger, JsonLinesLogger, MetricLogger, TensorboardLogger
from tests.trainer.test_loggers import RecordingLogger

pytestmark = pytest.mark.unit


class Failing(MetricLogger):
    """A service that is out of reach."""

    def start(self, settings: Any) -> None:
        raise OSError("no route to host")

    def log(self, group: str, values: Any, *, step: int, epoch: int) -> None:
        raise AssertionError("it was never started")


def test_the_loggers_keep_what_a_loop_logs_and_a_resumed_one_continues(tmp_path: Path) -> None:
    for first in (1, 3):
        loggers = (
            JsonLinesLogger(tmp_path / "metrics.jsonl"),
            CSVLogger(tmp_path / "tables"),
            TensorboardLogger(tmp_path / "events"),
        )
        with colossalai.tracker(*loggers) as tracker:
            for step in (first, first + 1):
                loss = torch.tensor([step / 2], requires_grad=True)
                tracker.log({"loss": loss, "lr": np.float32(0.5)}, step=step)
            tracker.log({"loss": 7}, step=step, group="validation")
            tracker.log({"loss": 9}, step=step, epoch=first, group="test_epoch")
            rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
            assert rows[-1]["loss"] == 9  # flushed before the end
    wanted = [("train", 1), ("train", 2), ("validation", 2), ("test_epoch", 2)]
    wanted += [("train", 3), ("train", 4), ("validation", 4), ("test_epoch", 4)]
    assert [(row["group"], row["step"]) for row in rows] == wanted
    with (tmp_path / "tables" / "train.csv").open(newline="") as file:
        assert [(row["step"], row["loss"], row["lr"]) for row in csv.DictReader(file)] == [
            (str(step), str(step / 2), "0.5") for step in (1, 2, 3, 4)
        ]
    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    found = {tag: [event.step for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert found == {
        "train/loss": [1, 2, 3, 4],
        "train/lr": [1, 2, 3, 4],
        "validation/loss": [2, 4],
        "test_epoch/loss": [1, 3],
    }


def test_flush_writes_what_tensorboard_buffers(tmp_path: Path) -> None:
    with colossalai.tracker(TensorboardLogger(tmp_path)) as tracker:
        tracker.log({"loss": 1.0}, step=1)
        tracker.flush()
        events = EventAccumulator(str(tmp_path))
        events.Reload()
        assert events.Scalars("train/loss")[0].value == 1.0


def test_other_ranks_check_their_arguments_and_write_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    logger = RecordingLogger()
    with colossalai.tracker(logger, JsonLinesLogger(tmp_path / "metrics.jsonl")) as tracker:
        tracker.log({"loss": 1.0}, step=1)
        with pytest.raises(ValueError, match="step=-1"):
            tracker.log({"loss": 1.0}, step=-1)
        tracker.flush()
    assert logger.calls == []
    assert list(tmp_path.iterdir()) == []


def test_an_exception_closes_the_loggers_as_failed() -> None:
    logger = RecordingLogger()
    with pytest.raises(KeyboardInterrupt), colossalai.tracker(logger) as tracker:
        raise KeyboardInterrupt
    assert logger.calls == ["start", "close failed"]
    tracker.close()
    assert logger.calls == ["start", "close failed"]
    with pytest.raises(ValueError, match="is closed"):
        tracker.log({"loss": 1.0}, step=1)


def test_a_logger_that_cannot_start_closes_those_before_it() -> None:
    logger = RecordingLogger()
    with pytest.raises(OSError, match="no route"):
        colossalai.tracker(logger, Failing())
    assert logger.calls == ["start", "close failed"]


@pytest.mark.parametrize(
    ("values", "place", "message"),
    [
        ({"loss": torch.ones(2)}, {"step": 1}, r"'loss' is a Tensor of shape \(2,\)"),
        ({"loss": "1"}, {"step": 1}, "'loss' is a str; give a number"),
        ({"loss": None}, {"step": 1}, "'loss' is a NoneType"),
        ({"loss": torch.tensor(1j)}, {"step": 1}, "complex64"),
        ({"step": 1.0}, {"step": 1}, "'step' is not a name for a figure"),
        ({3: 1.0}, {"step": 1}, "3 is not a name"),
        ({"loss": 1.0}, {"step": 1.5}, r"step=1\.5"),
        ({"loss": 1.0}, {"step": 1, "epoch": -1}, "epoch=-1"),
        ({"loss": 1.0}, {"step": 1, "group": "../x"}, r"group='\.\./x'"),
        ({"loss": 1.0}, {"step": 1, "group": "test_epoch"}, "give epoch="),
    ],
)
def test_wrong_figures_are_refused_and_nothing_is_written(values: Any, place: Any, message: str) -> None:
    logger = RecordingLogger()
    with colossalai.tracker(logger) as tracker, pytest.raises(ValueError, match=message):
        tracker.log(values, **place)
    assert logger.calls == ["start", "close"]


def test_wrong_loggers_are_refused() -> None:
    logger: Any = RecordingLogger()
    for loggers, settings, message in (
        ((), None, "no logger"),
        (("metrics.jsonl",), None, "'metrics.jsonl' is not a MetricLogger"),
        ((RecordingLogger,), None, "is not a MetricLogger"),
        ((logger, logger), None, "the same logger twice"),
        ((logger,), "lr=1", "settings='lr=1' is not a mapping"),
    ):
        with pytest.raises(ValueError, match=message):
            colossalai.tracker(*loggers, settings=settings)
    assert logger.calls == []
