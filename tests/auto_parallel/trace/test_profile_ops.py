"""Profiles of operations are what FlopCounterMode and counted live bytes of real steps say."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from colossalai.auto_parallel.trace import _profile_ops
from colossalai.auto_parallel.trace._profile_ops import OpProfile, profile_operations, saved_bytes
from colossalai.auto_parallel.trace._trace import ModelTrace, trace_model
from tests.auto_parallel.trace.cases import (
    IN_TIERS,
    OF_TRANSFORMERS,
    built,
)
from tests.auto_parallel.trace.comparison import disagreements
from tests.tiers import further

pytestmark = pytest.mark.unit

ROWS, WIDTH = 3, 8


def profiled(model: nn.Module, arguments: Mapping[str, object]) -> tuple[ModelTrace, Mapping[str, OpProfile]]:
    trace = trace_model(model, arguments)
    return trace, profile_operations(trace)


def of(trace: ModelTrace, profiles: Mapping[str, OpProfile], target: str) -> OpProfile:
    """Return the profile of the one operation of a target."""
    (operation,) = (each for each in trace.operations if each.target == target)
    return profiles[operation.name]


@pytest.fixture(params=IN_TIERS)
def case(request) -> tuple[nn.Module, dict[str, Tensor]]:
    if request.param in OF_TRANSFORMERS:
        pytest.importorskip("transformers")
    return built(request.param)


def test_flops_and_bytes_of_models(case):
    model, arguments = case
    trace, profiles = profiled(model, arguments)
    assert disagreements(model, arguments, trace, profiles) == {}
    assert not any(each.is_assumed for each in profiles.values())


@pytest.mark.long
def test_attention_of_one_kernel_has_the_products_of_attention_by_parts():
    pytest.importorskip("transformers")
    fused, parts = (
        sum(each.forward_flops for each in profiled(*built(f"llama-{kind}"))[1].values())
        for kind in ("sdpa", "eager")
    )
    assert fused == parts


@pytest.fixture(scope="module")
def traced_gpt() -> tuple[nn.Module, dict[str, Tensor], ModelTrace]:
    model, arguments = built("zoo_gpt")
    return model, arguments, trace_model(model, arguments)


NOTHING_SAVED = {"saved": (), "extra_saved_bytes": 0}


@pytest.mark.parametrize(
    ("kind", "change", "found"),
    [
        ("dropout", lambda each: NOTHING_SAVED, {"kept", "peak"}),
        further("linear", lambda each: NOTHING_SAVED, {"kept", "peak"}),
        further("gelu", lambda each: NOTHING_SAVED, {"kept", "peak"}),
        ("layer_norm", lambda each: {"extra_saved_bytes": each.extra_saved_bytes + 2**16}, {"kept", "peak"}),
        ("linear", lambda each: {"gradients": ()}, {"peak"}),
        ("linear", lambda each: {"forward_flops": each.forward_flops - 1}, {"forward_flops"}),
        further("linear", lambda each: {"backward_flops": each.forward_flops}, {"backward_flops"}),
        ("scaled_dot_product_attention", lambda each: {"backward_flops": 0}, {"backward_flops"}),
    ],
)
def test_a_broken_rule_is_found(kind, change, found, traced_gpt, monkeypatch):
    """As if the costs of one kind of operation were taken wrongly."""
    model, arguments, trace = traced_gpt
    named, broken = _profile_ops._named, []

    def wrong(measured, operation, trace):
        profile = named(measured, operation, trace)
        if operation.target.split(".")[1] != kind:
            return profile
        broken.append(operation.name)
        return replace(profile, **change(profile))

    monkeypatch.setattr(_profile_ops, "_named", wrong)
    profiles = profile_operations(trace)
    assert broken, sorted({each.target for each in trace.operations})
    assert found <= set(disagreements(model, arguments, trace, profiles))


class TestLinear:
    def test_what_it_costs(self):
        trace, profiles = profiled(nn.Linear(WIDTH, 5), {"input": torch.rand(ROWS, WIDTH)})
        linear = of(trace, profiles, "aten.linear.default")
        product = 2 * ROWS * WIDTH * 5
        sizes = 4 * ROWS * WIDTH, 4 * WIDTH * 5, 4 * 5, 4 * ROWS * 5
        assert (linear.forward_flops, linear.backward_flops) == (product, product)
        assert linear.forward_bytes == sum(sizes)
        # Input and gradient are read for that of the weight, the gradient again for that of the bias.
        assert linear.backward_bytes == sizes[0] + sizes[3] + sizes[1] + sizes[3] + sizes[2]
        assert (linear.forward_peak, linear.backward_peak, linear.extra_saved_bytes) == (0, 0, 0)
        assert {trace.params.get(each.tensor): each.num_bytes for each in linear.gradients} == {
            "weight": sizes[1],
            "bias": sizes[2],
        }
        assert linear.saved == ("input",)  # its own gradient would need the weight
        assert saved_bytes(trace, profiles, trace.operations) == 0  # it was there before

    def test_a_gradient_of_its_input_is_a_second_product(self):
        given = torch.rand(ROWS, WIDTH, requires_grad=True)
        trace, profiles = profiled(nn.Linear(WIDTH, 5), {"input": given})
        linear = of(trace, profiles, "aten.linear.default")
        assert linear.backward_flops == 2 * linear.forward_flops
        assert set(linear.saved) == {"input", *(name for name in trace.params if "weight" in name)}

    def test_a_frozen_weight_needs_no_input(self):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5, bias=False))
        model[1].weight.requires_grad_(False)
        trace, profiles = profiled(model, {"input": torch.rand(ROWS, WIDTH)})
        second = profiles[trace.by_module("1")[0].name]
        assert [trace.params.get(name) for name in second.saved] == ["1.weight"]
        assert second.backward_flops == second.forward_flops

    def test_nothing_to_train_has_no_backward(self):
        model = nn.Linear(WIDTH, 5).requires_grad_(False)
        trace, profiles = profiled(model, {"input": torch.rand(ROWS, WIDTH)})
        linear = of(trace, profiles, "aten.linear.default")
        assert (linear.backward_flops, linear.backward_bytes, linear.saved, linear.gradients) == (
            0,
            0,
            (),
            (),
        )
        assert linear.forward_flops > 0


class Part(nn.Module):
    """A linear layer and a function behind it."""

    def __init__(self, function):
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)
        self.function = function

    def forward(self, x):
        return self.function(self.fc(x))


def profile_behind(function, target: str) -> tuple[ModelTrace, Mapping[str, OpProfile], OpProfile]:
    trace, profiles = profiled(Part(function), {"x": torch.rand(ROWS, WIDTH)})
    return trace, profiles, of(trace, profiles, target)


FULL = 4 * ROWS * WIDTH


@pytest.mark.parametrize(
    ("function", "target", "num_saved", "extra"),
    [
        (torch.tanh, "aten.tanh.default", 1, 0),
        (lambda x: x + 1, "aten.add.Tensor", 0, 0),
        (lambda x: x.t(), "aten.t.default", 0, 0),
        (lambda x: nn.functional.dropout(x, 0.5), "aten.dropout.default", 0, FULL),
        (lambda x: nn.functional.layer_norm(x, (WIDTH,)), "aten.layer_norm.default", 1, 2 * 4 * ROWS),
        (lambda x: x.softmax(-1), "aten.softmax.int", 1, 0),
        (lambda x: x * x, "aten.mul.Tensor", 1, 0),
    ],
)
def test_what_is_saved(function, target, num_saved, extra):
    _, _, profile = profile_behind(function, target)
    assert len(profile.saved) == num_saved
    assert profile.extra_saved_bytes == extra


def test_experts_are_grouped_products_whatever_the_model_runs():
    pytest.importorskip("transformers")
    from tests.shardformer.models import mixtral_of_eight

    model = mixtral_of_eight()
    trace = trace_model(model, {"input_ids": torch.zeros(8, 6, dtype=torch.long)})
    assert model.config._experts_implementation == "eager"
    assert trace.is_exact
    rows, width, inner = 8 * 6 * 2, model.config.hidden_size, model.config.intermediate_size
    products = [each for each in trace.operations if "grouped_mm" in each.target]
    assert len(products) == 2 * model.config.num_hidden_layers
    profiles = profile_operations(trace)
    for each, features in zip(products, (2 * inner, inner) * model.config.num_hidden_layers, strict=True):
        profile = profiles[each.name]
        assert profile.forward_flops == 2 * rows * width * features
        assert profile.backward_flops == 2 * profile.forward_flops


def test_a_view_moves_nothing_and_hands_its_gradient_on():
    trace, _, view = profile_behind(lambda x: x.view(-1), "aten.view.default")
    assert (view.forward_bytes, view.backward_bytes, view.forward_peak, view.backward_peak) == (0, 0, 0, 0)
    (gradient,) = view.gradients
    assert (gradient.num_bytes, gradient.same_as) == (0, trace.outputs[0])


def test_a_look_up_reads_the_rows_that_it_finds():
    trace, profiles = profiled(nn.Embedding(1000, WIDTH), {"input": torch.zeros(ROWS, dtype=torch.long)})
    embedding = of(trace, profiles, "aten.embedding.default")
    assert embedding.forward_bytes == 2 * FULL + 8 * ROWS
    assert [each.num_bytes for each in embedding.gradients] == [4 * 1000 * WIDTH]
    assert embedding.saved == ("input",)


def test_what_an_operation_takes_for_itself():
    """The scores and weights of attention by parts, of which the weights are saved."""

    def attend(x: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.5)

    rows = 64  # many more than a head's features
    scores = 4 * rows * rows
    for trains in (True, False):
        trace, profiles = profiled(Part(attend).requires_grad_(trains), {"x": torch.rand(rows, WIDTH)})
        profile = of(trace, profiles, "aten.scaled_dot_product_attention.default")
        if trains:  # the weights before and after dropout, and its mask
            assert 3 * scores <= profile.extra_saved_bytes < 4 * scores
            assert scores / 2 < profile.backward_peak < 3 * scores
        else:
            assert profile.extra_saved_bytes == profile.backward_peak == 0
            assert 2 * scores <= profile.forward_peak < 4 * scores


def test_no_grad_and_integers_save_nothing():
    def function(x: Tensor) -> Tensor:
        with torch.no_grad():
            weights = x.tanh()
        return x * weights.argmax()

    trace, profiles, tanh = profile_behind(function, "aten.tanh.default")
    argmax = of(trace, profiles, "aten.argmax.default")
    for profile in (tanh, argmax):
        assert (profile.saved, profile.gradients, profile.differentiable) == ((), (), ())
        assert profile.backward_bytes == 0
    assert of(trace, profiles, "aten.mul.Tensor").gradients


def test_what_is_written_into_requires_a_gradient_from_then_on():
    def function(x: Tensor) -> Tensor:
        whole = torch.zeros(ROWS, WIDTH)
        whole[:, :4] = x[:, :4]
        return whole.tanh()

    _, _, tanh = profile_behind(function, "aten.tanh.default")
    assert tanh.gradients


def test_autocast_keeps_the_copies_in_16_bits():
    with torch.autocast("cpu", torch.bfloat16):
        trace = trace_model(nn.Linear(WIDTH, 5), {"input": torch.rand(ROWS, WIDTH)})
    linear = of(trace, profile_operations(trace), "aten.linear.default")
    assert linear.extra_saved_bytes == 2 * ROWS * WIDTH
    assert trace.tensors[trace.outputs[0]].dtype == torch.bfloat16


def test_equal_operations_are_run_once(monkeypatch):
    runs = []
    measure = _profile_ops._measure
    monkeypatch.setattr(
        _profile_ops,
        "_measure",
        lambda each, *rest, **how: runs.append(each.name) or measure(each, *rest, **how),
    )
    counts = []
    for num_blocks in (2, 5):
        model = nn.Sequential(nn.Linear(4, WIDTH), *(Part(torch.tanh) for _ in range(num_blocks)))
        trace, profiles = profiled(model, {"input": torch.rand(ROWS, 4)})
        assert len(profiles) == len(trace.operations) == 2 * num_blocks + 1
        counts.append(len(runs))
        runs.clear()
    assert counts == [3, 3]


def test_saved_bytes_count_each_storage_once():
    trace, profiles = profiled(
        Part(lambda x: x.sin() + x.cos() + x.view(-1).exp().sum()), {"x": torch.rand(ROWS, WIDTH)}
    )
    # sin and cos save the output of the linear layer, exp its own.
    assert saved_bytes(trace, profiles, trace.operations) == 2 * FULL
    assert saved_bytes(trace, profiles, trace.by_module("fc")) == 0
    sines = [each for each in trace.operations if each.target in ("aten.sin.default", "aten.cos.default")]
    assert saved_bytes(trace, profiles, sines) == FULL


def test_an_operation_that_cannot_be_run_is_assumed_to_keep_its_tensors(capfd):
    trace = trace_model(Part(torch.tanh), {"x": torch.rand(ROWS, WIDTH)})
    linear, tanh = trace.operations
    odd = replace(trace, operations=(linear, replace(tanh, target="nobody.has.this")))
    profiles = profile_operations(odd)
    profile = profiles[tanh.name]
    assert profile.is_assumed
    assert profile.saved == (linear.outputs[0], tanh.outputs[0])
    assert (profile.forward_flops, profile.forward_bytes, profile.backward_bytes) == (0, 2 * FULL, 4 * FULL)
    assert [(each.tensor, each.num_bytes) for each in profile.gradients] == [(linear.outputs[0], FULL)]
    profile_operations(odd)
    assert capfd.readouterr().err.count("nobody.has.this cannot be profiled by itself") == 1
