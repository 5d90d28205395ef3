"""Buffers and inputs of models of 16 bits keep their float32 values, at every door."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import colossalai
from colossalai.amp import AMP_TYPE, ApexPrecision, NaiveFP16, PureBF16, apply_precision
from colossalai.booster import Booster
from colossalai.booster.plugin import (
    GeminiPlugin,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    TorchDDPPlugin,
)
from colossalai.context import global_context as gpc
from colossalai.runtime.methods._compile import CompiledForward
from tests.ranks import run_ranks

TIME = torch.tensor([999.0, 3.0])
CHUNKS = {"min_chunk_size_mb": 0.001, "search_range_mb": 0.001, "hidden_dim": 8}
DOORS = {
    "zero1 bf16": lambda: Booster(plugin=LowLevelZeroPlugin(stage=1, precision="bf16")),
    "zero2 fp16": lambda: Booster(plugin=LowLevelZeroPlugin(stage=2, precision="fp16")),
    "gemini bf16": lambda: Booster(plugin=GeminiPlugin(precision="bf16", **CHUNKS)),
    "gemini fp16": lambda: Booster(plugin=GeminiPlugin(precision="fp16", **CHUNKS)),
    "hybrid bf16": lambda: Booster(plugin=HybridParallelPlugin(zero_stage=1, precision="bf16_master")),
    "ddp bf16_master": lambda: Booster(plugin=TorchDDPPlugin(), mixed_precision="bf16_master"),
    "ddp fp16_naive": lambda: Booster(plugin=TorchDDPPlugin(), mixed_precision="fp16_naive"),
}
MODES = {"naive": {"mode": AMP_TYPE.NAIVE}, "bf16": {"mode": AMP_TYPE.BF16, "master_weights": True}}


class Rotation(nn.Module):
    """Rotary positions of the kind that is written without a thought for dtypes."""

    def __init__(self, dim=8):
        super().__init__()
        angles = torch.outer(torch.arange(2000.0), torch.logspace(0, -3, dim // 2)).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin())

    def forward(self, q, positions):
        halves = q.chunk(2, dim=-1)
        return q * self.cos[positions] + torch.cat([-halves[1], halves[0]], dim=-1) * self.sin[positions]


class TimeNet(nn.Module):
    def __init__(self, dim=8):
        super().__init__()
        self.register_buffer("frequencies", torch.logspace(0, -4, dim // 2))
        self.register_buffer("average", torch.full((dim,), 1000.0))
        self.rotation = Rotation(dim)
        self.layer = nn.Linear(dim, dim)
        self.norm = nn.LayerNorm(dim)
        self.dtypes = []

    def forward(self, time, x):
        phase = time[:, None] * self.frequencies
        self.dtypes = [time.dtype, phase.dtype, self.frequencies.dtype, x.dtype]
        h = self.layer(torch.cat([torch.sin(phase), torch.cos(phase)], dim=1)) + x
        q = self.rotation(self.norm(h), torch.tensor([0, 1999]))
        attention = nn.functional.scaled_dot_product_attention(q[None], q[None], h[None])
        self.dtypes += [h.dtype, q.dtype, attention.dtype]
        with torch.no_grad():
            self.average.add_(h.detach().mean(0), alpha=0.01)
        return torch.sin(phase).float(), attention


def build():
    torch.manual_seed(0)
    model = TimeNet()
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(param.to(torch.bfloat16))  # so that 16 bits hold them
    return model, torch.randn(2, 8)


def check_door(call, model, backward, optimizer, dtype):
    """Take a step; all that a rank sees of the model's buffers and inputs keeps its values."""
    whole, x = build()
    sine, right = whole(TIME, x)
    found_sine, found = call(TIME, x)
    backward(found.square().mean())
    optimizer.step()
    assert found_sine.equal(sine)
    assert (found.float() - right).norm() / right.norm() < 0.02
    assert set(model.dtypes) == {dtype}
    assert {buffer.dtype for buffer in model.buffers()} == {torch.float32}
    # 0.01 of the mean is far below the distance of 1000 to its neighbour in 16 bits.
    moved = dict(model.named_buffers())["average"] - 1000
    assert torch.allclose(moved, whole.average - 1000, rtol=0.1, atol=2e-3)
    assert moved.abs().max() > 1e-3
    assert model.rotation.sin.float().equal(whole.rotation.sin)


def boost_and_check(name):
    colossalai.launch_from_torch({}, verbose=False)
    booster = DOORS[name]()
    model, _ = build()
    boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    dtype = torch.float16 if "fp16" in name else torch.bfloat16
    backward = partial(booster.backward, optimizer=optimizer)
    check_door(boosted, boosted.unwrap(), backward, optimizer, dtype)


@pytest.mark.dist
@pytest.mark.parametrize("name", DOORS)
def test_every_plugin(name):
    run_ranks(boost_and_check, 2, name)


def initialize_and_check(mode):
    colossalai.launch_from_torch({"fp16": MODES[mode]}, verbose=False)
    model, _ = build()
    engine, *_ = colossalai.initialize(
        model, torch.optim.SGD(model.parameters(), lr=0.1), nn.MSELoss(), verbose=False
    )
    dtype = torch.float16 if mode == "naive" else torch.bfloat16
    check_door(engine, model, engine.backward, engine, dtype)


@pytest.mark.dist
@pytest.mark.parametrize("mode", MODES)
def test_the_config(mode):
    run_ranks(initialize_and_check, 2, mode)


def converted(precision, model):
    precision.convert_model(model, float32_grads=True)
    return apply_precision(model, precision, "cpu")


@pytest.mark.unit
@pytest.mark.parametrize("precision", [PureBF16(), NaiveFP16()])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputation(precision, use_reentrant):
    """A function that is recomputed reads buffers outside of the forward."""
    grads = []
    for recomputes in (False, True):
        net, x = build()
        model = converted(precision, net)
        if recomputes:
            forward = net.forward
            net.forward = lambda *args, forward=forward: checkpoint(
                forward, *args, use_reentrant=use_reentrant
            )
        x.requires_grad_()
        model(TIME, x)[1].square().sum().backward()
        grads.append([x.grad, *(param.grad for param in net.parameters())])
        assert {grad.dtype for grad in grads[-1]} == {torch.float32}
    assert all(a.equal(b) for a, b in zip(*grads, strict=True))


@pytest.mark.unit
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("part", ["rotation", ""])
def test_compilation(backend, part):
    net, x = build()
    plain = converted(PureBF16(), copy.deepcopy(net))
    model = converted(PureBF16(), net)
    compiled = net.get_submodule(part)
    compiled.forward = CompiledForward(compiled.forward, {"backend": backend}, part)
    outputs = [each(TIME, x) for each in (plain, model)]
    assert outputs[1][0].equal(outputs[0][0])
    assert torch.allclose(outputs[1][1], outputs[0][1], rtol=0.02, atol=0.02)
    assert {type(buffer) for buffer in net.buffers()} == {torch.Tensor}


class CallsCompiled(nn.Module):
    """A model that calls a compiled function of its user's, with an input and a buffer."""

    def __init__(self, backend):
        super().__init__()
        self.register_buffer("frequencies", torch.logspace(0, -4, 4))
        self.layer = nn.Linear(4, 4)
        self.sine = torch.compile(lambda time, table: torch.sin(time[:, None] * table), backend=backend)

    def forward(self, time):
        sine = self.sine(time, self.frequencies)
        return sine.float(), self.layer(sine)


@pytest.mark.unit
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_functions(backend):
    net = CallsCompiled(backend)
    right = torch.sin(TIME[:, None] * net.frequencies)
    sine, output = converted(PureBF16(), net)(TIME)
    assert torch.allclose(sine, right, atol=1e-6)
    assert output.requires_grad


class FirstNormalized(nn.Module):
    """Batch normalization, which has float32 parameters, takes the input, and a convolution its output."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.layer = nn.Conv1d(3, 2, 1)

    def forward(self, x):
        return self.layer(self.norm(x))


@pytest.mark.unit
def test_layers_take_inputs_in_16_bits():
    net = FirstNormalized()
    model = converted(PureBF16(), net)
    seen = []
    net.norm.register_forward_hook(lambda layer, args, output: seen.append((type(args[0]), output.dtype)))
    assert model(torch.randn(4, 3, 5)).dtype == torch.float32
    assert seen == [(torch.Tensor, torch.bfloat16)]
    assert type(net.norm.running_mean) is torch.Tensor
    assert net.norm.running_mean.dtype == torch.float32


@pytest.mark.unit
def test_levels_of_apex_cast_buffers_and_inputs():
    net, x = build()
    model = converted(ApexPrecision(opt_level="O2"), net)
    sine, _ = model(TIME, x)
    assert not sine.equal(build()[0](TIME, x)[0])
    assert {buffer.dtype for buffer in net.buffers()} == {torch.float16}


class TimedStage(nn.Module):
    """A stage that takes the time of the batch, and returns it among its activations, too."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.seen = []

    def forward(self, h, time, passed=None):
        passed = time if passed is None else passed
        self.seen.append((torch.sin(time).float(), type(passed), passed.dtype, torch.sin(passed).float()))
        return {"h": self.layer(h), "passed": passed}


def run_pipeline():
    config = {"parallel": {"pipeline": 2}, "NUM_MICRO_BATCHES": 2, "fp16": MODES["bf16"]}
    colossalai.launch_from_torch(config, verbose=False)
    stage = TimedStage()
    engine, *_ = colossalai.initialize(
        stage,
        torch.optim.SGD(stage.parameters(), lr=0.1),
        lambda output, label: output["h"].square().mean(),
        verbose=False,
    )
    time = torch.full((4,), 999.0)
    engine.execute_schedule(iter([({"h": torch.randn(4, 4), "time": time}, torch.zeros(4))]))
    first, *_ = zip(*stage.seen, strict=True)
    assert all(each.equal(torch.sin(time[:2])) for each in first)
    if gpc.mesh.axis("pp").rank == 1:  # activations between stages are ordinary tensors of 16 bits
        _, kind, dtype, sine = stage.seen[0]
        assert (kind, dtype) == (torch.Tensor, torch.bfloat16)
        assert sine.equal(torch.sin(torch.full((2,), 1000.0, dtype=dtype)).float())


@pytest.mark.dist
def test_stages_of_a_pipeline():
    run_ranks(run_pipeline, 2)
