"""The config door: accumulation windows, gradient handlers, schedules."""

import copy
from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import colossalai
from colossalai.amp import AMP_TYPE
from colossalai.core import global_context as gpc
from colossalai.engine import BaseGradientHandler, Engine
from colossalai.engine.schedule import NonPipelineSchedule
from colossalai.logging import get_dist_logger
from colossalai.registry import GRADIENT_HANDLER
from colossalai.testing import assert_close, full_parameters
from colossalai.utils import get_dataloader
from tests.ranks import run_ranks
from tests.turns import run_each


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def make_data(size=20):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(size, 3, generator=generator, dtype=torch.float64)
    return TensorDataset(x, (x[:, 0] > 0).long())


def reference(batch_sizes, num_epochs, max_norm=None):
    """One process, one update for each of the given slices of the data."""
    model, (x, y) = make_model(), make_data().tensors
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(num_epochs):
        for part in torch.arange(len(x)).split(batch_sizes):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[part]), y[part]).backward()
            if max_norm:
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
    return full_parameters(model)


def accumulate(loader_kind, world_batch, num_epochs, config):
    colossalai.launch_from_torch(config=config, verbose=False)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batch_size = world_batch // gpc.data_parallel_size
    if loader_kind == "ours":
        loader = get_dataloader(make_data(), batch_size=batch_size)
    else:
        loader = DataLoader(make_data(), batch_size=batch_size)
        if loader_kind == "generator":
            loader = Unsized(loader)
    engine, loader, *_ = colossalai.initialize(model, optimizer, nn.CrossEntropyLoss(), loader, verbose=False)
    updates = []
    for _ in range(num_epochs):
        for x, y in loader:
            engine.zero_grad()
            engine.backward(engine.criterion(engine(x), y))
            updates.append(engine.step())
    return full_parameters(engine.model), updates


class Unsized:
    """A loader without a length."""

    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        return iter(self.loader)


@pytest.mark.dist
def test_the_last_short_window_is_not_lost():
    # 5 microbatches of 4 in windows of 2: updates over 8, 8 and 4 samples
    config = {"gradient_accumulation": 2}
    expected = reference([8, 8, 4], 2)
    cases = [(loader_kind, 4, 2, config) for loader_kind in ("ours", "torch", "generator")]
    for ((params, updates),) in run_each(1, accumulate, cases):
        assert updates == [False, True, False, True, True] * 2
        for name, value in params.items():
            assert_close(value, expected[name], rtol=1e-10, atol=1e-10)


@pytest.mark.dist
def test_windows_over_two_ranks():
    extras = [
        {},
        {"clip_grad_norm": 0.2},
        {"zero": {"stage": 3}, "clip_grad_norm": 0.2},
        {"gradient_handler": [{"type": "DataParallelGradientHandler"}]},
    ]
    cases = [("ours", 4, 2, {"gradient_accumulation": 2, **extra}) for extra in extras]
    for extra, found in zip(extras, run_each(2, accumulate, cases), strict=True):
        expected = reference([8, 8, 4], 2, extra.get("clip_grad_norm"))
        for params, updates in found:
            assert updates == [False, True, False, True, True] * 2
            for name, value in params.items():
                assert_close(value, expected[name], rtol=1e-10, atol=1e-10)


def own_handler():
    @GRADIENT_HANDLER.register_module
    class Halving(BaseGradientHandler):
        def handle_gradient(self):
            for param in self._model.parameters():
                param.grad.mul_(0.5)

    config = {"gradient_handlers": [{"type": "Halving"}, {"type": "DataParallelGradientHandler"}]}
    colossalai.launch_from_torch(config=config, verbose=False)
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, gpc.get_global_rank())  # made equal when the engine is built
    engine, *_ = colossalai.initialize(model, torch.optim.SGD(model.parameters(), lr=1.0), verbose=False)
    start = model.weight.item()
    engine.backward(engine(torch.full((1, 1), float(gpc.get_global_rank() + 1))).sum())
    local = model.weight.grad.item()
    engine.step()
    wrapped_in_ddp = any(
        type(module).__name__ == "DistributedDataParallel" for module in engine.model.modules()
    )
    return start, local, model.weight.item(), wrapped_in_ddp


@pytest.mark.dist
def test_gradient_handlers_take_the_place_of_ddp():
    # gradients 1 and 2: halved, then averaged to 0.75
    assert run_ranks(own_handler, 2) == [(0.0, 1.0, -0.75, False), (0.0, 2.0, -0.75, False)]


def schedules():
    colossalai.launch_from_torch(config={}, verbose=False)
    model = make_model()
    engine, *_ = colossalai.initialize(
        model, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss(), verbose=False
    )
    assert isinstance(engine, Engine)
    x, y = make_data().tensors
    data = iter([(x, y), (x, y), [x, y], {"input": x}])
    engine.train()
    engine.zero_grad()
    output, label, loss = engine.execute_schedule(data)
    assert output.shape == (20, 2)
    assert torch.equal(label, y)
    assert not loss.requires_grad
    assert engine.step()
    output, label, lower = engine.execute_schedule(data, return_output_label=False)
    assert output is None
    assert label is None
    assert lower < loss
    engine.eval()
    engine.zero_grad()
    output, _, loss = engine.execute_schedule(data, forward_only=True)
    assert not output.requires_grad
    assert model[0].weight.grad is None
    output, label, loss = engine.execute_schedule(data, forward_only=True, return_loss=False)
    assert (output.shape, label, loss) == ((20, 2), None, None)
    with pytest.raises(StopIteration):
        engine.execute_schedule(data)
    with pytest.raises(ValueError, match="return_loss=False"):
        engine.execute_schedule(iter([(x, y)]), return_loss=False)


@pytest.mark.dist
def test_execute_schedule():
    run_ranks(schedules, 1)


def data_process_func():
    colossalai.launch_from_torch(config={}, verbose=False)
    model = make_model()
    engine, *_ = colossalai.initialize(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        nn.CrossEntropyLoss(),
        verbose=False,
        schedule=NonPipelineSchedule(lambda batch: (batch["pixels"], batch["digit"])),
    )
    x, y = make_data().tensors
    _, label, _ = engine.execute_schedule(iter([{"pixels": x, "digit": y}]))
    return torch.equal(label, y)


@pytest.mark.dist
def test_data_process_func():
    assert run_ranks(data_process_func, 1) == [True]


def errors():
    colossalai.launch_from_torch(
        config={"gradient_handler": [{"type": "DataParalelGradientHandler"}]}, verbose=False
    )
    model = make_model()
    with pytest.raises(ValueError, match="DataParallelGradientHandler"):
        colossalai.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), verbose=False)
    engine, *_ = colossalai.initialize(make_model(), verbose=False)
    with pytest.raises(ValueError, match="there is no optimizer"):
        engine.step()
    with pytest.raises(ValueError, match="there is no criterion"):
        _ = engine.criterion
    gpc.destroy()
    colossalai.launch_from_torch(config={"parallel": {"pipeline": 2}}, verbose=False)
    with pytest.raises(ValueError, match="add NUM_MICRO_BATCHES to the config"):
        colossalai.initialize(make_model(), verbose=False)


@pytest.mark.dist
def test_errors_say_what_is_missing():
    run_ranks(errors, 2)


@pytest.mark.unit
def test_initialize_before_launch():
    with pytest.raises(RuntimeError, match="nothing has been launched"):
        colossalai.initialize(nn.Linear(1, 1))


def count_reductions(accumulation):
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    colossalai.launch_from_torch(config={"gradient_accumulation": accumulation}, verbose=False)
    model = make_model()
    engine, *_ = colossalai.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), verbose=False)
    calls = []

    def hook(group, bucket):
        calls.append(bucket.index())
        return allreduce_hook(group, bucket)

    engine.model.module.register_comm_hook(None, hook)
    counts = []
    for _ in range(2 * accumulation):
        engine.zero_grad()
        engine.backward(engine(torch.randn(2, 3, dtype=torch.float64)).sum())
        engine.step()
        counts.append(len(calls))
    return counts


@pytest.mark.dist
def test_only_the_last_microbatch_of_a_window_communicates():
    assert run_ranks(count_reductions, 2, 3) == [[0, 0, 1, 1, 1, 2]] * 2


def close_window_otherwise(config):
    """The last microbatch of a window goes by the model that was given, or in evaluation mode."""
    for way in ("call of the model that was given", "evaluation mode"):
        colossalai.launch_from_torch({"gradient_accumulation": 2, **config}, verbose=False)
        torch.manual_seed(0)
        model = make_model()
        twin = copy.deepcopy(model)
        engine, *_ = colossalai.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), verbose=False)
        plain = torch.optim.SGD(twin.parameters(), lr=0.1)
        rank, size = gpc.mesh.axis("dp").rank, gpc.mesh.axis("dp").size
        for step in range(2):
            plain.zero_grad()
            for number in range(2):
                x = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
                engine.model.train(number == 0 or way != "evaluation mode")
                is_given = number == 1 and way != "evaluation mode"
                run = engine.model.unwrap() if is_given else engine
                engine.zero_grad()
                engine.backward(run(x.chunk(size)[rank]).square().mean())
                engine.step()
                (twin(x).square().mean() / 2).backward()
            plain.step()
        torch.testing.assert_close(engine.model.state_dict(), twin.state_dict(), msg=f"{config} {way}")
        gpc.destroy()


@pytest.mark.dist
def test_a_window_ends_with_any_kind_of_microbatch():
    configs = [{}, {"zero": {"stage": 1}}, {"zero": {"stage": 2}}]
    run_each(2, close_window_otherwise, [(config,) for config in configs])


def gradients_within_a_window():
    colossalai.launch_from_torch(config={"gradient_accumulation": 2, "zero": {"stage": 3}}, verbose=False)
    model = make_model()
    engine, *_ = colossalai.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), verbose=False)
    reduced = []
    for _ in range(2):
        engine.backward(engine(torch.randn(2, 3, dtype=torch.float64)).sum())
        reduced.append(all(param.grad is not None for param in model.parameters()))
        engine.step()
    return reduced


@pytest.mark.dist
def test_sharded_gradients_are_reduced_at_the_end_of_a_window():
    assert run_ranks(gradients_within_a_window, 2) == [[False, True]] * 2


def steps_without_backward(config):
    get_dist_logger()._once = set()  # of what was said once
    colossalai.launch_from_torch(config=config, verbose=False)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    engine, *_ = colossalai.initialize(model, optimizer, nn.CrossEntropyLoss(), verbose=False)
    x, y = make_data().tensors
    before = full_parameters(engine.model)
    scaler = engine.optimizer.scaler
    with patch("colossalai.logging.DistributedLogger._log") as log:
        assert [engine.step(), engine.step()] == [False, False]  # nothing was run at all
        unchanged = full_parameters(engine.model)
        engine.backward(engine.criterion(engine(x), y))
        engine.zero_grad()
        forgotten = engine.step()
        engine.backward(engine.criterion(engine(x), y))
        made = engine.step()
        engine.zero_grad()
        again = engine.step()
    assert (forgotten, made, again) == (False, True, False)
    assert getattr(scaler, "num_steps", 1) == 1
    assert sum("without a backward" in call.args[1] for call in log.call_args_list) == 1
    for name, value in unchanged.items():
        assert torch.equal(value, before[name])
    gpc.destroy()


@pytest.mark.dist
def test_a_step_without_a_backward_says_so():
    configs = [{}, {"zero": {"stage": 1}, "clip_grad_norm": 1.0}, {"fp16": {"mode": AMP_TYPE.TORCH}}]
    run_each(2, steps_without_backward, [(config,) for config in configs])


LOW = {"fp16": {"mode": AMP_TYPE.BF16, "master_weights": True}}
SCALED = {"fp16": {"mode": AMP_TYPE.TORCH}}


def steps_again(config, with_weights):
    """Step twice: the same gradients are applied again, as in torch, or it is refused."""
    colossalai.launch_from_torch(config=config, verbose=False)
    model, (x, y) = make_model(), make_data(3).tensors
    if "fp16" in config:
        model, x = model.float(), x.float()
    if "parallel" in config:  # a pipeline is cut along blocks of one class
        torch.manual_seed(0)
        model = nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))).double()
    twin = copy.deepcopy(model)
    optimizer, plain = (torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, twin))
    engine, *_ = colossalai.initialize(model, optimizer, nn.CrossEntropyLoss(), verbose=False)

    def run_window():
        for _ in range(engine.accumulation_steps):
            if engine.model.pipeline is not None:
                engine.execute_schedule(iter([(x, y)]))
            else:
                loss = engine.criterion(engine(x), y)
                engine.backward(loss, weight=3 if with_weights else None)
            made = engine.step()
        return made

    assert run_window()
    once = full_parameters(engine.model)
    if engine.accumulation_steps > 1:
        for _ in range(2):
            with pytest.raises(ValueError, match=r"step\(\) was called again without a backward"):
                engine.step()
        assert not engine.training_step.is_in_window
    is_refused = config == SCALED or (with_weights and config == LOW)
    with (
        pytest.raises(ValueError, match="without a backward") if is_refused else nullcontext(),
        patch.object(get_dist_logger(), "log_once") as log,
    ):
        engine.optimizer.step() if engine.accumulation_steps > 1 else engine.step()
    assert engine.accumulation_steps > 1 or "applied once more" in log.call_args.args[0]
    nn.functional.cross_entropy(twin(x), y).backward()
    for _ in range(1 if is_refused else 2):
        plain.step()
    tolerance = {"rtol": 0, "atol": 0.01 if "fp16" in config else 1e-12}
    for name, value in full_parameters(engine.model).items():
        assert torch.equal(value, once[name]) == is_refused
        torch.testing.assert_close(value.to(x.dtype), twin.get_parameter(name), **tolerance)
    engine.zero_grad()
    assert run_window()
    gpc.destroy()


@pytest.mark.dist
def test_a_second_step_after_one_backward():
    zero = {"zero": {"stage": 2}, "clip_grad_norm": 10.0}
    stages = {"parallel": {"pipeline": {"size": 2, "partition": "uniform"}}, "NUM_MICRO_BATCHES": 1}
    configs = [{}, {"gradient_accumulation": 2}, zero, LOW, SCALED]
    cases = [(config, weights) for config in configs for weights in (False, True)]
    run_each(2, steps_again, [*cases, (stages, False)])


def sets_gradients():
    """Gradients that the user sets after a step are applied, without a backward of the engine."""
    colossalai.launch_from_torch({}, verbose=False)
    model = make_model()
    engine, *_ = colossalai.initialize(model, torch.optim.SGD(model.parameters(), lr=1.0), verbose=False)
    engine.backward(engine(torch.ones(2, 3, dtype=torch.float64)).sum())
    assert engine.step()
    before = full_parameters(engine.model)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    assert engine.step()
    model.zero_grad()
    assert not engine.step()
    for name, value in full_parameters(engine.model).items():
        torch.testing.assert_close(value, before[name] - 1, rtol=0, atol=1e-12)
    gpc.destroy()


@pytest.mark.dist
def test_gradients_that_are_set_after_a_step_are_applied():
    run_ranks(sets_gradients, 1)
