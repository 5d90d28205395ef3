"""Lamb and Lars take the same steps on an accelerator as on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.nn.optimizer.test_layerwise import CASES, make_params, set_grads

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("optimizer_class", "_naive", "options"), CASES)
def test_same_steps_as_on_the_cpu(
    optimizer_class: type[torch.optim.Optimizer], _naive: object, options: dict[str, float]
) -> None:
    device = torch.accelerator.current_accelerator()
    twins = make_params()
    params = [nn.Parameter(twin.data.to(device)) for twin in twins]
    optimizer, twin_optimizer = optimizer_class(params, **options), optimizer_class(twins, **options)
    for step in range(1, 4):
        set_grads(twins, step)
        for param, twin in zip(params, twins, strict=True):
            param.grad = None if twin.grad is None else twin.grad.to(device)
        optimizer.step()
        twin_optimizer.step()
    for param, twin in zip(params, twins, strict=True):
        torch.testing.assert_close(param.cpu(), twin, rtol=1e-12, atol=1e-13)
