"""Apex's levels built on torch: what each casts, its scale, and which options it takes."""

import pytest
import torch
from torch import nn

from colossalai.amp import (
    AMP_TYPE,
    ApexPrecision,
    DynamicLossScaler,
    LossScaler,
    StaticLossScaler,
    convert_to_apex_amp,
    precision_of,
)
from colossalai.booster.mixed_precision import FP16ApexMixedPrecision, mixed_precision_factory
from colossalai.context import Config, ConfigException
from colossalai.context._features import check_config
from colossalai.runtime import Plan

pytestmark = pytest.mark.unit

HALF, FULL = torch.float16, torch.float32


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))


def convert(**options):
    net = make_net()
    model, optimizer = convert_to_apex_amp(net, torch.optim.SGD(net.parameters(), lr=0.1), options)
    return net, model, optimizer


@pytest.mark.parametrize(
    ("level", "weights", "norm", "computed", "masters", "scaler"),
    [
        ("O0", FULL, FULL, FULL, 0, LossScaler),
        ("O1", FULL, FULL, HALF, 0, DynamicLossScaler),
        ("O2", HALF, FULL, HALF, 4, DynamicLossScaler),
        ("O3", HALF, HALF, HALF, 0, StaticLossScaler),
    ],
)
def test_a_level(level, weights, norm, computed, masters, scaler):
    net, model, optimizer = convert(opt_level=level)
    seen = []
    net[2].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    output = model(torch.randn(6, 4))
    assert output.dtype == FULL
    assert seen == [computed]
    assert {param.dtype for part in (net[0], net[2]) for param in part.parameters()} == {weights}
    assert {net[1].weight.dtype, net[1].running_var.dtype} == {norm}
    assert len(optimizer.masters) == masters
    assert type(optimizer.scaler) is scaler
    assert optimizer.scaler.scale == (1.0 if level in ("O0", "O3") else 2.0**16)
    before = net[0].weight.detach().clone()
    optimizer.scaler.scale = min(optimizer.scaler.scale, 8.0)
    optimizer.backward(output.square().mean() * optimizer.scaler.scale / optimizer.scaler.scale)
    optimizer.step()
    assert not torch.equal(net[0].weight, before)


def test_a_level_is_a_float32_model_for_a_float16_one():
    net, model, _ = convert(opt_level="O0")
    assert model(torch.randn(3, 4, dtype=HALF)).dtype == FULL
    assert {param.dtype for param in net.parameters()} == {FULL}


@pytest.mark.parametrize(
    ("options", "weights", "norm", "masters"),
    [
        ({"opt_level": "O2", "keep_batchnorm_fp32": False}, HALF, HALF, 6),
        ({"opt_level": "O2", "master_weights": False}, HALF, FULL, 0),
        ({"opt_level": "O3", "master_weights": True}, HALF, HALF, 6),
        ({"opt_level": "O3", "keep_batchnorm_fp32": True}, HALF, FULL, 0),
        ({"opt_level": "O2", "cast_model_type": torch.bfloat16}, torch.bfloat16, FULL, 4),
        ({"opt_level": "O2", "cast_model_type": FULL}, FULL, FULL, 0),
        ({"opt_level": "O0", "cast_model_type": HALF}, HALF, HALF, 0),
    ],
)
def test_options_override_the_level(options, weights, norm, masters):
    net, model, optimizer = convert(**options)
    assert (net[0].weight.dtype, net[1].weight.dtype, len(optimizer.masters)) == (weights, norm, masters)
    assert optimizer.unwrap() is not None
    assert ApexPrecision(**options).has_masters == (masters > 0)
    output = model(torch.randn(6, 4))
    optimizer.scaler.scale = 4.0
    optimizer.backward(output.square().mean())
    optimizer.step()
    assert optimizer.stepped


def test_the_output_and_autocast():
    _, model, _ = convert(opt_level="O2", cast_model_outputs=HALF)
    assert model(torch.randn(6, 4)).dtype == HALF
    net, model, _ = convert(opt_level="O1", patch_torch_functions=False)
    seen = []
    net[2].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    model(torch.randn(6, 4))
    assert seen == [FULL]


def test_disabled_is_nothing():
    for level in ("O0", "O1", "O2", "O3"):
        net, model, optimizer = convert(opt_level=level, enabled=False)
        assert model(torch.randn(6, 4, dtype=FULL)).dtype == FULL
        assert (net[0].weight.dtype, len(optimizer.masters)) == (FULL, 0)
        assert type(optimizer.scaler) is LossScaler
        assert not ApexPrecision(opt_level=level, enabled=False).has_masters


def test_scales():
    scaler = ApexPrecision(min_loss_scale=2.0**15, max_loss_scale=2.0**15 * 1.5).make_scaler()
    assert scaler.scale == 2.0**15 * 1.5
    scaler.update(stepped=False)
    scaler.update(stepped=False)
    assert scaler.scale == 2.0**15
    fixed = ApexPrecision(opt_level="O2", loss_scale=128).make_scaler()
    fixed.update(stepped=False)
    assert (type(fixed), fixed.scale) == (StaticLossScaler, 128.0)
    assert isinstance(ApexPrecision(opt_level="O3", loss_scale="dynamic").make_scaler(), DynamicLossScaler)


def test_a_fixed_scale_is_divided_out_and_skips_overflows():
    linear = nn.Linear(1, 1, bias=False)
    linear.weight.data.fill_(1.0)
    options = {"opt_level": "O2", "loss_scale": 64.0, "mode": AMP_TYPE.APEX}
    model, optimizer = convert_to_apex_amp(linear, torch.optim.SGD(linear.parameters(), lr=0.5), options)
    optimizer.backward(model(torch.ones(1, 1)).sum())
    optimizer.step()
    assert linear.weight.item() == 0.5
    optimizer.zero_grad()
    optimizer.backward(model(torch.full((1, 1), 60000.0)).sum())  # 64 * 60000 is inf in float16
    optimizer.step()
    assert (optimizer.stepped, linear.weight.item(), optimizer.scaler.scale) == (False, 0.5, 64.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"opt_level": "O4"}, "opt_level is 'O4'; it must be one of O0, O1, O2, O3"),
        ({"cast_model_type": HALF}, "cast_model_type=torch.float16 does not go with O1"),
        ({"keep_batchnorm_fp32": True}, "keep_batchnorm_fp32=True does not go with O1"),
        ({"master_weights": False}, "master_weights=False does not go with O1"),
        ({"opt_level": "O2", "patch_torch_functions": True}, "patch_torch_functions=True goes with O1"),
        ({"opt_level": "O2", "cast_model_type": torch.int8}, "cast_model_type is torch.int8; it must be"),
        ({"cast_model_outputs": "half"}, "cast_model_outputs is 'half'; it must be"),
        ({"loss_scale": "static"}, "loss_scale is 'static'; it must be \"dynamic\" or a number above 0"),
        ({"loss_scale": -1}, "loss_scale is -1"),
        ({"num_losses": 0}, "num_losses is 0; it must be an integer of at least 1"),
        (
            {"min_loss_scale": 8.0, "max_loss_scale": 4.0},
            "min_loss_scale is 8; it must be at most max_loss_scale",
        ),
        ({"levels": 1}, "do not fit AMP_TYPE.APEX"),
    ],
)
def test_what_does_not_go_together_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        precision_of(AMP_TYPE.APEX, options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_losses": 2}, "num_losses=2 has no effect: all losses share one scale"),
        ({"loss_scale": 2.0, "min_loss_scale": 1.0}, "min_loss_scale and max_loss_scale have no effect"),
        ({"opt_level": "O0", "master_weights": True}, "master_weights=True has no effect"),
        ({"opt_level": "O0", "keep_batchnorm_fp32": True}, "keep_batchnorm_fp32=True has no effect"),
    ],
)
def test_what_has_no_effect_is_said(options, message, capfd):
    ApexPrecision(**options)
    ApexPrecision(**options)
    assert capfd.readouterr().err.count(message) == 1


def test_verbosity(capfd):
    for verbosity, expected in enumerate([(0, 0), (1, 0), (1, 1)]):
        scaler = ApexPrecision(verbosity=verbosity).make_scaler()
        scaler.update(stepped=False, reason="bad luck")
        for _ in range(2000):
            scaler.update(stepped=True)
        errors = capfd.readouterr().err
        assert (errors.count("bad luck"), errors.count("2000 steps without overflow")) == expected


def test_how_it_is_asked_for():
    assert precision_of("apex") == mixed_precision_factory("fp16_apex").precision() == ApexPrecision()
    assert FP16ApexMixedPrecision("O2", loss_scale=8.0).precision() == ApexPrecision(
        opt_level="O2", loss_scale=8.0
    )
    with pytest.raises(ValueError, match="does not go with O1"):
        FP16ApexMixedPrecision(master_weights=True)
    documented = {
        "enabled": True, "opt_level": "O1", "cast_model_type": None, "patch_torch_functions": None,
        "keep_batchnorm_fp32": None, "master_weights": None, "loss_scale": None, "cast_model_outputs": None,
        "num_losses": 1, "verbosity": 1, "min_loss_scale": None, "max_loss_scale": 16777216.0,
    }  # fmt: skip
    check_config(Config(fp16={"mode": AMP_TYPE.APEX, **documented}), 1)
    assert precision_of(AMP_TYPE.APEX, documented) == ApexPrecision()
    plan = Plan.from_config(Config(fp16={"mode": AMP_TYPE.APEX, "opt_level": "O2"}))
    assert plan.precision == ApexPrecision(opt_level="O2")
    with pytest.raises(ConfigException, match="does not go with O1"):
        Plan.from_config(Config(fp16={"mode": "apex", "master_weights": True}))
    mistakes = {"opt_level": "O5", "loss_scale": "static", "num_losses": 0, "master_weights": 1, "enabled": 0}
    for key, value in mistakes.items():
        with pytest.raises(ConfigException, match=f"fp16.{key} is"):
            check_config(Config(fp16={"mode": "apex", key: value}), 1)
