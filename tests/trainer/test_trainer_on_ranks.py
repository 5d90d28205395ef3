"""The trainer on two data-parallel ranks: the same figures as in one process, and the collectives counted."""

from __future__ import annotations

import copy
import itertools
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import colossalai
from colossalai.checkpoint_io import load_checkpoint
from colossalai.logging import get_dist_logger
from colossalai.nn.lr_scheduler import CosineAnnealingWarmupLR
from colossalai.nn.metric import Accuracy
from colossalai.trainer import MultiTimer, NanLossError, Trainer, hooks
from tests.ranks import run_ranks
from tests.trainer.fakes import Batch, Probe, make_batches
from tests.trainer.test_hooks import scalars

pytestmark = pytest.mark.dist

TRAIN_SIZES, TEST_SIZES = (8, 8, 2), (8, 5)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def part_of(batches: list[Batch], rank: int, world_size: int) -> list[Batch]:
    """Every `world_size`-th sample; a rank's part of an odd batch is a sample shorter."""
    return [(data[rank::world_size], labels[rank::world_size]) for data, labels in batches]


def make_trainer(
    config: dict[str, Any], loader: list[Batch], **options: Any
) -> tuple[Trainer, Any, torch.optim.lr_scheduler.LRScheduler]:
    if not dist.is_initialized():
        colossalai.launch_from_torch(config=config, verbose=False)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    scheduler = CosineAnnealingWarmupLR(optimizer, total_steps=12, warmup_steps=2)
    engine, loader, _, scheduler = colossalai.initialize(
        model, optimizer, nn.CrossEntropyLoss(), loader, None, scheduler, verbose=False
    )
    return Trainer(engine, logger=get_dist_logger(), **options), loader, scheduler


def in_one_process(epochs: int) -> tuple[nn.Module, list[dict[str, float]]]:
    """The same training without the package: the model, and loss and accuracy of each epoch and test."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    scheduler = CosineAnnealingWarmupLR(optimizer, total_steps=12, warmup_steps=2)
    found = []
    for _ in range(epochs):
        outputs = []
        for data, labels in make_batches(TRAIN_SIZES):
            optimizer.zero_grad()
            outputs.append(model(data))
            nn.functional.cross_entropy(outputs[-1], labels).backward()
            optimizer.step()
            scheduler.step()
        found.append(figures(torch.cat(outputs), make_batches(TRAIN_SIZES)))
        tests = make_batches(TEST_SIZES, seed=2)
        found.append(figures(torch.cat([model(data) for data, _ in tests]), tests))
    return model, found


def figures(output: torch.Tensor, batches: list[Batch]) -> dict[str, float]:
    labels = torch.cat([labels for _, labels in batches])
    return {
        "Loss": nn.functional.cross_entropy(output, labels).item(),
        "Accuracy": (output.argmax(-1) == labels).double().mean().item(),
    }


def _fit(folder: Path) -> tuple[list[dict[str, float]], list[torch.Tensor], torch.Tensor, int]:
    rank, world_size = _rank(), 2
    train = part_of(make_batches(TRAIN_SIZES), rank, world_size)
    timer = MultiTimer()
    trainer, train, scheduler = make_trainer({}, train, timer=timer)
    logger = get_dist_logger()
    found: list[dict[str, float]] = []
    calls = _count_all_reduces()
    trainer.fit(
        train,
        epochs=2,
        test_dataloader=part_of(make_batches(TEST_SIZES, seed=2), rank, world_size),
        hooks=[
            hooks.TensorboardHook(log_dir=folder, ranks=[0]),
            hooks.LogMetricByEpochHook(logger),
            hooks.LogMetricByStepHook(),
            hooks.LogMemoryByEpochHook(logger),
            hooks.LogTimingByEpochHook(timer, logger),
            hooks.ThroughputHook(),
            hooks.LRSchedulerHook(scheduler, by_epoch=False),
            hooks.LossHook(),
            hooks.AccuracyHook(accuracy_func=Accuracy()),
            Probe("after_train_epoch", lambda trainer: found.append(trainer.metrics["train"].epoch_values)),
            Probe("after_test_epoch", lambda trainer: found.append(trainer.metrics["test"].epoch_values)),
        ],
        display_progress=True,
    )
    params = [param.detach() for param in trainer.engine.model.unwrap().parameters()]
    return found, params, trainer.predict(torch.ones(1, 3, dtype=torch.float64)), len(calls)


def _rank() -> int:
    return int(os.environ["RANK"])


def _count_all_reduces() -> list[int]:
    """Count the calls of all_reduce from here on (DDP's own are made below Python)."""
    calls: list[int] = []
    all_reduce = dist.all_reduce

    def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append(tensor.numel())
        return all_reduce(tensor, *args, **kwargs)

    dist.all_reduce = counted
    return calls


def test_two_ranks_report_and_learn_what_one_process_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, wanted = in_one_process(epochs=2)
    results = run_ranks(_fit, 2, tmp_path)
    for found, params, prediction, num_all_reduces in results:
        for values, wanted_values in zip(found, wanted, strict=True):
            assert values.keys() == {"Loss", "Accuracy", "Throughput"}
            assert {name: values[name] for name in wanted_values} == pytest.approx(wanted_values, rel=1e-12)
        for param, twin in zip(params, model.parameters(), strict=True):
            torch.testing.assert_close(param, twin, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(prediction, model(torch.ones(1, 3, dtype=torch.float64)))
        # One for each step and each epoch, of training and of test, however many metrics and readers; and
        # one for each epoch that says whether a rank asks for the end.
        assert num_all_reduces == 2 * (3 + 2 + 1 + 1) + 2
    assert results[0][0] == results[1][0], "all ranks know the same metrics"
    read = scalars(tmp_path)
    assert [value for _, value in read["train_epoch/Loss"]] == pytest.approx(
        [wanted[0]["Loss"], wanted[2]["Loss"]]
    )
    assert len(read["train/Loss"]) == 6
    assert len(list(tmp_path.iterdir())) == 1, "one rank writes"
    log = capsys.readouterr().out
    for line in (
        "Epoch 1/2 train 3/3 Throughput ",
        "Epoch 2 test: Throughput ",
        "Memory after epoch 2 test: ",
        "Epoch 1 train: 0.",
    ):
        assert log.count(line) == 1, line


def _fit_quietly() -> int:
    trainer, train, _ = make_trainer({}, part_of(make_batches(TRAIN_SIZES), _rank(), 2))
    calls = _count_all_reduces()
    trainer.fit(train, epochs=2, hooks=[hooks.LossHook(), hooks.LogMetricByEpochHook(get_dist_logger())])
    return len(calls)


def test_without_a_reader_of_steps_there_is_one_reduction_per_epoch() -> None:
    assert run_ranks(_fit_quietly, 2) == [4, 4], "and one that asks whether to stop"


def _throughput() -> dict[str, float]:
    """A look at the clock takes 1 s on rank 0 and 2 s on rank 1."""
    trainer, train, _ = make_trainer({}, part_of(make_batches((6, 6)), _rank(), 2))
    looks = itertools.count(step=_rank() + 1.0)
    with patch("time.perf_counter", lambda: next(looks)):
        trainer.fit(train, epochs=1, hooks=[hooks.ThroughputHook(tflop_per_step=3.0)])
    return trainer.metrics["train"].epoch_values


def test_throughput_is_of_all_ranks_together_and_work_of_one() -> None:
    """12 samples in 2 steps, which took 2 s on one rank and 4 s on the other: 3 s in the mean."""
    assert run_ranks(_throughput, 2) == [{"Throughput": 4.0, "TFLOPS": 2.0}] * 2


def _rates_with_accumulation() -> tuple[list[float], float]:
    batches = make_batches((4,) * 5)
    trainer, train, scheduler = make_trainer({"gradient_accumulation": 2}, part_of(batches, _rank(), 2))
    told: list[float] = []
    trainer.fit(
        train,
        epochs=2,
        hooks=[
            hooks.LRSchedulerHook(scheduler, by_epoch=False),
            hooks.LossHook(),
            Probe("after_train_iter", lambda trainer, *_: told.append(trainer.states["lr"])),
        ],
    )
    return told, trainer.metrics["train"].epoch_values["Loss"]


def test_the_schedule_steps_once_per_update_of_a_window() -> None:
    """Five batches in windows of two: updates after batches 2, 4 and 5 of each epoch."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.5)
    scheduler = CosineAnnealingWarmupLR(optimizer, total_steps=12, warmup_steps=2)
    wanted = []
    for window in (2, 2, 1, 2, 2, 1):
        wanted += [scheduler.get_last_lr()[0]] * window
        optimizer.step()
        scheduler.step()
    (told, loss), (other_told, other_loss) = run_ranks(_rates_with_accumulation, 2)
    assert told == other_told == wanted
    assert loss == other_loss
    assert 0.1 < loss < 2.0, "the loss of a batch is not divided by the length of the window"


def _resume(folder: Path, name: str) -> tuple[list[str], float]:
    """Train two epochs, then the second again from a checkpoint; return the largest difference."""
    batches = part_of(make_batches(TRAIN_SIZES), _rank(), 2)

    def fit(trainer: Trainer, loader: Any, scheduler: Any, *more: hooks.BaseHook, epochs: int) -> None:
        trainer.fit(loader, epochs=epochs, hooks=[*more, hooks.LRSchedulerHook(scheduler, by_epoch=False)])

    trainer, loader, scheduler = make_trainer({}, batches)
    fit(trainer, loader, scheduler, hooks.SaveCheckpointHook(1, folder / name), epochs=1)
    saved = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.pt"))
    fit(trainer, loader, scheduler, epochs=2)
    wanted = copy.deepcopy(trainer.engine.model.unwrap().state_dict())

    trainer, loader, scheduler = make_trainer({}, batches)
    last_epoch = load_checkpoint(folder / saved[0], trainer.engine.model, trainer.engine.optimizer, scheduler)
    assert last_epoch == 0
    trainer.cur_epoch = last_epoch + 1
    fit(trainer, loader, scheduler, epochs=2)
    found = trainer.engine.model.unwrap().state_dict()
    return saved, max((found[key] - wanted[key]).abs().max().item() for key in wanted)


@pytest.mark.parametrize(("name", "saved"), [("xxx.pt", ["xxx.pt"]), ("ckpt", ["ckpt/epoch_1.pt"])])
def test_a_checkpoint_of_the_hook_goes_on_bit_for_bit(tmp_path: Path, name: str, saved: list[str]) -> None:
    assert run_ranks(_resume, 2, tmp_path, name) == [(saved, 0.0)] * 2


def _save(folder: Path) -> list[str]:
    """The documented call with the model itself; steps counted, and a model of its own."""
    trainer, loader, _ = make_trainer({}, part_of(make_batches(TRAIN_SIZES), _rank(), 2))
    trainer.fit(
        loader,
        epochs=4,
        max_steps=8,
        hooks=[
            hooks.SaveCheckpointHook(2, folder / "epochs", trainer.engine.model.unwrap()),
            hooks.SaveCheckpointHook(3, folder / "steps", save_by_iter=True),
        ],
    )
    model = make_model()
    epoch = load_checkpoint(folder / "steps/step_6.pt", model)
    return [str(path.relative_to(folder)) for path in sorted(folder.rglob("*.pt"))] + [str(epoch)]


def test_checkpoints_by_epoch_and_by_step(tmp_path: Path) -> None:
    """Epochs have three steps: at step 6 the second is not yet complete, its hooks are still to come."""
    wanted = ["epochs/epoch_2.pt", "steps/step_3.pt", "steps/step_6.pt", "0"]
    assert run_ranks(_save, 2, tmp_path) == [wanted] * 2


def counted(output: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    total = nn.functional.cross_entropy(output, labels, ignore_index=-100, reduction="sum")
    return total, (labels != -100).sum()


def unlabelled(batches: list[Batch]) -> list[Batch]:
    """Leave few labels on the first rank, and none in its last part."""
    batches = copy.deepcopy(batches)
    batches[0][1][2::2] = batches[-1][1][0::2] = -100
    return batches


def of_all_labels(nan_loss: str) -> None:
    colossalai.launch_from_torch({}, verbose=False)
    model, plain = make_model(), make_model()
    engine, *_ = colossalai.initialize(
        model, torch.optim.SGD(model.parameters(), lr=0.5), counted, verbose=False
    )
    trainer = Trainer(engine, nan_loss=nan_loss)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    steps: list[float] = []
    per_step = Probe(
        "after_train_iter", lambda *_: steps.append(trainer.metrics["train"].step_values()["Loss"])
    )
    test_batches = unlabelled(make_batches(TEST_SIZES, seed=2))
    batches = unlabelled(make_batches(TRAIN_SIZES))
    trainer.fit(
        part_of(batches, rank, world_size),
        epochs=1,
        test_dataloader=part_of(test_batches, rank, world_size),
        hooks=[hooks.LossHook(), per_step],
    )
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    sums = torch.zeros(2, dtype=torch.float64)
    for (x, y), step in zip(batches, steps, strict=True):
        optimizer.zero_grad()
        total, count = counted(plain(x), y)
        (total / count).backward()
        optimizer.step()
        assert step == pytest.approx(total.item() / count.item(), abs=1e-12)
        sums += torch.stack([total.detach(), count])
    assert trainer.metrics["train"].epoch_values["Loss"] == pytest.approx(
        (sums[0] / sums[1]).item(), abs=1e-12
    )
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param, expected, rtol=1e-10, atol=1e-10)
    total, count = (
        sum(column) for column in zip(*(counted(plain(x), y) for x, y in test_batches), strict=True)
    )
    expected_loss = (total / count).item()
    assert trainer.metrics["test"].epoch_values["Loss"] == pytest.approx(expected_loss, abs=1e-12)
    if nan_loss == "stop":
        x, y = part_of(make_batches((8,)), rank, world_size)[0]
        x[0, 0] = float("nan") if rank == 1 else x[0, 0]
        with pytest.raises(NanLossError, match="NaN or infinite at step 4 on rank 1"):
            trainer.fit([(x, y)] * 2, epochs=2)
        assert trainer.cur_step == 4


def test_the_loss_is_that_of_all_labels_and_all_ranks_stop_at_nan() -> None:
    run_ranks(of_all_labels, 2, "stop")
