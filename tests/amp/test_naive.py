"""Models of 16 bits in one process: who holds which weights, what the scale does, what is saved."""

import copy
import io

import pytest
import torch
from torch import nn

from colossalai import checkpoint_io
from colossalai.amp import (
    AMP_TYPE,
    BF16Autocast,
    DynamicLossScaler,
    LossScaler,
    NaiveFP16,
    PureBF16,
    convert_to_amp,
    precision_of,
)
from colossalai.booster.mixed_precision import (
    BF16MixedPrecision,
    FP16NaiveMixedPrecision,
    mixed_precision_factory,
)
from colossalai.context import Config, ConfigException
from colossalai.context._features import check_config

pytestmark = pytest.mark.unit


class Net(nn.Module):
    """Tied weights, a frozen layer, batch normalization, a buffer in the computation."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("shift", torch.linspace(0, 1, 8))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens, factor):
        return self.head(self.norm(self.frozen(self.embed(tokens)) * factor + self.shift))


def convert(model, optimizer, mode=AMP_TYPE.NAIVE, **options):
    defaults = {"initial_scale": 2.0**8} if mode is AMP_TYPE.NAIVE else {"master_weights": True}
    return convert_to_amp(model, optimizer, None, mode, {**defaults, **options})[:2]


def make_net():
    torch.manual_seed(0)
    model = Net()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model, optimizer, num_steps=1):
    generator = torch.Generator().manual_seed(1)
    for _ in range(num_steps):
        tokens = torch.randint(11, (16,), generator=generator)
        optimizer.zero_grad()
        optimizer.backward(nn.functional.cross_entropy(model(tokens, torch.ones(16, 1)), tokens))
        optimizer.step()


MODES = {AMP_TYPE.NAIVE: torch.float16, AMP_TYPE.BF16: torch.bfloat16}


@pytest.mark.parametrize(("mode", "dtype"), MODES.items())
def test_dtypes(mode, dtype):
    net, raw = make_net()
    seen = []
    net.frozen.register_forward_hook(lambda module, args, output: seen.append((args[0].dtype, output.dtype)))
    model, optimizer = convert(net, raw, mode)
    output = model(torch.arange(4), torch.ones(4, 1, dtype=torch.float64))
    assert seen == [(dtype, dtype)]
    assert output.dtype == torch.float32
    low = (net.embed.weight, net.frozen.weight, net.frozen.bias, net.shift)
    assert {tensor.dtype for tensor in low} == {dtype}
    kept = (net.norm.weight, net.norm.bias, net.norm.running_mean, net.norm.running_var)
    assert {tensor.dtype for tensor in kept} == {torch.float32}
    assert net.norm.num_batches_tracked.dtype == torch.int64
    assert net.head.weight is net.embed.weight
    assert len(optimizer.masters) == 1  # one for the tied weight, none for what is frozen or float32
    (master,) = [
        param for param in raw.param_groups[0]["params"] if optimizer.masters.param_of(param) is not param
    ]
    assert master.dtype == torch.float32
    assert optimizer.param_names[master] == optimizer.param_names[net.embed.weight] == "embed.weight"
    train(model, optimizer)
    assert optimizer.stepped
    assert torch.equal(master.to(dtype), net.embed.weight)
    assert raw.state[master]["exp_avg"].dtype == torch.float32


@pytest.mark.parametrize(
    ("mode", "lr"),
    [
        (AMP_TYPE.NAIVE, 1e-4),  # 1 - 1e-4 rounds to 1 in float16, whose spacing below 1 is 4.9e-4
        (AMP_TYPE.BF16, 1e-3),  # 1 - 1e-3 rounds to 1 in bfloat16, whose spacing below 1 is 3.9e-3
    ],
)
def test_masters_keep_updates_that_16_bits_lose(mode, lr):
    linear = nn.Linear(1, 1, bias=False)
    linear.weight.data.fill_(1.0)
    model, optimizer = convert(linear, torch.optim.SGD(linear.parameters(), lr=lr), mode)
    for _ in range(20):
        optimizer.zero_grad()
        optimizer.backward(model(torch.ones(1, 1)).sum())
        optimizer.step()
    assert linear.weight.item() == pytest.approx(1 - 20 * lr, abs=3e-4 if lr == 1e-4 else 2e-3)


def test_the_loss_follows_float32():
    net, _ = make_net()
    twin = copy.deepcopy(net)
    tokens = torch.randint(11, (64,), generator=torch.Generator().manual_seed(1))

    def losses_of(model, optimizer, backward):
        losses = []
        for _ in range(30):
            optimizer.zero_grad()
            losses.append(nn.functional.cross_entropy(model(tokens, torch.ones(64, 1)), tokens))
            backward(losses[-1])
            optimizer.step()
        return [loss.item() for loss in losses]

    low, low_optimizer = convert(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    losses = losses_of(low, low_optimizer, low_optimizer.backward)
    expected = losses_of(twin, torch.optim.AdamW(twin.parameters(), lr=1e-2), torch.Tensor.backward)
    # 11 bits: 0.05 % per operation, some ten in a row, in forward and backward
    assert losses == pytest.approx(expected, rel=0.01)
    assert losses[-1] < 0.7 * losses[0]
    assert losses != expected


def test_the_scale_waits_shrinks_and_grows_within_bounds():
    scaler = NaiveFP16(
        initial_scale=16, min_scale=4, max_scale=32, growth_interval=2, hysteresis=2
    ).make_scaler()
    scales = []
    for stepped in [0, 0, 0, 0, 0, 1, 1, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1]:
        scaler.update(stepped=bool(stepped))
        scales.append(scaler.scale)
    # One overflow is forgiven, until a growth forgives another one; then between 4 and 32.
    assert scales == [16, 8, 4, 4, 4, 4, 8, 8, 4, 4, 8, 8, 16, 16, 32, 32, 32]


def test_a_loaded_scaler_remembers_its_overflows():
    scaler, twin = (NaiveFP16(initial_scale=16.0).make_scaler() for _ in range(2))
    scaler.update(stepped=False)
    twin.load_state_dict(scaler.state_dict())
    twin.update(stepped=False)
    assert twin.scale == 8.0


def test_zeros_are_counted_and_steps_told(capfd):
    linear = nn.Linear(4, 2, bias=False)
    model, optimizer = convert(
        linear, torch.optim.SGD(linear.parameters(), lr=0.1), log_num_zeros_in_grad=True, verbose=True
    )
    optimizer.backward(model(torch.tensor([[1.0, 0.0, 2.0, 0.0]])).sum())
    optimizer.step()
    assert "4 elements of the gradients are 0" in capfd.readouterr().err
    for _ in range(2):
        optimizer.zero_grad()
        optimizer.backward(model(torch.tensor([[float("inf"), 0, 0, 0]])).sum())
        optimizer.step()
    errors = capfd.readouterr().err
    assert errors.count("skipped for inf or nan in the gradient of 'weight' on rank 0") == 2
    assert "loss scale 256, now 128" in errors
    assert "elements" not in errors  # gradients with an overflow say nothing


@pytest.mark.parametrize("max_norm", [None, 0.01])
def test_gradients_are_true_when_they_are_looked_at(max_norm):
    linear = nn.Linear(2, 1, bias=False)
    model, optimizer = convert(linear, torch.optim.SGD(linear.parameters(), lr=1.0))
    (master,) = optimizer.param_groups[0]["params"]
    optimizer.backward(model(torch.tensor([[3.0, 4.0]])).sum())
    optimizer.scale_grads(0.5)
    if max_norm is not None:
        assert optimizer.clip_grad_by_norm(max_norm) == pytest.approx(2.5)
    expected = [1.5, 2.0] if max_norm is None else [0.006, 0.008]
    assert master.grad.view(-1).tolist() == pytest.approx(expected, rel=1e-3)
    optimizer.zero_grad()
    assert master.grad is None
    assert linear.weight.grad is None
    optimizer.backward(model(torch.tensor([[3.0, 4.0]])).sum())
    optimizer.zero_grad(set_to_none=False)
    assert linear.weight.grad.tolist() == [[0.0, 0.0]]


def test_gradients_accumulate_in_float32():
    linear = nn.Linear(1, 1, bias=False)
    masters = NaiveFP16().convert_model(linear, float32_grads=True)
    optimizer = torch.optim.SGD(linear.parameters(), lr=1.0)
    masters = masters.replace_params(optimizer)
    for value in [1.0, *[2.0**-12] * 4]:  # which float16 would round away, one by one
        linear(torch.full((1, 1), value, dtype=torch.float16)).float().sum().backward()
    masters.take_grads()
    (master,) = optimizer.param_groups[0]["params"]
    assert master.grad.item() == 1 + 2.0**-10
    assert master.grad is linear.weight.grad


def test_written_weights_reach_the_masters():
    net, raw = make_net()
    model, optimizer = convert(net, raw)
    train(model, optimizer)
    (master,) = [
        param for param in raw.param_groups[0]["params"] if optimizer.masters.param_of(param) is not param
    ]
    before = master.detach().clone()
    with torch.no_grad():
        net.embed.weight[0, :] = 0.25
    raw.param_groups[0]["lr"] = 0.0
    train(model, optimizer)
    assert master[0].tolist() == [0.25] * 8
    assert torch.equal(master[1:], before[1:])  # the digits that float16 does not have are still there


def test_schedulers_and_groups_go_on():
    net, _ = make_net()
    raw = torch.optim.SGD(
        [{"params": [net.embed.weight]}, {"params": list(net.norm.parameters()), "lr": 5.0}], lr=1.0
    )
    scheduler = torch.optim.lr_scheduler.LinearLR(raw, start_factor=0.5, total_iters=2)
    _, optimizer = convert(net, raw)
    optimizer.step()
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.75, 3.75]
    with pytest.raises(ValueError, match="added after boost or initialize"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


def test_states_made_before_the_door_stay():
    net, raw = make_net()
    nn.functional.cross_entropy(net(torch.arange(4), torch.ones(4, 1)), torch.arange(4)).backward()
    raw.step()
    kept = raw.state[net.embed.weight]
    model, optimizer = convert(net, raw)
    (master,) = [
        param for param in raw.param_groups[0]["params"] if optimizer.masters.param_of(param) is not param
    ]
    assert raw.state[master] is kept
    assert net.embed.weight not in raw.state
    train(model, optimizer)
    assert kept["step"] == 2


def by_name(optimizer):
    return {
        optimizer.param_names[param]: param for group in optimizer.param_groups for param in group["params"]
    }


def save_and_load_by_name(optimizer, other, path):
    with optimizer.for_checkpoint() as raw:
        checkpoint_io.save_optimizer(raw, path, param_names=optimizer.param_names)
    with other.for_checkpoint() as raw:
        checkpoint_io.load_optimizer(raw, path, param_names=other.param_names)


def save_and_load_by_number(optimizer, other, path):
    torch.save(optimizer.state_dict(), path)
    other.load_state_dict(torch.load(path))


@pytest.mark.parametrize("save_and_load", [save_and_load_by_name, save_and_load_by_number])
@pytest.mark.parametrize("num_steps", [0, 3])
@pytest.mark.parametrize("into", [AMP_TYPE.NAIVE, AMP_TYPE.BF16])
def test_masters_are_saved_and_loaded(tmp_path, save_and_load, num_steps, into):
    net, raw = make_net()
    model, optimizer = convert(net, raw)
    train(model, optimizer, num_steps)
    other_net = Net()
    other_raw = torch.optim.AdamW(other_net.parameters(), lr=1.0)
    other, other_optimizer, _ = convert_to_amp(other_net, other_raw, None, into)
    other_optimizer.scaler.scale = optimizer.scaler.scale
    save_and_load(optimizer, other_optimizer, tmp_path / "optimizer.pt")
    assert not any("master" in state for state in (*raw.state.values(), *other_raw.state.values()))
    saved, loaded = by_name(optimizer), by_name(other_optimizer)
    assert torch.equal(loaded["embed.weight"], saved["embed.weight"])  # all its float32 digits
    assert torch.equal(other_net.embed.weight.half(), net.embed.weight)
    other_net.load_state_dict(net.state_dict())
    if into is AMP_TYPE.NAIVE:
        train(model, optimizer)
        train(other, other_optimizer)
        for name, param in by_name(other_optimizer).items():
            assert torch.equal(param, by_name(optimizer)[name]), name


def test_a_state_without_masters_is_loaded():
    net, raw = make_net()
    model, optimizer, _ = convert_to_amp(net, raw, None, AMP_TYPE.BF16)
    train(model, optimizer, 2)
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    other_net = Net()
    _, other = convert(other_net, torch.optim.AdamW(other_net.parameters()))
    other_net.load_state_dict(net.state_dict())
    other.load_state_dict(torch.load(buffer))
    train(_, other)
    assert other.state[by_name(other)["embed.weight"]]["step"] == 3


def test_how_masters_of_bfloat16_are_asked_for():
    assert precision_of("bf16", {"master_weights": True}) == PureBF16()
    assert precision_of("bf16") == precision_of("bf16", {"master_weights": False}) == BF16Autocast()
    assert BF16MixedPrecision().precision() == mixed_precision_factory("bf16").precision() == BF16Autocast()
    assert mixed_precision_factory("bf16_master") == BF16MixedPrecision(master_weights=True)
    assert BF16MixedPrecision(master_weights=True).precision() == PureBF16()
    assert type(PureBF16().make_scaler()) is LossScaler
    check_config(Config(fp16={"mode": AMP_TYPE.BF16, "master_weights": True}), 1)
    with pytest.raises(ConfigException, match="master_weights is 1"):
        check_config(Config(fp16={"mode": AMP_TYPE.BF16, "master_weights": 1}), 1)


def test_options_are_the_documented_ones():
    choice = mixed_precision_factory("fp16_naive")
    assert choice == FP16NaiveMixedPrecision(
        log_num_zeros_in_grad=False,
        initial_scale=2**32,
        min_scale=1,
        growth_factor=2,
        backoff_factor=0.5,
        growth_interval=1000,
        hysteresis=2,
        max_scale=2**32,
        verbose=False,
    )
    assert choice.precision() == precision_of("naive") == NaiveFP16()
    assert isinstance(choice.precision().make_scaler(), DynamicLossScaler)
    assert mixed_precision_factory("fp16") != choice


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("hysteresis", 0),
        ("initial_scale", 2.0**40),
        ("initial_scale", 0.5),
        ("max_scale", 2.0),
        ("backoff_factor", 1),
        ("growth_factor", 0.5),
        ("growth_interval", 0),
    ],
)
def test_wrong_options_are_refused_at_both_doors(option, value):
    with pytest.raises(ConfigException, match=f"fp16.({option}|initial_scale)"):
        check_config(Config(fp16={"mode": AMP_TYPE.NAIVE, option: value}), 1)
    with pytest.raises(ValueError, match=option.removeprefix("initial_")):
        FP16NaiveMixedPrecision(**{option: value}).precision()


@pytest.mark.parametrize("option", ["verbose", "log_num_zeros_in_grad"])
def test_flags_of_a_config_are_flags(option):
    check_config(Config(fp16={"mode": AMP_TYPE.NAIVE, option: True}), 1)
    with pytest.raises(ConfigException, match=option):
        check_config(Config(fp16={"mode": AMP_TYPE.NAIVE, option: 1}), 1)
