"""The engine and the trainer over a pipeline: what each rank sees, evaluation, precision, mistakes."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import colossalai
import colossalai.nn as col_nn
from colossalai.amp import AMP_TYPE
from colossalai.booster import Booster
from colossalai.booster.plugin import HybridParallelPlugin, TorchDDPPlugin
from colossalai.core import global_context as gpc
from colossalai.engine import Engine
from colossalai.engine.schedule import PipelineSchedule, get_tensor_shape
from colossalai.nn.metric import Accuracy
from colossalai.pipeline import make_schedule, write_schedule
from colossalai.trainer import Trainer, hooks
from tests.parity.table import stages
from tests.parity.tasks import NET
from tests.parity.training import Run, check_runs
from tests.ranks import RanksError, run_ranks
from tests.tiers import further
from tests.turns import run_each

pytestmark = pytest.mark.dist

PARALLEL = {"pipeline": {"size": 2, "partition": "uniform"}}


class Net(nn.Module):
    """A classifier with a stack of blocks.

    Args:
        dropout: Rate of a dropout that evaluation leaves out.
        num_classes: Number of classes.
        is_transposed: Whether samples are columns, in and out.
    """

    def __init__(self, dropout: float = 0.0, num_classes: int = 3, is_transposed: bool = False) -> None:
        super().__init__()
        self.is_transposed = is_transposed
        self.stem = nn.Linear(4, 6)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(dropout)) for _ in range(4)
        )
        self.head = nn.Linear(6, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x.t() if self.is_transposed else x)
        for block in self.blocks:
            x = block(x)
        x = self.head(x)
        return x.t() if self.is_transposed else x


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(8, 4, generator=generator), torch.randint(3, (8,), generator=generator)


def build(model: nn.Module | None = None, **config: Any) -> Engine:
    base = {"parallel": PARALLEL, "NUM_MICRO_BATCHES": 4}
    colossalai.launch_from_torch(base | config, verbose=False)
    model = Net() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = colossalai.initialize(model, optimizer, nn.CrossEntropyLoss(), verbose=False)
    return engine


def reference(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(1024)
    return Net(dropout)


def views() -> None:
    torch.manual_seed(1024)
    engine = build(Net(dropout=0.5))
    is_last = gpc.is_pipeline_last_stage()
    x, y = data()
    plain = reference().eval()
    engine.eval()
    output, label, loss = engine.execute_schedule(iter([(x, y)]), forward_only=True)
    assert (output is not None) == (label is not None) == is_last == engine.sees_output
    if is_last:
        torch.testing.assert_close(output, plain(x))
    torch.testing.assert_close(loss, nn.functional.cross_entropy(plain(x), y).double())  # on every rank
    assert all(param.grad is None for param in engine.model.parameters())
    nothing = engine.execute_schedule(
        iter([(x, y)]), forward_only=True, return_loss=False, return_output_label=False
    )
    assert nothing == (None, None, None)
    engine.train()
    engine.execute_schedule(iter([(x, y)]), return_loss=False)  # the backward needs no loss to be returned
    assert all(param.grad is not None for param in engine.model.parameters())
    engine.step()
    with pytest.raises(StopIteration):
        engine.execute_schedule(iter([]))
    gpc.destroy()


def test_what_each_rank_sees() -> None:
    run_ranks(views, 2)


def mistakes() -> None:
    engine = build()
    x, y = data()
    with pytest.raises(
        ValueError, match=r"a stage of a pipeline, which cannot be called: use engine.execute"
    ):
        engine(x)
    few = engine.execute_schedule(iter([(x[:3], y[:3])]), forward_only=True)[2]  # fewer than microbatches
    assert few is not None
    gpc.destroy()
    colossalai.launch_from_torch({"parallel": {"pipeline": 2}, "NUM_MICRO_BATCHES": 2}, verbose=False)
    with pytest.raises(ValueError, match=r"has 1 stages on this rank.* has 3: pass one module"):
        colossalai.initialize(nn.ModuleList(nn.Linear(2, 2) for _ in range(3)), verbose=False)
    gpc.destroy()
    colossalai.launch_from_torch({}, verbose=False)
    engine, *_ = colossalai.initialize(Net(), None, nn.CrossEntropyLoss(), verbose=False)
    with pytest.raises(ValueError, match="a pipeline schedule needs a pipeline"):
        PipelineSchedule(2).forward_back_step(engine, iter([(x, y)]), forward_only=True)
    gpc.destroy()


def test_mistakes_are_told() -> None:
    run_ranks(mistakes, 2)


def loss_of_samples() -> None:
    colossalai.launch_from_torch({"parallel": PARALLEL, "NUM_MICRO_BATCHES": 4}, verbose=False)
    model, criterion = Net(), nn.CrossEntropyLoss(reduction="none")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = colossalai.initialize(model, optimizer, criterion, verbose=False)
    engine.execute_schedule(iter([data()]))


def test_a_criterion_gives_one_value() -> None:
    with pytest.raises(RanksError, match=r"the criterion returned a loss of shape \(2,\); it must be a"):
        run_ranks(loss_of_samples, 2)


def fit(pipelined: bool) -> dict[str, float]:
    torch.manual_seed(1024)
    model = Net()
    colossalai.launch_from_torch(
        {"parallel": PARALLEL, "NUM_MICRO_BATCHES": 4} if pipelined else {}, verbose=False
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = colossalai.initialize(model, optimizer, nn.CrossEntropyLoss(), verbose=False)
    trainer = Trainer(engine)
    x, y = data()
    trainer.fit(
        [(x, y)] * 3,
        epochs=2,
        test_dataloader=[(x, y), (x[:5], y[:5])],
        hooks=[hooks.LossHook(), hooks.AccuracyHook(Accuracy())],
    )
    assert (trainer.predict(x) is None) == (not engine.sees_output)
    gpc.destroy()
    return trainer.metrics["test"].epoch_values


@pytest.mark.parametrize("num_ranks", [2, further(4)])
def test_the_trainer_shows_the_same_on_every_rank_as_alone(num_ranks: int) -> None:
    alone = run_ranks(fit, 1, False)[0]
    for values in run_ranks(fit, num_ranks, True):
        assert values == pytest.approx(alone, rel=1e-5)


def in_precision(precision: dict[str, Any], schedule: str) -> list[float]:
    parallel = {"pipeline": {**PARALLEL["pipeline"], "schedule": schedule}}
    torch.manual_seed(1024)
    engine = build(Net(), fp16=precision, parallel=parallel, clip_grad_norm=1.0)
    x, y = data()
    losses = []
    for _ in range(6):
        engine.zero_grad()
        output, _, loss = engine.execute_schedule(iter([(x, y)]))
        assert output is None or output.dtype == torch.float32
        engine.step()
        losses.append(loss.item())
    gpc.destroy()
    return losses


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
@pytest.mark.parametrize("mode", [further(AMP_TYPE.BF16), AMP_TYPE.TORCH, AMP_TYPE.NAIVE])
def test_precisions_stay_near_float32(mode: AMP_TYPE, schedule: str) -> None:
    options: dict[str, Any] = {"mode": mode}
    options |= {"init_scale": 256.0} if mode is AMP_TYPE.TORCH else {}
    options |= {"initial_scale": 256.0} if mode is AMP_TYPE.NAIVE else {}
    (exact, _), losses = run_each(2, in_precision, [(None, schedule), (options, schedule)])
    assert losses[0] == losses[1]
    assert losses[0] != exact
    # bfloat16 has 8 bits, float16 11, over seven layers and six steps.
    assert losses[0] == pytest.approx(exact, abs=0.03 if mode is AMP_TYPE.BF16 else 0.004)


def overflow() -> tuple[bool, bool, float]:
    torch.manual_seed(1024)
    engine = build(Net(), fp16={"mode": AMP_TYPE.TORCH, "init_scale": 256.0})
    x, y = data()
    for has_inf in (True, False):
        engine.zero_grad()
        engine.execute_schedule(iter([(x, y)]))
        if has_inf and gpc.is_pipeline_first_stage():  # one stage alone
            next(engine.model.parameters()).grad[0, 0] = float("inf")
        if has_inf:
            first = engine.step()
    second = engine.step()
    scale = engine.optimizer.scaler.scale
    gpc.destroy()
    return first, second, scale


def test_all_stages_skip_together() -> None:
    assert run_ranks(overflow, 2) == [(False, True, 128.0)] * 2


def from_file(path: str) -> float:
    parallel = {"pipeline": {"size": 2, "partition": "uniform", "schedule": path}}
    torch.manual_seed(1024)
    engine = build(Net(), parallel=parallel)
    loss = engine.execute_schedule(iter([data()]))[2].item()
    gpc.destroy()
    return loss


def test_a_schedule_from_a_file(tmp_path: Any) -> None:
    path = tmp_path / "mine.csv"
    write_schedule(make_schedule("gpipe", 2, 4), path)
    x, y = data()
    expected = nn.functional.cross_entropy(reference()(x), y).item()
    assert run_ranks(from_file, 2, str(path)) == pytest.approx([expected] * 2, rel=1e-6)
    path.write_text(path.read_text().replace("0B3", "0B2"))
    with pytest.raises(RanksError, match="0B2"):
        run_ranks(from_file, 2, str(path))


def with_shape(shape: tuple[int, ...]) -> None:
    torch.manual_seed(1024)
    engine = build(Net(), TENSOR_SHAPE=shape)
    assert get_tensor_shape() == shape
    x, y = data()
    engine.execute_schedule(iter([(x, y)]))
    gpc.destroy()


def test_a_tensor_shape_saves_the_exchange() -> None:
    run_ranks(with_shape, 2, (2, 6))
    with pytest.raises(RanksError, match=r"\(2, 7\)"):  # what is said and what is returned are both named
        run_ranks(with_shape, 2, (2, 7))


def plugin_mistakes() -> None:
    colossalai.launch_from_torch({}, verbose=False)
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("pass num_microbatches", {"pp_size": 2}),
        ("needs a pipeline: pass pp_size", {"num_microbatches": 2}),
        ("pipeline and ZeRO 2 cannot be combined", {"pp_size": 2, "num_microbatches": 2, "zero_stage": 2}),
        ("zero_stage is 4", {"zero_stage": 4}),
        ("pipeline and ZeRO 3 cannot be combined", {"pp_size": 2, "num_microbatches": 2, "zero_stage": 3}),
        ("max_norm is -1", {"max_norm": -1}),
        ("no schedule 'x'", {"pp_size": 2, "num_microbatches": 2, "schedule": "x"}),
        ("tp_size is 1, which must be at least 2", {"sequence_parallel": True}),
        ("2 processes, but data 1 x pipeline 3", {"pp_size": 3, "num_microbatches": 2}),
        ("must be one of", {"precision": "fp8"}),
    ]
    for message, options in wrong:
        with pytest.raises(ValueError, match=message):
            HybridParallelPlugin(**options).configure()
    with pytest.raises(TypeError):
        HybridParallelPlugin(2)  # keywords only
    plugin = HybridParallelPlugin(pp_size=2, num_microbatches=2, precision="bf16")
    with pytest.raises(ValueError, match="precision is given twice"):
        Booster(plugin=plugin, mixed_precision="fp16")
    plugin.configure()
    with pytest.raises(ValueError, match="which TorchDDPPlugin does not run"):
        Booster(plugin=TorchDDPPlugin())
    with pytest.raises(ValueError, match=r"launched with parallel=.* the plugin has"):
        Booster(plugin=HybridParallelPlugin(tp_size=2))
    booster = Booster(plugin=plugin)
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="has not been boosted"):
        booster.execute_pipeline(iter([]), model)
    gpc.destroy()


def test_the_plugin_tells_mistakes() -> None:
    run_ranks(plugin_mistakes, 2)


def boosted_outputs() -> None:
    colossalai.launch_from_torch({}, verbose=False)
    booster = Booster(plugin=HybridParallelPlugin(pp_size=2, num_microbatches=4, max_norm=1e-3))
    torch.manual_seed(1024)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer, *_ = booster.boost(model, optimizer)
    x, y = data()
    batch = {"x": x}

    def criterion(output: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        assert inputs["x"].shape == (2, 4)
        return output.square().mean()

    before = [param.detach().clone() for param in model.parameters()]
    result = booster.execute_pipeline(iter([batch]), model, criterion, optimizer, return_outputs=True)
    plain = reference()
    torch.testing.assert_close(result["loss"], plain(x).square().mean().double())
    if gpc.is_pipeline_last_stage():
        torch.testing.assert_close(result["outputs"], plain(x))
    else:
        assert result["outputs"] is None
    optimizer.step()  # clips to the bound over both stages
    moved = sum((param - old).square().sum() for param, old in zip(model.parameters(), before, strict=True))
    torch.distributed.all_reduce(moved)
    assert moved.sqrt().item() == pytest.approx(1e-3, rel=1e-3)
    only = booster.execute_pipeline(iter([(x, y)]), model, nn.CrossEntropyLoss())
    assert only["loss"].item() > 0
    gpc.destroy()


def test_booster_runs_a_dict_and_clips_over_all_stages() -> None:
    run_ranks(boosted_outputs, 2)


@dataclass
class Answer:
    """What a model may return: a row for each sample, and means over them."""

    logits: Tensor
    norm: float
    penalty: Tensor


class Answering(Net):
    """Returns a dataclass with numbers in it."""

    def forward(self, x: Tensor) -> Any:
        logits = super().forward(x)
        return Answer(logits, logits.detach().square().mean().item(), logits.detach().mean().reshape(1))


def outputs_of_a_dataclass() -> None:
    x, _ = data()  # 8 samples: microbatches of 3, 3 and 2
    colossalai.launch_from_torch({"parallel": PARALLEL, "NUM_MICRO_BATCHES": 3}, verbose=False)
    torch.manual_seed(1024)
    logits = Net()(x).detach()
    torch.manual_seed(1024)
    engine, *_ = colossalai.initialize(Answering(), None, lambda answer: answer.logits.mean(), verbose=False)
    output, _, _ = engine.execute_schedule(iter([(x, None)]), forward_only=True)
    if engine.sees_output:
        torch.testing.assert_close(output.logits, logits)
        assert output.norm == pytest.approx(logits.square().mean().item())
        torch.testing.assert_close(output.penalty, logits.mean().reshape(1))
    gpc.destroy()


def test_dataclasses_and_numbers() -> None:
    run_ranks(outputs_of_a_dataclass, 2)


SUMS = [
    Run(task=replace(NET, criterion=criterion), num_ranks=2, config=stages(2, num_microbatches=3))
    for criterion in (
        partial(nn.CrossEntropyLoss, reduction="sum"),
        partial(col_nn.CrossEntropyLoss, reduction="sum"),
        partial(partial, nn.functional.cross_entropy, reduction="sum"),
    )
]


def test_criteria_that_sum() -> None:
    """16 samples: microbatches of 6, 6 and 4."""
    check_runs(2, [(run,) for run in SUMS])
