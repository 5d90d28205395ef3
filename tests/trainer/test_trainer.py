"""The loop of the trainer: what is called when, when it ends, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from colossalai.logging import get_dist_logger
from colossalai.trainer import NanLossError, Trainer, hooks
from colossalai.trainer.hooks import BaseHook
from tests.trainer.fakes import FakeEngine, Lines, Probe, make_batches

pytestmark = pytest.mark.unit

MOMENTS = [name for name in vars(BaseHook) if name.startswith(("before_", "after_"))]


class Diary(BaseHook):
    """Writes down every moment."""

    def __init__(self, entries: list[Any], name: str = "", priority: int = 10) -> None:
        super().__init__(priority)
        self.entries = entries
        for moment in MOMENTS:
            setattr(self, moment, lambda *args, moment=moment: entries.append(name + moment))


def test_the_moments_come_in_order() -> None:
    entries: list[str] = []
    Trainer(FakeEngine()).fit(
        make_batches((2, 2)),
        epochs=2,
        test_dataloader=make_batches((2,)),
        test_interval=2,
        hooks=[Diary(entries)],
    )
    epoch = [
        "before_train_epoch",
        *["before_train_iter", "after_train_iter"] * 2,
        "after_train_epoch",
    ]
    test = [
        "before_test",
        "before_test_epoch",
        "before_test_iter",
        "after_test_iter",
        "after_test_epoch",
        "after_test",
    ]
    assert entries == ["after_hook_is_attached", "before_train", *epoch, *epoch, *test, "after_train"]


def test_an_iteration_is_zero_grad_run_step_and_a_test_has_no_gradients() -> None:
    engine = FakeEngine()
    trainer = Trainer(engine)
    trainer.fit(make_batches((2, 2)), epochs=1, test_dataloader=make_batches((2,)))
    assert engine.calls == [*["zero_grad", "run grad", "step"] * 2, "run forward"]


def test_lower_priorities_run_earlier_and_equal_ones_as_given() -> None:
    entries: list[str] = []
    trainer = Trainer(FakeEngine())
    given = [
        Diary(entries, "c ", 5),
        Diary(entries, "d ", 5),
        Diary(entries, "e ", 10),
        Diary(entries, "a ", 0),
    ]
    trainer.fit(make_batches((2,)), epochs=1, hooks=given)
    assert [entry for entry in entries if entry.endswith("before_train")] == [
        f"{name} before_train" for name in "acde"
    ]
    assert [hook.priority for hook in trainer.hooks] == [0, 5, 5, 10]


class LogMessageHook(hooks.BaseHook):
    """The sample of the documentation: its `__init__` does not call the base's."""

    def __init__(self, priority: int = 10) -> None:
        self._logger = get_dist_logger()

    def before_train(self, trainer: Trainer) -> None:
        self._logger.info("training starts")

    def after_train(self, trainer: Trainer) -> None:
        self._logger.info("training finished")


def test_the_hook_of_the_documentation_works(capsys: pytest.CaptureFixture[str]) -> None:
    Trainer(FakeEngine()).fit(make_batches((2,)), epochs=1, hooks=[LogMessageHook(), hooks.LossHook()])
    written = capsys.readouterr().err
    assert written.index("training starts") < written.index("training finished")


def test_counters_count_what_is_complete() -> None:
    seen: list[tuple[str, int, int]] = []
    trainer = Trainer(FakeEngine())

    def note(moment: str) -> Probe:
        return Probe(moment, lambda trainer, *_: seen.append((moment, trainer.cur_epoch, trainer.cur_step)))

    moments = ["before_train_iter", "after_train_iter", "after_train_epoch", "after_test"]
    trainer.fit(
        make_batches((2, 2)),
        epochs=1,
        test_dataloader=make_batches((2,)),
        hooks=[note(moment) for moment in moments],
    )
    assert seen == [
        ("before_train_iter", 0, 0),
        ("after_train_iter", 0, 1),
        ("before_train_iter", 0, 1),
        ("after_train_iter", 0, 2),
        ("after_train_epoch", 1, 2),
        ("after_test", 1, 2),
    ]
    assert (trainer.max_epochs, trainer.max_steps, trainer.steps_per_epoch) == (1, None, 2)


def test_max_steps_ends_an_epoch_early_and_a_second_call_goes_on() -> None:
    engine, lines = FakeEngine(), Lines()
    trainer = Trainer(engine, logger=lines)
    trainer.fit(make_batches(), epochs=5, max_steps=4)
    assert (trainer.cur_epoch, trainer.cur_step) == (2, 4)
    trainer.fit(make_batches(), epochs=3)
    assert (trainer.cur_epoch, trainer.cur_step) == (3, 7)
    assert not lines.warnings
    trainer.fit(make_batches(), epochs=3)
    assert engine.calls.count("step") == 7
    assert "nothing to train: 3 epochs and 7 steps" in lines.warnings[0]


def test_a_new_trainer_goes_on_from_the_epoch_it_is_told() -> None:
    trainer = Trainer(FakeEngine())
    trainer.cur_epoch, trainer.cur_step = 3, 9
    trainer.fit(make_batches(), epochs=4)
    assert (trainer.cur_epoch, trainer.cur_step) == (4, 12)


def test_every_epoch_trains_and_every_test_evaluates() -> None:
    engine, modes = FakeEngine(), []
    probes = [
        Probe(moment, lambda *_: modes.append(engine.training))
        for moment in ("before_train_iter", "before_test_iter")
    ]
    Trainer(engine).fit(make_batches((2,)), epochs=2, test_dataloader=make_batches((2,)), hooks=probes)
    assert modes == [True, False, True, False]


def test_a_loader_without_a_length_is_read_to_its_end() -> None:
    class Stream:
        def __iter__(self) -> Any:
            return iter(make_batches())

    trainer = Trainer(FakeEngine())
    trainer.fit(Stream(), epochs=2)
    assert (trainer.cur_step, trainer.steps_per_epoch) == (6, None)


def test_evaluate_returns_the_metrics_and_leaves_the_counters() -> None:
    engine = FakeEngine()
    trainer = Trainer(engine)
    batches = make_batches()
    values = trainer.evaluate(batches, hooks=[hooks.LossHook()])
    data, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    assert values == {"Loss": pytest.approx(engine.criterion(engine.model(data), labels).item(), rel=1e-12)}
    assert (trainer.cur_epoch, trainer.cur_step) == (0, 0)
    assert trainer.evaluate(batches[:1]).keys() == {"Loss"}, "without hooks those of the last call stay"


@pytest.mark.parametrize("training", [True, False])
def test_predict_runs_the_model_and_keeps_the_mode(training: bool) -> None:
    engine = FakeEngine()
    engine.model.train(training)
    data = torch.randn(4, 3, dtype=torch.float64)
    output = Trainer(engine).predict(data)
    torch.testing.assert_close(output, engine.model(data), rtol=0, atol=0)
    assert not output.requires_grad
    assert engine.training is training


def test_predict_takes_a_whole_batch_if_the_schedule_splits_it() -> None:
    engine = FakeEngine()
    engine.schedule.data_process_func = lambda batch: batch
    batch = make_batches()[0]
    torch.testing.assert_close(Trainer(engine).predict(batch), engine.model(batch[0]), rtol=0, atol=0)


def test_a_schedule_that_is_given_is_the_one_of_the_engine() -> None:
    engine, schedule = FakeEngine(), object()
    Trainer(engine, schedule)
    assert engine.schedule is schedule


def test_states_are_set_once() -> None:
    trainer = Trainer(FakeEngine())
    for value in (1, 2):
        BaseHook().init_runner_states(trainer, "count", value)
    assert trainer.states == {"count": 1}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"epochs": 0}, "epochs=0 is out of range"),
        ({"epochs": 1, "test_interval": 0}, "test_interval=0 is out of range"),
        ({"epochs": 1, "max_steps": -1}, "max_steps=-1 is out of range"),
        ({"epochs": 1, "hooks": [object()]}, "is not a hook"),
        ({"epochs": 1, "hooks": [hooks.LossHook]}, "is not a hook"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Trainer(FakeEngine()).fit(make_batches(), **arguments)


def test_an_empty_loader_is_an_error() -> None:
    with pytest.raises(ValueError, match="train_dataloader gave no batch"):
        Trainer(FakeEngine()).fit([], epochs=1)
    with pytest.raises(ValueError, match="test_dataloader gave no batch"):
        Trainer(FakeEngine()).evaluate([])
    with pytest.raises(ValueError, match="not an iterator"):
        Trainer(FakeEngine()).fit(iter(make_batches()), epochs=2)


def test_the_first_loss_that_is_nan_is_named_once() -> None:
    batches = make_batches((4, 4, 4, 4))
    batches[1][0][0, 0] = float("nan")
    for action in ("warn", "ignore"):
        logger = Lines()
        trainer = Trainer(FakeEngine(), logger=logger, nan_loss=action)  # type: ignore[arg-type]
        trainer.fit(batches, epochs=1, hooks=[hooks.LossHook()])
        assert len(logger.warnings) == (action == "warn")
        assert all("the loss is nan at step 2 on rank 0;" in line for line in logger.warnings)
    with pytest.raises(NanLossError, match="at step 2 on rank 0"):
        Trainer(FakeEngine(), nan_loss="stop").fit(batches, epochs=1, hooks=[])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="nan_loss is 'raise'; it must be one of 'warn', 'stop', 'ignore'"):
        Trainer(FakeEngine(), nan_loss="raise")  # type: ignore[arg-type]


def modes_of(model: nn.Module) -> dict[str, bool]:
    return {name: module.training for name, module in model.named_modules()}


def engine_with_a_frozen_batch_norm() -> FakeEngine:
    engine = FakeEngine()
    norm = nn.BatchNorm1d(3, dtype=torch.float64)
    engine.model = nn.Sequential(norm, nn.Sequential(engine.model, nn.Dropout(0.0)))
    engine.model.takes_labels = False
    norm.eval()
    return engine


def test_a_frozen_batch_norm_stays_frozen_over_tests() -> None:
    engine = engine_with_a_frozen_batch_norm()
    model, seen = engine.model, []
    before = modes_of(model)
    probes = [
        Probe("before_train_iter", lambda *_: seen.append(modes_of(model) == before)),
        Probe("after_test", lambda *_: seen.append(not any(modes_of(model).values()))),
    ]
    trainer = Trainer(engine)
    trainer.fit(make_batches(), epochs=2, test_dataloader=make_batches(), hooks=probes)
    assert seen == [True] * 8
    assert model[0].num_batches_tracked == 0
    trainer.evaluate(make_batches())
    trainer.predict(torch.zeros(2, 3, dtype=torch.float64))
    assert modes_of(model) == before


def test_a_pretrained_part_is_trained() -> None:
    """It is in evaluation mode as a whole, beside a layer that is new."""
    engine = FakeEngine()
    part = nn.Sequential(nn.BatchNorm1d(3, dtype=torch.float64), nn.Dropout(0.0)).eval()
    engine.model = nn.Sequential(part, engine.model)
    engine.model.takes_labels = False
    Trainer(engine).fit(make_batches((2, 2)), epochs=1)
    assert all(modes_of(engine.model).values())


def test_modes_are_restored_after_a_failed_test() -> None:
    engine = engine_with_a_frozen_batch_norm()
    before = modes_of(engine.model)
    with pytest.raises(ValueError, match="test_dataloader"):
        Trainer(engine).evaluate([])
    assert modes_of(engine.model) == before


def test_a_model_in_evaluation_mode_is_trained() -> None:
    engine = engine_with_a_frozen_batch_norm()
    engine.eval()
    Trainer(engine).fit(make_batches((2, 2)), epochs=1)
    assert all(modes_of(engine.model).values())
