"""Float16 over several ranks: an overflow on one of them skips the step of all."""

import pytest
import torch
from torch import nn

import colossalai
from colossalai.amp import AMP_TYPE
from colossalai.booster import Booster
from colossalai.booster.mixed_precision import FP16TorchMixedPrecision
from colossalai.booster.plugin import TorchDDPPlugin, TorchFSDPPlugin
from colossalai.core import global_context as gpc
from colossalai.testing import full_parameters
from tests.ranks import run_ranks
from tests.turns import run_each

PLUGINS = {"ddp": TorchDDPPlugin, "fsdp": TorchFSDPPlugin}


def overflow_in_one_slice(method):
    """An inf in one element of a gradient: under FSDP only one rank holds it."""
    colossalai.launch_from_torch(config={}, verbose=False)
    precision = FP16TorchMixedPrecision(init_scale=16.0, growth_interval=100)
    booster = Booster(mixed_precision=precision, plugin=PLUGINS[method]())
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    history = []
    for step in range(3):
        before = full_parameters(model)
        optimizer.zero_grad()
        booster.backward(model(torch.ones(2, 4)).sum(), optimizer)
        weight = dict(model.named_parameters())["weight"]
        if step == 1:
            grad = weight.grad.to_local() if method == "fsdp" else weight.grad
            if gpc.get_global_rank() == 1:
                grad.view(-1)[0] = float("inf")
        optimizer.step()
        after = full_parameters(model)
        changed = any(not torch.equal(after[name], before[name]) for name in after)
        history.append((optimizer.stepped, changed, optimizer.scaler.scale))
    return history


@pytest.mark.dist
@pytest.mark.parametrize("method", ["ddp", "fsdp"])
def test_all_ranks_skip_together(method):
    expected = [(True, True, 16.0), (False, False, 8.0), (True, True, 8.0)]
    assert run_ranks(overflow_in_one_slice, 2, method) == [expected, expected]


def losses_of(mode):
    config = {"clip_grad_norm": 1.0, "gradient_accumulation": 2}
    if mode is not None:
        config["fp16"] = {"mode": mode}
    colossalai.launch_from_torch(config=config, verbose=False)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, *_ = colossalai.initialize(model, optimizer, nn.CrossEntropyLoss(), verbose=False)
    generator = torch.Generator().manual_seed(gpc.get_global_rank())
    losses = []
    for _ in range(30):
        x = torch.randn(16, 8, generator=generator)
        engine.zero_grad()
        loss = engine.criterion(engine(x), x[:, :4].argmax(1))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


@pytest.mark.dist
def test_low_precisions_follow_float32():
    reference, *found = run_each(2, losses_of, [(None,), (AMP_TYPE.TORCH,), (AMP_TYPE.BF16,)])
    for of_mode in found:
        # bfloat16 keeps 8 bits: 0.4 % per operation, some operations deep, over 15 updates
        for losses, expected in zip(of_mode, reference, strict=True):
            assert losses != expected
            assert losses == pytest.approx(expected, rel=0.05)
            assert losses[-1] < losses[0]
