"""The plugin door: several models in one job, checkpoints across plugins, precisions by name."""

import logging
from dataclasses import replace
from functools import partial
from itertools import chain

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

import colossalai
from colossalai.booster import Booster
from colossalai.booster.mixed_precision import FP16TorchMixedPrecision, mixed_precision_factory
from colossalai.booster.plugin import TorchDDPPlugin, TorchFSDPPlugin
from colossalai.core import global_context as gpc
from colossalai.logging import get_dist_logger
from colossalai.nn import Lamb, Lars
from colossalai.testing import assert_close, full_gradients, full_parameters
from tests.booster.test_accumulate import assert_trained
from tests.parity.tasks import NET
from tests.parity.training import Run, check_runs, grouped_runs
from tests.ranks import run_ranks
from tests.tiers import further
from tests.turns import run_each

PLUGINS = {"ddp": TorchDDPPlugin, "fsdp": TorchFSDPPlugin}


def make_model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def make_batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 3, generator=generator, dtype=torch.float64)


def my_slice(x):
    return x.chunk(gpc.data_parallel_size)[gpc.get_global_rank()]


def distill(method):
    """A student learns from a teacher that has stopped learning; each model is boosted on its own."""
    colossalai.launch_from_torch(config={}, verbose=False)
    booster = Booster(plugin=PLUGINS[method]())
    teacher = make_model(1).requires_grad_(False)
    student = make_model(2)
    teacher, *_ = booster.boost(teacher)
    student, optimizer, *_ = booster.boost(student, torch.optim.SGD(student.parameters(), lr=0.1))
    for step in range(3):
        x = my_slice(make_batch(step))
        optimizer.zero_grad()
        booster.backward(nn.functional.mse_loss(student(x), teacher(x)), optimizer)
        optimizer.step()
    return full_parameters(student)


@pytest.mark.dist
def test_teacher_and_student():
    teacher, student = make_model(1), make_model(2)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    for step in range(3):
        x = make_batch(step)
        optimizer.zero_grad()
        nn.functional.mse_loss(student(x), teacher(x).detach()).backward()
        optimizer.step()
    assert_trained(chain(*run_each(2, distill, [("ddp",), ("fsdp",)])), student)


def play(generator, critic, g_optimizer, c_optimizer, backward, share):
    """Two steps of a GAN: each player's backward runs through both models."""
    for step in range(2):
        noise, real = share(make_batch(step)), share(make_batch(step + 10))[:, :2]
        c_optimizer.zero_grad()
        backward(critic(generator(noise).detach()).mean() - critic(real).mean(), c_optimizer)
        c_optimizer.step()
        g_optimizer.zero_grad()
        backward(-critic(generator(noise)).mean(), g_optimizer)
        g_optimizer.step()


def make_critic():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def gan():
    colossalai.launch_from_torch(config={}, verbose=False)
    booster = Booster(plugin=TorchDDPPlugin())
    generator, critic = make_model(), make_critic()
    generator, g_optimizer, *_ = booster.boost(generator, torch.optim.Adam(generator.parameters(), lr=0.01))
    critic, c_optimizer, *_ = booster.boost(critic, torch.optim.Adam(critic.parameters(), lr=0.01))
    play(generator, critic, g_optimizer, c_optimizer, booster.backward, my_slice)
    return full_parameters(generator), full_parameters(critic)


@pytest.mark.dist
def test_two_models_and_two_optimizers():
    models = generator, critic = make_model(), make_critic()
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.01) for model in models]
    play(generator, critic, *optimizers, lambda loss, optimizer: loss.backward(), lambda x: x)
    for found in run_ranks(gan, 2):
        for params, model in zip(found, models, strict=True):
            assert_trained([params], model)


def train_two_steps(booster, model, optimizer, scheduler):
    for step in range(2):
        optimizer.zero_grad()
        booster.backward(model(my_slice(make_batch(step))).square().mean(), optimizer)
        optimizer.step()
        scheduler.step()


def build(method):
    booster = Booster(plugin=PLUGINS[method]())
    model = make_model()
    groups = [{"params": model[0].parameters(), "lr": 0.01}, {"params": model[2].parameters()}]
    optimizer = torch.optim.AdamW(groups, lr=0.02)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    model, optimizer, _, _, scheduler = booster.boost(model, optimizer, lr_scheduler=scheduler)
    return booster, model, optimizer, scheduler


def save_everything(method, folder, shard, use_safetensors, gather):
    colossalai.launch_from_torch(config={}, verbose=False)
    booster, model, optimizer, scheduler = build(method)
    train_two_steps(booster, model, optimizer, scheduler)
    booster.save_model(model, f"{folder}/model", shard, gather, "", 10, use_safetensors=use_safetensors)
    booster.save_optimizer(optimizer, f"{folder}/optimizer", shard=shard, gather_dtensor=gather)
    booster.save_lr_scheduler(scheduler, f"{folder}/scheduler")
    train_two_steps(booster, model, optimizer, scheduler)
    return full_parameters(model)


def load_everything(method, folder):
    colossalai.launch_from_torch(config={}, verbose=False)
    booster, model, optimizer, scheduler = build(method)
    booster.load_model(model, f"{folder}/model")
    booster.load_optimizer(optimizer, f"{folder}/optimizer")
    booster.load_lr_scheduler(scheduler, f"{folder}/scheduler")
    train_two_steps(booster, model, optimizer, scheduler)
    return full_parameters(model)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("save", "load", "shard", "use_safetensors", "gather"),
    [further(("ddp", 2), ("fsdp", 2), False, False, True),
     further(("fsdp", 2), ("ddp", 1), True, True, True), further(("fsdp", 2), ("fsdp", 4), True, False, True),
     (("ddp", 1), ("fsdp", 2), False, True, True), (("fsdp", 2), ("ddp", 1), False, False, False)],
)  # fmt: skip
def test_training_goes_on_under_another_plugin(tmp_path, save, load, shard, use_safetensors, gather):
    expected = run_ranks(save_everything, save[1], save[0], str(tmp_path), shard, use_safetensors, gather)[0]
    assert gather == (not (tmp_path / "model" / "model" / "tensors.json").is_file())
    for params in run_ranks(load_everything, load[1], load[0], str(tmp_path)):
        for name, value in params.items():
            assert_close(value, expected[name], rtol=1e-10, atol=1e-10)


ROWS = [
    # Optimizers that need whole tensors.
    *(
        Run(task=replace(NET, optimizer=partial(optimizer, lr=0.1)), num_ranks=2, plugin=plugin)
        for optimizer in (Lamb, Lars)
        for plugin in PLUGINS.values()
    ),
    # Options of the plugins.
    *(
        Run(task=NET, num_ranks=2, plugin=partial(PLUGINS[name], **options), booster=more)
        for name, options, more in (
            ("ddp", {"recompute": True}, {}),
            ("fsdp", {"recompute": True}, {}),
            ("fsdp", {"reshard_after_forward": False}, {"mixed_precision": "fp32"}),
            ("fsdp", {"cpu_offload": True}, {}),
            ("ddp", {"find_unused_parameters": True, "gradient_as_bucket_view": True}, {}),
        )
    ),
]


@pytest.mark.dist
@pytest.mark.parametrize(("num_ranks", "runs"), grouped_runs(ROWS))
def test_optimizers_and_options_are_one_process(num_ranks, runs):
    check_runs(num_ranks, runs)


def gradients_with(method, options, precision):
    colossalai.launch_from_torch(config={}, verbose=False)
    booster = Booster(mixed_precision=precision, plugin=PLUGINS[method](**options))
    model = make_model().float()
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    booster.backward(model(my_slice(make_batch(0).float())).square().mean(), optimizer)
    optimizer.clip_grad_by_norm(1e9)  # unscales
    return full_gradients(model)


LOW = [
    # 8 bits of mantissa
    (("fsdp", {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}, None), 2e-2),
    (("fsdp", {"recompute": ["2"]}, "bf16"), 2e-2),
    (("ddp", {}, "fp16"), 5e-3),  # 11 bits of mantissa
]


@pytest.mark.dist
def test_low_precision_by_the_plugins():
    model = make_model().float()
    model(make_batch(0).float()).square().mean().backward()
    for by_rank, (_, tolerance) in zip(
        run_each(2, gradients_with, [case for case, _ in LOW]), LOW, strict=True
    ):
        for name, grad in (item for grads in by_rank for item in grads.items()):
            assert_close(grad, model.get_parameter(name).grad, rtol=tolerance, atol=tolerance)


def same_samples_everywhere():
    colossalai.launch_from_torch(config={}, verbose=False)
    booster = Booster()
    dataset = TensorDataset(torch.arange(8))
    booster.boost(nn.Linear(1, 1), dataloader=DataLoader(dataset))
    loader = booster.plugin.prepare_dataloader(dataset, batch_size=2)
    return [batch[0].tolist() for batch in loader]


@pytest.mark.dist
def test_the_prepared_loader_divides_the_data():
    assert run_ranks(same_samples_everywhere, 2) == [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]


class OwnLoader(DataLoader):
    """A subclass, such as libraries make."""


def warnings_of_loaders():
    """What each loader lets `Booster.boost` and `colossalai.initialize` say."""
    colossalai.launch_from_torch(config={}, verbose=False)
    said = []
    logging.getLogger("colossalai").addHandler(handler := logging.Handler())
    handler.emit = lambda record: said.append(record.getMessage())
    dataset = TensorDataset(torch.arange(8))
    counts = []
    for loader in (
        OwnLoader(dataset),
        DataLoader(dataset, sampler=DistributedSampler(dataset)),
        DataLoader(dataset, batch_sampler=BatchSampler(DistributedSampler(dataset), 2, False)),
        TorchDDPPlugin().prepare_dataloader(dataset, 2),
        [torch.zeros(1)],
        None,
    ):
        for call in (
            lambda loader: Booster().boost(nn.Linear(1, 1), dataloader=loader),
            lambda loader: colossalai.initialize(nn.Linear(1, 1), train_dataloader=loader, verbose=False),
        ):
            get_dist_logger()._once.clear()
            said.clear()
            call(loader)
            counts.append(sum("same samples" in text for text in said))
    logging.getLogger("colossalai").removeHandler(handler)
    with pytest.raises(ValueError, match=r"among 3 ranks, and the model has 2 .*get_dataloader"):
        colossalai.initialize(
            nn.Linear(1, 1), train_dataloader=DataLoader(dataset, sampler=DistributedSampler(dataset, 3, 0))
        )
    return counts


@pytest.mark.dist
def test_a_loader_that_was_not_prepared_is_warned_of():
    first, _ = run_ranks(warnings_of_loaders, 2)
    assert first == [1, 1, *[0] * 10]


def errors():
    colossalai.launch_from_torch(config={}, verbose=False)
    booster = Booster(plugin=TorchFSDPPlugin())
    model = make_model()
    with pytest.raises(ValueError, match="has not been boosted"):
        booster.backward(torch.ones(()), torch.optim.SGD(model.parameters(), lr=1))
    with pytest.raises(ValueError, match="has not been boosted"):
        booster.no_sync(model)
    for wrong in ({"plugin": TorchDDPPlugin}, {"mixed_precision": 16}, {"mixed_precision": "fp8"}):
        with pytest.raises(ValueError, match="it must be"):
            Booster(**wrong)


@pytest.mark.dist
def test_errors():
    run_ranks(errors, 1)


@pytest.mark.unit
def test_precisions_by_name():
    assert mixed_precision_factory("fp16") == FP16TorchMixedPrecision()
    assert mixed_precision_factory("bf16").precision().dtype == torch.bfloat16
    with pytest.raises(RuntimeError, match="nothing has been launched"):
        Booster()
