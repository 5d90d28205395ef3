"""Naive float16 on an accelerator, batch normalization included."""

import pytest
import torch
from torch import nn

from colossalai.amp import AMP_TYPE, convert_to_amp

pytestmark = pytest.mark.gpu


def test_a_convolution_net_trains():
    device = torch.accelerator.current_accelerator()
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4)
    ).to(device)
    x = torch.randn(32, 3, 8, 8, device=device)
    y = torch.arange(32, device=device) % 4
    model, optimizer, criterion = convert_to_amp(
        net,
        torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True),
        nn.CrossEntropyLoss(),
        AMP_TYPE.NAIVE,
        {"initial_scale": 2.0**10},
    )
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        optimizer.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]
    assert net[0].weight.dtype == torch.float16
    assert net[1].running_var.dtype == torch.float32
