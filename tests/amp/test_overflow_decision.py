"""Float16 over several ranks: an overflow on one of them skips the step of all."""

import pytest
import torch
from torch import nn

import colossalai
from colossalai.booster import Booster
from colossalai.booster.mixed_precision import FP16NaiveMixedPrecision, FP16TorchMixedPrecision
from colossalai.booster.plugin import TorchDDPPlugin, TorchFSDPPlugin
from colossalai.core import global_context as gpc
from colossalai.testing import full_parameters
from tests.ranks import run_ranks

SCALED = FP16TorchMixedPrecision(init_scale=16.0, growth_interval=100)
NAIVE = FP16NaiveMixedPrecision(initial_scale=16.0, hysteresis=2, growth_interval=100)
CASES = {
    "ddp": (TorchDDPPlugin, SCALED, [16.0, 8.0, 8.0, 4.0, 4.0]),
    "fsdp": (TorchFSDPPlugin, SCALED, [16.0, 8.0, 8.0, 4.0, 4.0]),
    "naive": (TorchDDPPlugin, NAIVE, [16.0, 16.0, 16.0, 8.0, 8.0]),
}


def overflow_in_one_slice(method):
    """An inf in one element of a gradient: under FSDP only one rank holds it."""
    colossalai.launch_from_torch(config={}, verbose=False)
    plugin, precision, _ = CASES[method]
    booster = Booster(mixed_precision=precision, plugin=plugin())
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    history = []
    for step in range(5):
        before = full_parameters(model)
        optimizer.zero_grad()
        booster.backward(model(torch.ones(2, 4)).sum(), optimizer)
        weight = dict(model.named_parameters())["weight"]
        if step in (1, 3):
            grad = weight.grad.to_local() if method == "fsdp" else weight.grad
            if gpc.get_global_rank() == 1:
                grad.view(-1)[0] = float("inf")
        optimizer.step()
        after = full_parameters(model)
        changed = any(not torch.equal(after[name], before[name]) for name in after)
        history.append((optimizer.stepped, changed, optimizer.scaler.scale))
    held = [param.detach() for group in optimizer.param_groups for param in group["params"]]
    masters = [param.full_tensor() if hasattr(param, "full_tensor") else param for param in held]
    return history, masters


@pytest.mark.dist
@pytest.mark.parametrize("method", CASES)
def test_all_ranks_skip_together(method):
    (history, masters), (other_history, other_masters) = run_ranks(overflow_in_one_slice, 2, method)
    steps = [True, False, True, False, True]
    scales = CASES[method][2]
    assert history == other_history == list(zip(steps, steps, scales, strict=True))
    assert all(map(torch.equal, masters, other_masters))
