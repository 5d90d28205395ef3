"""A trace has the operations of the user's model by its modules, and leaves the model as it was."""

import copy
import os
import random
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from colossalai.auto_parallel.trace._trace import (
    InputSlot,
    ModelTrace,
    TensorMeta,
    repeated_blocks,
    trace_model,
)
from colossalai.context import Mesh
from colossalai.lazy import LazyInitContext
from tests.auto_parallel.trace.cases import IN_TIERS, OF_TRANSFORMERS, SEQ, built, gpt2

pytestmark = pytest.mark.unit


class Branches(nn.Module):
    """Views, changes in place, a region without gradients, a norm with statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.act = nn.ReLU(inplace=True)
        self.last = None

    def forward(self, x: Tensor, scale: float = 2.0, *, shift: Tensor | None = None) -> tuple[Tensor, Tensor]:
        hidden = self.act(self.norm(self.fc(x)))
        with torch.no_grad():
            mean = hidden.mean()
        left, right = hidden.chunk(2, dim=-1)
        self.last = left
        return (left * right.t().t() * scale - mean), hidden.detach()


class Cached(nn.Module):
    """Returns an object that torch.export does not know."""

    class Cache:
        """What it returns."""

        def __init__(self, keys: Tensor) -> None:
            self.keys = keys

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> tuple["Cached.Cache", Tensor]:
        hidden = self.drop(self.fc(x))
        return self.Cache(hidden), hidden.view(2, -1).sum()


class Picks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[x.sum(-1) > 0]


class Decides(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x


def of(trace: ModelTrace, target: str) -> list[str]:
    return [each.name for each in trace.operations if each.target == target]


@pytest.fixture(scope="module")
def branches() -> ModelTrace:
    return trace_model(Branches(), {"x": torch.rand(3, 4)})


@pytest.mark.parametrize("name", IN_TIERS)
def test_every_operation_has_its_module(name):
    if name in OF_TRANSFORMERS:
        pytest.importorskip("transformers")
    model, arguments = built(name)
    trace = trace_model(model, arguments)
    assert trace.is_exact
    modules = dict(model.named_modules())
    assert all(each.module in modules for each in trace.operations)
    # Its modules with parameters are all met, and each product is from the layer whose weight it takes.
    met = {each.module for each in trace.operations}
    layers = {name for name, part in modules.items() if isinstance(part, nn.Linear | nn.Conv2d)}
    assert layers <= met
    for each in trace.operations:
        if each.target == "aten.linear.default":
            weight = trace.params[each.inputs[1]]
            assert modules[each.module].weight is model.get_parameter(weight)
    assert set(trace.params.values()) == {name for name, _ in model.named_parameters(remove_duplicate=False)}
    assert set(trace.buffers.values()) == {name for name, _ in model.named_buffers()}


def test_operations(branches):
    (linear,) = (each for each in branches.operations if each.target == "aten.linear.default")
    assert linear.module == "fc"
    assert [branches.params.get(name) for name in linear.inputs] == [None, "fc.weight", "fc.bias"]
    assert linear.arguments == (
        ("input", InputSlot(0)),
        ("weight", InputSlot(1)),
        ("bias", InputSlot(2)),
    )
    (mean,) = (each for each in branches.operations if each.target == "aten.mean.default")
    assert not mean.is_grad_enabled
    assert all(each.is_grad_enabled for each in branches.operations if each is not mean)
    (chunk,) = (each for each in branches.operations if each.target == "aten.chunk.default")
    assert chunk.scalars == (2, -1)
    assert chunk.argument("chunks") == 2
    assert len(chunk.outputs) == 2
    assert branches.tensors[chunk.outputs[0]] == TensorMeta((3, 2), torch.float32, (4, 1))
    assert branches.tensors[linear.outputs[0]].num_bytes == 3 * 4 * 4
    assert branches.inputs == ("x",)
    assert [branches.tensors[name].shape for name in branches.outputs] == [(3, 2), (3, 4)]
    assert branches.by_module("norm") == tuple(each for each in branches.operations if each.module == "norm")
    assert branches.by_module("") == branches.operations
    assert branches.producers[linear.outputs[0]] is linear
    assert [each.target for each in branches.consumers[linear.outputs[0]]] == ["aten.batch_norm.default"]


def test_views_and_changes_in_place_lie_in_the_storage_of_another(branches):
    (norm,) = of(branches, "aten.batch_norm.default")
    (linear,) = of(branches, "aten.linear.default")
    (chunk,) = (each for each in branches.operations if each.target == "aten.chunk.default")
    (relu,) = of(branches, "aten.relu_.default")
    (detach,) = of(branches, "aten.detach.default")
    for view in (relu, detach, *chunk.outputs):
        assert branches.storage_of(view) == norm
    assert branches.storage_of(norm) == norm
    assert branches.storage_of(linear) == linear


def test_a_tied_parameter_is_there_under_each_name():
    pytest.importorskip("transformers")
    trace = trace_model(*built("gpt2-sdpa"))
    names = {full: name for name, full in trace.params.items()}
    tied = {trace.storage_of(names[full]) for full in ("transformer.wte.weight", "lm_head.weight")}
    assert len(tied) == 1
    assert trace.storage_of(names["transformer.wpe.weight"]) not in tied


@pytest.mark.parametrize("rate", [0.0, 0.5])
@pytest.mark.parametrize("training", [True, False])
def test_dropout_that_drops_nothing_is_its_input(rate, training):
    trace = trace_model(nn.Sequential(nn.Tanh(), nn.Dropout(rate)).train(training), {"input": torch.rand(3)})
    (tanh,) = of(trace, "aten.tanh.default")
    for name in of(trace, "aten.dropout.default"):
        assert (trace.storage_of(name) == tanh) == (not training or not rate)


def test_nothing_of_the_model_is_changed():
    model = Branches()
    model.norm.register_forward_hook(lambda *args: None)
    kept = copy.deepcopy(model)
    hooks = {name: list(part._forward_hooks) for name, part in model.named_modules()}
    identities = {name: id(each) for name, each in [*model.named_parameters(), *model.named_buffers()]}
    good, bad = torch.rand(3, 4), torch.rand(3, 5)
    states = torch.get_rng_state(), random.getstate()
    trace_model(model, {"x": good})
    with pytest.raises(ValueError, match="fails"):
        trace_model(model, {"x": bad})
    assert all(torch.equal(each, kept.state_dict()[name]) for name, each in model.state_dict().items())
    assert identities == {
        name: id(each) for name, each in [*model.named_parameters(), *model.named_buffers()]
    }
    assert hooks == {name: list(part._forward_hooks) for name, part in model.named_modules()}
    assert model.last is None
    assert not any(part._forward_pre_hooks for part in model.modules())
    assert "forward" not in vars(model)
    assert all(param.grad is None for param in model.parameters())
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert not torch.compiler.is_exporting()
    assert torch._C._len_torch_function_stack() == 0


def test_random_states_are_kept_where_a_forward_draws():
    class Draws(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            torch.manual_seed(random.randrange(1000))
            return x + torch.rand(3)

    states = torch.get_rng_state(), random.getstate()
    trace_model(Draws(), {"x": torch.rand(3, generator=torch.Generator())})
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]


def test_models_without_memory_have_the_same_trace():
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 6), nn.LSTM(6, 2))

    real = make()
    with torch.device("meta"):
        on_meta = make()
    with LazyInitContext():
        lazy = make()
    arguments = {"input": torch.rand(3, 4)}
    digests = {
        trace_model(model, {"input": given}).digest
        for model in (real, on_meta, lazy)
        for given in (arguments["input"], arguments["input"].to("meta"))
    }
    assert len(digests) == 1
    assert real[0].weight.device.type == "cpu"
    assert on_meta[0].weight.device.type == "meta"


def test_the_digest_tells_shapes_and_modes_apart():
    digests = [
        trace_model(
            nn.Sequential(nn.Linear(4, size), nn.Dropout(rate)), {"input": torch.rand(rows, 4)}
        ).digest
        for size, rate, rows in [(4, 0.1, 3), (5, 0.1, 3), (4, 0.2, 3), (4, 0.1, 2), (4, 0.1, 3)]
    ]
    assert len(set(digests)) == 4
    assert digests[0] == digests[4]
    frozen = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1))
    frozen[0].weight.requires_grad_(False)
    assert trace_model(frozen, {"input": torch.rand(3, 4)}).digest not in digests


@pytest.mark.long  # plan/test_same_plan.py makes whole plans in two processes
def test_two_processes_have_the_same_digest():
    code = (
        "from tests.auto_parallel.trace.cases import built\n"
        "from colossalai.auto_parallel.trace._trace import trace_model\n"
        "print(trace_model(*built('zoo_gpt')).digest)"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert digests == {trace_model(*built("zoo_gpt")).digest + "\n"}


def test_values_that_do_not_depend_on_arguments_are_known():
    """A Llama attends without a mask in training, and in its trace; torch.export alone sees one."""
    pytest.importorskip("transformers")
    trace = trace_model(*built("llama-sdpa"))
    attentions = [each for each in trace.operations if "scaled_dot_product_attention" in each.target]
    assert len(attentions) == 2
    assert all(each.argument("is_causal") and each.argument("attn_mask") is None for each in attentions)


def test_a_cache_is_refused_to_a_model_that_would_keep_one():
    pytest.importorskip("transformers")
    model = gpt2()
    assert model.config.use_cache
    ids = torch.zeros(2, SEQ, dtype=torch.long, device="meta")
    trace = trace_model(model, {"input_ids": ids})
    assert trace.is_exact
    assert len(trace.outputs) == 1  # logits, and no keys and values


def test_a_checkpointed_part_is_seen_once():
    class Recomputing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.fc, x, use_reentrant=False)

    trace = trace_model(Recomputing(), {"x": torch.rand(3, 4)})
    assert [(each.target, each.module) for each in trace.operations] == [("aten.linear.default", "fc")]


def test_autocast_is_noted():
    class Casts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                x = self.inner(x)
            return self.outer(x.float())

    trace = trace_model(Casts(), {"x": torch.rand(3, 4)})
    kinds = {each.module: each.autocast for each in trace.operations if each.module}
    assert kinds == {"inner": torch.bfloat16, "outer": None}
    with torch.autocast("cpu", torch.bfloat16):
        trace = trace_model(Casts(), {"x": torch.rand(3, 4)})
    assert {each.autocast for each in trace.operations} == {torch.bfloat16}


def test_no_grad_around_the_call_does_not_matter():
    with torch.no_grad():
        trace = trace_model(nn.Linear(4, 4), {"input": torch.rand(3, 4)})
    assert all(each.is_grad_enabled for each in trace.operations)


class TestModelThatDoesNotExport:
    @pytest.fixture
    def trace(self) -> ModelTrace:
        return trace_model(Cached(), {"x": torch.rand(3, 4)})

    def test_its_run_is_recorded(self, trace, capfd):
        assert not trace.is_exact
        targets = [(each.target, each.module) for each in trace.operations]
        assert ("aten.addmm.default", "fc") in targets
        assert "drop" in {module for _, module in targets}
        assert targets[-1] == ("aten.sum.default", "")
        (addmm,) = of(trace, "aten.addmm.default")
        (transposed,) = of(trace, "aten.t.default")
        assert trace.params[trace.storage_of(transposed)] == "fc.weight"
        assert trace.storage_of(addmm) == addmm
        shapes = [trace.tensors[name].shape for name in trace.outputs]
        assert shapes == [(3, 4), ()]  # what the object holds is returned too

    def test_it_is_said_once(self, capfd):
        class Other(Cached):
            pass

        first = trace_model(Other(), {"x": torch.rand(3, 4)})
        second = trace_model(Other(), {"x": torch.rand(3, 4)})
        assert capfd.readouterr().err.count("Other does not export") == 1
        assert first.digest == second.digest

    def test_what_requires_a_gradient_is_one_tensor_with_its_view(self, trace):
        """Autograd's own detach of a view is no operation; a user's detach is."""

        class Detaches(Cached):
            def forward(self, x: Tensor) -> tuple[Cached.Cache, Tensor]:
                hidden = self.fc(x)
                return self.Cache(hidden), hidden.view(-1).detach() * hidden.view(-1)

        assert not of(trace, "aten.detach.default")
        assert len(of(trace_model(Detaches(), {"x": torch.rand(3, 4)}), "aten.detach.default")) == 1


class TestEqualBlocks:
    @pytest.mark.parametrize("name", ["gpt2-sdpa", "llama-eager", "zoo_gpt", "vit"])
    def test_blocks_of_transformers(self, name):
        if name in OF_TRANSFORMERS:
            pytest.importorskip("transformers")
        model, arguments = built(name)
        trace = trace_model(model, arguments)
        (found,) = repeated_blocks(trace, model)
        assert len(found.names) == 2
        assert found.operations == tuple(map(trace.by_module, found.names))
        for first, second in zip(*found.operations, strict=True):
            assert first.target == second.target
            assert first.module.removeprefix(found.names[0]) == second.module.removeprefix(found.names[1])
            shapes = [[trace.tensors[name] for name in each.outputs] for each in (first, second)]
            assert shapes[0] == shapes[1]

    def test_blocks_that_differ_are_not_equal(self):
        model, arguments = built("resnet")
        found = repeated_blocks(trace_model(model, arguments), model)
        # Where channels double, the first of two has a shortcut with parameters.
        assert [each.names for each in found] == [("blocks.0", "blocks.1")]

    @pytest.mark.parametrize("change", ["size", "function", "frozen", "wiring"])
    def test_one_difference_is_enough(self, change):
        class Block(nn.Module):
            def __init__(self, number: int) -> None:
                super().__init__()
                differs = number == 1
                self.wide = nn.Linear(4, 6 if differs and change == "size" else 5)
                self.narrow = nn.Linear(self.wide.out_features, 4)
                self.act = torch.sigmoid if differs and change == "function" else torch.tanh
                self.adds_first = differs and change == "wiring"
                self.narrow.bias.requires_grad_(not (differs and change == "frozen"))

            def forward(self, x: Tensor) -> Tensor:
                hidden = self.narrow(self.act(self.wide(x)))
                return x + (x if self.adds_first else hidden)

        model = nn.Sequential(*(Block(number) for number in range(4)))
        (found,) = repeated_blocks(trace_model(model, {"input": torch.rand(3, 4)}), model)
        assert found.names == ("0", "2", "3")


@pytest.mark.parametrize(
    ("model", "arguments", "message"),
    [
        (Branches(), {}, r"meta_args lacks 'x', which the forward of Branches requires: give meta_args="),
        (Branches(), {"x": torch.rand(3, 4), "skale": 1.0}, r"names 'skale', .* does not have: use 'scale'"),
        (Branches(), {"x": torch.rand(3, 4), "q": 1.0}, r"names 'q', .*: use 'x' or 'scale' or 'shift'"),
        (Branches(), {"x": torch.rand(3, 5)}, r"the forward of Branches fails with these meta_args: Runtime"),
        (
            nn.Sequential(nn.Linear(4, 4), Picks()),
            {"input": torch.rand(3, 4)},
            r"aten\.index\.Tensor in module '1' of Sequential depends on the values of tensors",
        ),
        (
            nn.Sequential(nn.Linear(4, 4), Decides()),
            {"input": torch.rand(3, 4)},
            r"aten\._local_scalar_dense\.default in module '1' of Sequential depends on the values",
        ),
        (nn.Sequential(nn.LazyLinear(4)), {"input": torch.rand(3, 4)}, r"'0\.weight' has no shape yet"),
    ],
)
def test_refusals(model, arguments, message, capfd):
    """Torch's dump of the graph so far is not printed."""
    with pytest.raises(ValueError, match=message):
        trace_model(model, arguments)
    assert "def forward" not in "".join(capfd.readouterr())


class Speaks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        print("heard", file=sys.stderr)
        return x if x.sum() > 0 else -x


def test_what_a_model_prints_is_kept(capsys):
    with pytest.raises(ValueError, match="depends on the values of tensors"):
        trace_model(Speaks(), {"x": torch.rand(3, 4)})
    assert "heard" in capsys.readouterr().err


def test_a_name_that_is_nearly_right_is_refused_by_a_forward_that_takes_any():
    pytest.importorskip("transformers")
    ids = torch.zeros(2, SEQ, dtype=torch.long)
    with pytest.raises(ValueError, match=r"names 'label', .* does not have: use 'labels'"):
        trace_model(gpt2(), {"input_ids": ids, "label": ids})


def test_what_a_t5_lacks_is_named():
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(num_layers=1, d_model=8, d_ff=8, num_heads=2, d_kv=4, vocab_size=10)
    ids = torch.zeros(2, 4, dtype=torch.long)
    with pytest.raises(ValueError, match="decoder_start_token_id"):
        trace_model(transformers.T5ForConditionalGeneration(config), {"input_ids": ids, "labels": ids})


class OnMesh(nn.Module):
    """Asks a mesh for an axis, as layers do that communicate; the mesh makes it when it is first asked."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.mesh = nn.Linear(4, 4), Mesh({"dp": 2, "tp": 2}, rank=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) / self.mesh.axis("dp").size


def test_a_mesh_that_is_asked_first_leaves_no_operation() -> None:
    model, given = OnMesh(), {"x": torch.zeros(4, 4)}
    digests = [trace_model(model, given).digest for _ in range(2)]
    assert digests[0] == digests[1]
