"""The same code on an accelerator: parity with one rank and with two that share it, autocast, pinning.

One accelerator is enough. Two ranks cannot share one under NCCL, so they talk by gloo.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import colossalai
from colossalai.booster import Booster
from colossalai.booster.plugin import TorchDDPPlugin
from colossalai.core import global_context as gpc
from colossalai.utils import get_current_device, get_dataloader
from tests.parity.table import replicas
from tests.parity.training import train
from tests.ranks import run_ranks

pytestmark = pytest.mark.gpu


def has_backend(name, model):
    assert get_current_device().type != "cpu"
    assert name in str(dist.get_backend_config(gpc.mesh.group("dp")))


@pytest.mark.parametrize(("accumulation", "max_norm"), [(1, None), (2, 0.5)])
@pytest.mark.parametrize("method", ["ddp", "fsdp"])
@pytest.mark.parametrize(("num_ranks", "backend"), [(1, "nccl"), (2, "gloo")])
def test_both_doors_against_one_process(num_ranks, backend, method, accumulation, max_norm):
    run = replicas(num_ranks, accumulation, max_norm, method)
    run_ranks(train, num_ranks, replace(run, backend=backend, check=partial(has_backend, backend)))


def low_precision(name):
    colossalai.launch_from_torch(verbose=False)
    booster = Booster(mixed_precision=name, plugin=TorchDDPPlugin())
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4))
    model, optimizer, criterion, *_ = booster.boost(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), nn.CrossEntropyLoss()
    )
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(30):
        x = torch.randn(64, 8, generator=generator).to(get_current_device())
        optimizer.zero_grad()
        loss = criterion(model(x), x[:, :4].argmax(1))
        booster.backward(loss, optimizer)
        optimizer.clip_grad_by_norm(1.0)
        optimizer.step()
        losses.append(loss.item())
    gpc.destroy()
    return losses


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_autocast_follows_float32(name):
    (reference,), (losses,) = run_ranks(low_precision, 1, "fp32"), run_ranks(low_precision, 1, name)
    assert losses != reference
    assert losses == pytest.approx(reference, rel=0.05)  # 8 bits of mantissa, over 30 updates


def pinned():
    colossalai.launch_from_torch(verbose=False)
    loader = get_dataloader(TensorDataset(torch.arange(8.0)), batch_size=4, pin_memory=True)
    return [batch.is_pinned() for (batch,) in loader]


def test_loaders_pin_memory():
    assert run_ranks(pinned, 1) == [[True, True]]


def random_states():
    colossalai.launch_from_torch(verbose=False)
    device = get_current_device()
    state = colossalai.context.random_state()
    drawn = torch.rand(4, device=device).tolist(), torch.rand(4).tolist()
    colossalai.context.set_random_state(state)
    return drawn == (torch.rand(4, device=device).tolist(), torch.rand(4).tolist())


def test_random_states_of_the_device_come_back():
    assert run_ranks(random_states, 1) == [True]
