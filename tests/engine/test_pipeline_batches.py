"""Batches of a pipeline: inputs about the whole batch, samples along other dimensions, criteria that sum."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import HybridParallelPlugin
from colossalai.context import Config, ConfigException
from colossalai.core import global_context as gpc
from colossalai.engine.schedule import InterleavedPipelineSchedule, PipelineSchedule
from colossalai.logging import get_dist_logger
from colossalai.pipeline import PipelineOptions
from colossalai.runtime import Plan
from colossalai.trainer import Trainer, hooks
from tests.engine.test_pipeline_engine import Net
from tests.ranks import RanksError, run_ranks

pytestmark = pytest.mark.dist

NUM = 8  # samples, and classes
CLASS_WEIGHTS = torch.linspace(0.5, 2.0, NUM)
WHOLE = {"class_weights": None}
OPTIONS: dict[str, Any] = {"batch_dim": WHOLE, "loss_reduction": "sum"}


def net(is_transposed: bool = False) -> nn.Module:
    torch.manual_seed(1024)
    return Net(num_classes=NUM, is_transposed=is_transposed)


def batch(step: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(NUM, 4, generator=generator)
    return x, {
        "y": torch.randint(NUM, (NUM,), generator=generator),
        "class_weights": CLASS_WEIGHTS,
    }


def weighted_sum(output: Tensor, label: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(output, label["y"], weight=label["class_weights"], reduction="sum")


def sum_of_columns(output: Tensor, label: dict[str, Tensor]) -> Tensor:
    return weighted_sum(output.t(), label)


def mean_of_columns(output: Tensor, label: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(output.t(), label["y"])


def columns_of(num_samples: int) -> tuple[Tensor, dict[str, Tensor]]:
    x, label = batch()
    return x[:num_samples].t().contiguous(), {**label, "y": label["y"][:num_samples]}


def check(
    model: Any, output: Tensor | None, loss: Tensor, plain: nn.Module, twin: Tensor, alone: Tensor
) -> None:
    alone.backward()
    torch.testing.assert_close(loss, alone.detach().double())
    if gpc.is_pipeline_last_stage():
        torch.testing.assert_close(output, twin.detach())
    for name, param in model.named_parameters():
        torch.testing.assert_close(param.grad, plain.get_parameter(name).grad)


def by_engine(parallel: dict[str, Any], is_transposed: bool = False) -> None:
    parallel = {"pipeline": {"size": 2, "partition": "uniform", **parallel}}
    colossalai.launch_from_torch({"parallel": parallel, "NUM_MICRO_BATCHES": 3}, verbose=False)
    model, plain = net(is_transposed), net(is_transposed)
    criterion = sum_of_columns if is_transposed else weighted_sum
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = colossalai.initialize(model, optimizer, criterion, verbose=False)
    x, label = batch()
    x = x.t().contiguous() if is_transposed else x
    output, _, loss = engine.execute_schedule(iter([(x, label)]))
    twin = plain(x)
    assert loss is not None
    check(engine.model.unwrap(), output, loss, plain, twin, criterion(twin, label))
    gpc.destroy()


def by_booster() -> None:
    colossalai.launch_from_torch({}, verbose=False)
    plugin = HybridParallelPlugin(pp_size=2, num_microbatches=3, batch_dim=WHOLE, loss_reduction="sum")
    booster = Booster(plugin=plugin)
    model, plain = net(), net()
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x, label = batch()
    result = booster.execute_pipeline(iter([(x, label)]), model, weighted_sum, optimizer, return_outputs=True)
    twin = plain(x)
    check(model.unwrap(), result["outputs"], result["loss"], plain, twin, weighted_sum(twin, label))
    with pytest.raises(
        ValueError, match=r"'class_weights', which is not in the batch: there are 'data', 'lab"
    ):
        booster.execute_pipeline(iter([(x, label["y"])]), model, nn.CrossEntropyLoss())
    gpc.destroy()


def all_ways() -> None:
    by_booster()
    by_engine(OPTIONS)
    by_engine({**OPTIONS, "batch_dim": {"data": 1, "output": 1, **WHOLE}}, is_transposed=True)


def test_losses_gradients_and_outputs_are_those_of_one_process() -> None:
    run_ranks(all_ways, 2)


def evaluated() -> dict[str, float]:
    columns = {"data": 1, "output": 1, **WHOLE}
    parallel = {"pipeline": {"size": 2, "partition": "uniform", "batch_dim": columns}}
    colossalai.launch_from_torch({"parallel": parallel, "NUM_MICRO_BATCHES": 2}, verbose=False)
    engine, *_ = colossalai.initialize(net(True), None, mean_of_columns, verbose=False)
    trainer = Trainer(engine)
    trainer.evaluate([columns_of(NUM), columns_of(3)], hooks=[hooks.LossHook()])
    gpc.destroy()
    return trainer.metrics["test"].epoch_values


def test_the_trainer_counts_samples_along_their_dimension() -> None:
    losses = [mean_of_columns(net(True)(x), label).item() for x, label in map(columns_of, (NUM, 3))]
    expected = (losses[0] * NUM + losses[1] * 3) / (NUM + 3)
    for values in run_ranks(evaluated, 2):
        assert values["Loss"] == pytest.approx(expected, rel=1e-5)


def warnings() -> list[str]:
    colossalai.launch_from_torch({}, verbose=False)
    booster = Booster(plugin=HybridParallelPlugin(pp_size=2, num_microbatches=2))
    model, *_ = booster.boost(net())

    def summed(output: Tensor, label: dict[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(output, label["y"], reduction="sum")

    def pair(output: Tensor, label: dict[str, Tensor]) -> tuple[Tensor, int]:
        return summed(output, label), len(output)

    with patch.object(get_dist_logger(), "log_once") as log:
        for step in range(6):  # of which each batch is run three times
            for criterion in (summed, pair, lambda output, label: summed(output, label) / len(output)):
                booster.execute_pipeline(iter([batch(step)]), model, criterion)
    gpc.destroy()
    return [call.args[0] for call in log.call_args_list]


def test_a_table_and_a_sum_that_nothing_names_are_warned_of_once() -> None:
    for found, rank in zip(run_ranks(warnings, 2), range(2), strict=True):
        tables = [text for text in found if "label['class_weights'], of shape (8,), has had the same" in text]
        sums = [text for text in found if "summed returns sums over samples" in text]
        assert (len(tables), len(sums), len(found)) == (1, rank, 1 + rank)  # rank 1 has the last stage


def pair_as_sum() -> None:
    colossalai.launch_from_torch({}, verbose=False)
    plugin = HybridParallelPlugin(pp_size=2, num_microbatches=2, batch_dim=WHOLE, loss_reduction="sum")
    model, *_ = (booster := Booster(plugin=plugin)).boost(net())
    booster.execute_pipeline(iter([batch()]), model, lambda output, label: (weighted_sum(output, label), 4))


def columns_without_output() -> None:
    parallel = {"pipeline": {"size": 2, "partition": "uniform", "batch_dim": {"data": 1, **WHOLE}}}
    colossalai.launch_from_torch({"parallel": parallel, "NUM_MICRO_BATCHES": 2}, verbose=False)
    engine, *_ = colossalai.initialize(net(True), None, sum_of_columns, verbose=False)
    x, label = batch()
    engine.execute_schedule(iter([(x.t(), label)]), forward_only=True)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (pair_as_sum, r"loss_reduction is 'sum', and the criterion returned a pair \(sum, count\)"),
        (columns_without_output, "name the dimension of their samples, too, with an entry 'output'"),
    ],
)
def test_contradictions_are_refused(run: Callable[[], None], message: str) -> None:
    with pytest.raises(RanksError, match=message):
        run_ranks(run, 2)


def test_schedules_take_the_options() -> None:
    given = [
        PipelineSchedule(3, **OPTIONS),
        InterleavedPipelineSchedule(3, 2, **OPTIONS),
        PipelineSchedule.from_options(PipelineOptions(num_microbatches=3, **OPTIONS)),
    ]
    assert all((each.options.batch_dim, each.options.loss_reduction) == (WHOLE, "sum") for each in given)
    config = Config(parallel={"pipeline": {"size": 2, "batch_dim": 1}}, NUM_MICRO_BATCHES=3)
    with pytest.raises(ConfigException, match=r"parallel.pipeline.batch_dim .* schedule .* pass it there"):
        Plan.from_config(config, pipeline=given[0].options)


def test_options_need_a_pipeline() -> None:
    with pytest.raises(ValueError, match="batch_dim, loss_reduction needs a pipeline: pass pp_size, too"):
        HybridParallelPlugin(batch_dim=1, loss_reduction="sum")
    with pytest.raises(ValueError, match="loss_reduction is 'total'"):
        HybridParallelPlugin(pp_size=2, num_microbatches=2, loss_reduction="total")
