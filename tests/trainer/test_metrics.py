"""The hooks that measure, and the metrics they fill."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from colossalai.context import Mesh
from colossalai.nn.metric import Accuracy
from colossalai.trainer import Trainer
from colossalai.trainer._batch import num_samples
from colossalai.trainer._metric import MetricTable
from colossalai.trainer.hooks import AccuracyHook, BaseHook, LossHook, ThroughputHook
from tests.trainer.fakes import FakeEngine, Probe, make_batches

pytestmark = pytest.mark.unit


def whole(batches: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    data, labels = zip(*batches, strict=True)
    return torch.cat(data), torch.cat(labels)


def evaluate(engine: FakeEngine, *hooks: BaseHook, **options: Any) -> dict[str, float]:
    return Trainer(engine).evaluate(make_batches(), hooks=hooks, **options)


@pytest.mark.parametrize("return_output_label", [True, False])
def test_loss_is_the_mean_over_samples_also_with_a_short_last_batch(return_output_label: bool) -> None:
    engine = FakeEngine()
    data, labels = whole(make_batches())
    wanted = engine.criterion(engine.model(data), labels).item()
    values = evaluate(engine, LossHook(), return_output_label=return_output_label)
    assert values == {"Loss": pytest.approx(wanted, rel=1e-12)}


def test_a_loss_in_half_precision_is_not_rounded_again() -> None:
    """70000 is more than float16 can hold: 70 samples with a loss of 1000."""
    engine, loss = FakeEngine(), torch.tensor(1000.0, dtype=torch.float16)
    engine.execute_schedule = lambda *_, **__: (None, None, loss)
    assert Trainer(engine).evaluate(make_batches((70, 1)), hooks=[LossHook()]) == {"Loss": 1000.0}


def test_accuracy_is_correct_over_all_predictions() -> None:
    engine = FakeEngine()
    data, labels = whole(make_batches())
    wanted = (engine.model(data).argmax(-1) == labels).double().mean().item()
    assert evaluate(engine, AccuracyHook(Accuracy())) == {"Accuracy": pytest.approx(wanted, rel=1e-12)}


def test_accuracy_of_sequences_counts_positions() -> None:
    engine = FakeEngine()
    logits = torch.randn(2, 5, 7)
    labels = logits.argmax(-1)
    labels[0, 0] += 1
    engine.execute_schedule = lambda *_, **__: ({"logits": logits}, labels, torch.tensor(1.0))
    values = evaluate(engine, AccuracyHook(lambda output, label: Accuracy()(output["logits"], label)))
    assert values == {"Accuracy": pytest.approx(0.9)}


def test_accuracy_func_may_count_the_predictions_itself() -> None:
    hook = AccuracyHook(accuracy_func=lambda output, label: (1, 4))
    assert evaluate(FakeEngine(), hook) == {"Accuracy": pytest.approx(0.25)}


def test_accuracy_without_outputs_is_an_error() -> None:
    with pytest.raises(ValueError, match="return_output_label=True"):
        evaluate(FakeEngine(), AccuracyHook(Accuracy()), return_output_label=False)


def test_a_rank_without_the_end_of_the_model_measures_nothing() -> None:
    engine = FakeEngine()
    engine.sees_output = False
    engine.execute_schedule = lambda *_, **__: (None, None, None)
    assert evaluate(engine, LossHook(), AccuracyHook(Accuracy())) == {}


def test_train_metrics_begin_anew_in_every_epoch_and_step() -> None:
    engine, steps, epochs = FakeEngine(), [], []
    losses: list[float] = []
    trainer = Trainer(engine)
    trainer.fit(
        make_batches(),
        epochs=2,
        hooks=[
            LossHook(),
            Probe("after_train_iter", lambda trainer, output, label, loss: losses.append(loss.item())),
            Probe(
                "after_train_iter", lambda trainer, *_: steps.append(trainer.metrics["train"].step_values())
            ),
            Probe("after_train_epoch", lambda trainer: epochs.append(trainer.metrics["train"].epoch_values)),
        ],
    )
    assert [values["Loss"] for values in steps] == pytest.approx(losses, rel=1e-12)
    wanted = [(4 * a + 4 * b + c) / 9 for a, b, c in (losses[:3], losses[3:])]
    assert [values["Loss"] for values in epochs] == pytest.approx(wanted, rel=1e-12)


def test_throughput_counts_samples_and_work_after_the_ignored_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1000))  # every look at the clock is a second later
    monkeypatch.setattr("time.perf_counter", lambda: float(next(clock)))
    trainer = Trainer(FakeEngine())
    trainer.fit(
        make_batches((2, 4, 3, 3)),
        epochs=1,
        hooks=[ThroughputHook(ignored_steps=1, tflop_per_step=6.0)],
        test_dataloader=make_batches((5,)),
    )
    assert trainer.metrics["train"].epoch_values == {"Throughput": pytest.approx(10 / 3), "TFLOPS": 6.0}
    assert trainer.metrics["test"].epoch_values == {"Throughput": 5.0}


def test_throughput_refuses_a_negative_number_of_ignored_steps() -> None:
    with pytest.raises(ValueError, match="ignored_steps=-1"):
        ThroughputHook(ignored_steps=-1)


def test_sums_over_many_steps_keep_small_terms() -> None:
    """In float32 1e8 + 1 is 1e8."""
    table = MetricTable(Mesh({"dp": 1}, rank=0).axis("dp"), torch.device("cpu"))
    table.declare("x")
    table.add("x", torch.tensor(1e8), 1)
    for _ in range(1000):
        table.add("x", torch.tensor(1.0), 1)
    table.end_epoch()
    assert table.epoch_values["x"] == pytest.approx((1e8 + 1000) / 1001, rel=1e-14)


@pytest.mark.parametrize(
    ("batch", "wanted"),
    [
        (torch.zeros(4, 2), 4),
        ((torch.zeros(3, 2), torch.zeros(3)), 3),
        ({"scale": torch.tensor(2.0), "x": [torch.zeros(5)]}, 5),
        (["a", "b"], 1),
    ],
)
def test_samples_of_a_batch(batch: Any, wanted: int) -> None:
    assert num_samples(batch) == wanted
