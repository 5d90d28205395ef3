"""Loss scaling and autocast in one process."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn

from colossalai.amp import (
    AMP_TYPE,
    AutoPrecision,
    BF16Autocast,
    DynamicLossScaler,
    FP16Autocast,
    FullPrecision,
    LossScaler,
    OptimizerGroup,
    OptimizerWrapper,
    PureBF16,
    apply_precision,
    convert_to_amp,
    precision_of,
)
from colossalai.amp._precision import cpu_features, is_fast_at_bfloat16
from colossalai.booster.mixed_precision import FP16TorchMixedPrecision, mixed_precision_factory
from colossalai.booster.plugin import GeminiPlugin, HybridParallelPlugin, LowLevelZeroPlugin
from colossalai.context import Config
from colossalai.context._features import check_config
from colossalai.runtime import Plan
from colossalai.zero import zero_model_wrapper

pytestmark = pytest.mark.unit


def make_scaler(**options):
    defaults = {"init_scale": 8.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2}
    return DynamicLossScaler(**{**defaults, **options})


def test_the_scale_follows_the_steps():
    scaler = make_scaler()
    scales = []
    for stepped in [True, True, False, True, False, True, True]:
        scaler.update(stepped=stepped)
        scales.append(scaler.scale)
    assert scales == [8, 16, 8, 8, 4, 4, 8]
    twin = make_scaler()
    twin.load_state_dict(scaler.state_dict())
    assert (twin.scale, twin.good_steps) == (scaler.scale, scaler.good_steps)


@pytest.mark.parametrize("bad", [float("inf"), float("nan"), -float("inf")])
def test_an_overflow_skips_the_step(bad):
    param = nn.Parameter(torch.tensor([1.0, 2.0]))
    optimizer = OptimizerWrapper(torch.optim.SGD([param], lr=1.0), group=OptimizerGroup(make_scaler()))
    optimizer.backward((param * torch.tensor([1.0, bad])).sum())
    assert optimizer.clip_grad_by_norm(1.0) == float("inf")
    optimizer.step()
    assert not optimizer.stepped
    assert param.tolist() == [1.0, 2.0]
    assert optimizer.scaler.scale == 4.0
    optimizer.zero_grad()
    optimizer.backward(param.sum())
    optimizer.step()
    assert optimizer.stepped
    assert param.tolist() == [0.0, 1.0]  # the gradient was unscaled


@pytest.mark.parametrize("scaler", [None, make_scaler()])
def test_clipping_sees_true_gradients_and_happens_once(scaler):
    param = nn.Parameter(torch.tensor([3.0, 4.0]))
    optimizer = OptimizerWrapper(torch.optim.SGD([param], lr=1.0), group=OptimizerGroup(scaler))
    optimizer.backward((param**2).sum() / 2)
    assert optimizer.clip_grad_by_norm(1.0) == pytest.approx(5.0)
    assert param.grad.tolist() == pytest.approx([0.6, 0.8], rel=1e-5)
    optimizer.clip_grad_by_value(0.7)
    assert param.grad.tolist() == pytest.approx([0.6, 0.7], rel=1e-5)
    optimizer.step()
    assert param.tolist() == pytest.approx([2.4, 3.3], rel=1e-5)
    for clip in (optimizer.clip_grad_by_norm, optimizer.clip_grad_by_value):
        with pytest.raises(ValueError, match="must be above 0"):
            clip(0.0)


def test_a_backward_of_somebody_else_is_refused():
    param = nn.Parameter(torch.ones(1))
    optimizer = OptimizerWrapper(torch.optim.SGD([param], lr=1.0), group=OptimizerGroup(make_scaler()))
    optimizer.step()  # of no gradients, as schedulers ask for
    optimizer.backward(param.sum())
    optimizer.step()
    assert param.item() == 0.0
    optimizer.zero_grad()
    param.sum().backward()
    with pytest.raises(ValueError, match="SGD: a step without a backward whose loss scale is known"):
        optimizer.step()
    assert param.item() == 0.0
    unscaled = OptimizerWrapper(torch.optim.SGD([param], lr=1.0))
    unscaled.step()
    assert param.item() == -1.0


def test_a_closure_works_where_nothing_is_scaled():
    param = nn.Parameter(torch.tensor([1.0]))
    optimizer = OptimizerWrapper(torch.optim.LBFGS([param], lr=0.1))

    def closure():
        optimizer.zero_grad()
        loss = (param**2).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert abs(param.item()) < 1.0
    with pytest.raises(ValueError, match="a closure computes gradients that are not scaled"):
        OptimizerWrapper(torch.optim.SGD([param], lr=1), group=OptimizerGroup(make_scaler())).step(closure)


@pytest.mark.parametrize(
    ("precision", "dtype"), [(BF16Autocast(), torch.bfloat16), (FP16Autocast(), torch.float16)]
)
def test_autocast_computes_low_and_returns_float32(precision, dtype):
    seen = []
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    wrapped = apply_precision(model, precision, "cpu")
    output = wrapped(torch.randn(2, 4))
    assert seen == [dtype]
    assert output.dtype == torch.float32
    assert model[0].weight.dtype == torch.float32


def test_full_precision_changes_nothing():
    model = nn.Linear(2, 2)
    assert apply_precision(model, FullPrecision(), "cpu") is model
    assert type(FullPrecision().make_scaler()) is LossScaler
    assert type(FP16Autocast(enabled=False).make_scaler()) is LossScaler


@pytest.mark.parametrize("mode", list(AMP_TYPE))
def test_convert_to_amp_trains(mode):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    x = torch.randn(64, 8)
    y = x.sum(1, keepdim=True)
    model, optimizer, criterion = convert_to_amp(
        model, torch.optim.Adam(model.parameters(), lr=1e-2), nn.MSELoss(), mode
    )
    losses = []
    if mode is AMP_TYPE.NAIVE:
        optimizer.scaler.scale = 2.0**10  # its documented first scale takes some thirty skipped steps
    for _ in range(40):
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        optimizer.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]


def test_a_mistake_is_said():
    with pytest.raises(ValueError, match="master_weights is 1; it must be True or False"):
        precision_of(AMP_TYPE.BF16, {"master_weights": 1})
    with pytest.raises(ValueError, match="do not fit"):
        precision_of(AMP_TYPE.TORCH, {"initial_scale": 1})
    with pytest.raises(ValueError, match=r"backoff_factor is 1.5; it must be below 1"):
        make_scaler(backoff_factor=1.5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"init_scale": "big"}, "init_scale is 'big'; it must be a number above 0"),
        ({"growth_factor": 1}, "growth_factor is 1; it must be a number above 1"),
        ({"growth_interval": 0.5}, "growth_interval is 0.5; it must be an integer of at least 1"),
        ({"enabled": 1}, "enabled is 1; it must be True or False"),
        (
            {"max_consecutive_skips": True},
            "max_consecutive_skips is True; it must be an integer, 0 for no bound",
        ),
    ],
)
def test_each_option_is_checked_in_a_config_and_outside_of_one(options, message):
    with pytest.raises(ValueError, match=message):
        FP16TorchMixedPrecision(**options)
    with pytest.raises(ValueError, match=f"fp16.{message}"):
        check_config(Config(fp16={"mode": "torch", **options}), 1)


@pytest.mark.parametrize(
    ("features", "is_fast", "reason"),
    [
        ({"cpu_name": "Intel Xeon", "avx512_bf16": True, "amx_bf16": True}, True, "has amx_bf16"),
        ({"cpu_name": "AMD EPYC 9654", "avx512_bf16": True}, True, "has avx512_bf16"),
        ({"cpu_name": "Intel Xeon", "avx512_bf16": True}, False, "avx512_bf16 without amx_bf16"),
        ({"cpu_name": "Intel Xeon", "avx512_f": True, "avx512_bf16": False}, False, "neither amx_bf16"),
        ({"cpu_name": "Apple M4", "bf16": True}, False, "neither amx_bf16"),
        ({}, False, "neither amx_bf16"),
    ],
)
def test_which_processors_are_fast_at_bfloat16(features, is_fast, reason):
    with mock.patch.object(torch.backends.mkldnn, "is_available", return_value=True):
        verdict, given = is_fast_at_bfloat16(torch.device("cpu"), features=features)
    assert verdict is is_fast
    assert reason in given


def test_which_other_devices_are_fast_at_bfloat16():
    def verdict(name, **supports):
        with mock.patch.object(torch, name, SimpleNamespace(**supports), create=True):
            return is_fast_at_bfloat16(torch.device(name))[0]

    def emulates(including_emulation=True):
        return including_emulation

    assert verdict("cuda", is_bf16_supported=lambda including_emulation=True: True)
    assert not verdict("cuda", is_bf16_supported=emulates)
    assert verdict("hpu", is_bf16_supported=lambda: True)  # it has no such argument
    assert not verdict("mps")  # it does not report it
    with mock.patch.object(torch.backends.mkldnn, "is_available", return_value=False):
        verdict, reason = is_fast_at_bfloat16(torch.device("cpu"), features={"amx_bf16": True})
    assert (verdict, "lacks oneDNN" in reason) == (False, True)


def test_features_of_the_processor_are_found_without_torch(tmp_path):
    is_fast_at_bfloat16(torch.device("cpu"))  # on whatever this machine is
    file = tmp_path / "cpuinfo"
    file.write_text("vendor_id\t: GenuineIntel\nflags\t: fpu avx512_bf16 amx_bf16\n\nvendor_id : other\n")
    with mock.patch.object(torch, "cpu", SimpleNamespace()):
        found = cpu_features(file)
        assert cpu_features(tmp_path / "none") == {}
    assert found == {"cpu_name": "GenuineIntel", "fpu": True, "avx512_bf16": True, "amx_bf16": True}


def test_who_takes_auto():
    assert mixed_precision_factory("auto").precision() == AutoPrecision(BF16Autocast())
    assert HybridParallelPlugin(precision="auto").plan(FullPrecision()).precision.bfloat16 == BF16Autocast()
    assert LowLevelZeroPlugin().precision == AutoPrecision(PureBF16())
    assert LowLevelZeroPlugin(precision="bf16").precision == PureBF16()
    with pytest.raises(ValueError, match=r"fp16\.mode is 'auto'; it must be one of"):
        Plan.from_config(Config(fp16={"mode": "auto"}))
    with pytest.raises(ValueError, match="precision is 'auto'; it must be one of fp16"):
        GeminiPlugin(precision="auto")
    with pytest.raises(ValueError, match=r"precision is 'auto'; it must be one of \['bf16'"):
        zero_model_wrapper(nn.Linear(1, 1), precision="auto")
