"""A model that is all bfloat16, with float32 masters of the weights."""

import pytest
import torch
from torch import nn

from colossalai.amp import AMP_TYPE, BF16Autocast, LossScaler, PureBF16, convert_to_amp, precision_of
from colossalai.booster.mixed_precision import BF16MixedPrecision, mixed_precision_factory
from colossalai.context import Config, ConfigException
from colossalai.context._features import check_config

pytestmark = pytest.mark.unit


def convert(model, optimizer):
    return convert_to_amp(model, optimizer, None, AMP_TYPE.BF16, {"master_weights": True})[:2]


def test_dtypes():
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    seen = []
    net[2].register_forward_hook(lambda module, args, output: seen.append((args[0].dtype, output.dtype)))
    model, optimizer = convert(net, torch.optim.SGD(net.parameters(), lr=0.1))
    output = model(torch.randn(6, 4))
    assert seen == [(torch.bfloat16, torch.bfloat16)]
    assert output.dtype == torch.float32
    assert {param.dtype for param in net[0].parameters()} == {torch.bfloat16}
    assert {tensor.dtype for tensor in net[1].parameters()} == {torch.float32}
    assert {param.dtype for param in optimizer.param_groups[0]["params"]} == {torch.float32}
    assert type(optimizer.scaler) is LossScaler


def test_masters_keep_updates_that_bfloat16_loses():
    linear = nn.Linear(1, 1, bias=False)
    linear.weight.data.fill_(1.0)
    model, optimizer = convert(linear, torch.optim.SGD(linear.parameters(), lr=1e-3))
    for _ in range(20):  # 1 - 1e-3 rounds to 1 in bfloat16, whose spacing below 1 is 3.9e-3
        optimizer.zero_grad()
        optimizer.backward(model(torch.ones(1, 1)).sum())
        optimizer.step()
    assert linear.weight.item() == pytest.approx(1 - 20e-3, abs=2e-3)


def test_how_it_is_asked_for():
    assert precision_of("bf16", {"master_weights": True}) == PureBF16()
    assert precision_of("bf16") == precision_of("bf16", {"master_weights": False}) == BF16Autocast()
    assert BF16MixedPrecision().precision() == mixed_precision_factory("bf16").precision() == BF16Autocast()
    assert mixed_precision_factory("bf16_master") == BF16MixedPrecision(master_weights=True)
    assert BF16MixedPrecision(master_weights=True).precision() == PureBF16()
    check_config(Config(fp16={"mode": AMP_TYPE.BF16, "master_weights": True}), 1)
    with pytest.raises(ConfigException, match="master_weights is 1"):
        check_config(Config(fp16={"mode": AMP_TYPE.BF16, "master_weights": 1}), 1)
