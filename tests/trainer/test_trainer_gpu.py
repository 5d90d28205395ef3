"""The trainer and its hooks with an accelerator: timers wait for it, and its memory is logged."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from colossalai.nn.metric import Accuracy
from colossalai.trainer import MultiTimer, Trainer, hooks
from tests.trainer.fakes import FakeEngine, Lines, make_batches

pytestmark = pytest.mark.gpu


def test_all_hooks_with_an_accelerator(tmp_path: Path) -> None:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    engine, twin, lines, timer = FakeEngine(), FakeEngine(), Lines(), MultiTimer()
    engine.device = device
    engine.model.to(device)
    batches = make_batches()
    trainer, twin_trainer = Trainer(engine, timer=timer), Trainer(twin)
    trainer.fit(
        [(data.to(device), labels.to(device)) for data, labels in batches],
        epochs=2,
        hooks=[
            hooks.LossHook(),
            hooks.AccuracyHook(Accuracy()),
            hooks.ThroughputHook(),
            hooks.LogMetricByStepHook(),
            hooks.TensorboardHook(tmp_path),
            hooks.LogMemoryByEpochHook(lines, report_cpu=True),
            hooks.LogTimingByEpochHook(timer, lines),
        ],
    )
    twin_trainer.fit(batches, epochs=2, hooks=[hooks.LossHook(), hooks.AccuracyHook(Accuracy())])
    values = trainer.metrics["train"].epoch_values
    wanted = twin_trainer.metrics["train"].epoch_values
    assert {name: values[name] for name in wanted} == pytest.approx(wanted, rel=1e-10)
    memory = next(line for line in lines.lines if line.startswith("Memory after epoch 2"))
    peak = float(memory.split("peak ")[1].split(" MiB")[0])
    allocated = float(memory.split("accelerator ")[1].split(" MiB")[0])
    assert peak >= allocated >= 0
    assert "process " in memory
