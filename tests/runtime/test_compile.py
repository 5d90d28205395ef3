"""Compilation: in place, so that nothing gets another name; what cannot be compiled is said in a sentence."""

import copy
import math
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from colossalai.context import Config, ConfigException
from colossalai.pipeline import PipelineOptions
from colossalai.runtime import Plan, assemble
from colossalai.runtime.methods import CompiledBlocks
from colossalai.zero.gemini import Gemini

EAGER = {"backend": "eager"}

pytestmark = pytest.mark.dist


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return x + torch.tanh(self.inner(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Failing(Block):
    def forward(self, x):
        torch._dynamo.graph_break()
        return super().forward(x)


class Unsure(Block):
    def forward(self, x):
        raise KeyError("the user's own")


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def run(plan, mesh, model, **options):
    return assemble(plan, model, mesh=mesh, device=torch.device("cpu"), **options)[0]


def num_graphs():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_blocks_are_compiled_in_place(mesh):
    model = Net()
    names = list(model.state_dict())
    kinds = [type(part) for part in model.modules()]
    seen = []
    model.blocks[1].register_forward_hook(lambda part, args, result: seen.append(part))
    x = torch.randn(3, 4)
    expected = model(x)
    wrapped = run(Plan(compile=EAGER, recompute=["blocks.0", "blocks.2.inner"]), mesh, model)
    assert torch.equal(wrapped(x), expected)
    wrapped(x).sum().backward()
    assert num_graphs() >= 1
    assert seen == [model.blocks[1]] * 3  # before, and twice since: hooks run as they do without
    assert list(wrapped.state_dict()) == names == [name for name in model.state_dict() if "_orig" not in name]
    assert [type(part) for part in model.modules()] == kinds
    torch.manual_seed(0)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(strip_hooks(model)))):
        assert twin.blocks[1].forward._forward.__self__ is twin.blocks[1]  # not the model it is a copy of
        with torch.no_grad():
            twin.blocks[1].inner.weight.zero_()
        assert not torch.equal(twin(x), expected)
        assert torch.equal(model(x), expected)


def strip_hooks(model):
    model.blocks[1]._forward_hooks.clear()
    return model


def test_a_model_without_blocks_is_compiled_as_a_whole(mesh):
    model = Block()
    x = torch.randn(3, 4)
    expected = model(x)
    assert torch.equal(run(Plan(compile=EAGER), mesh, model)(x), expected)
    assert num_graphs() == 1
    assert list(vars(model)["_modules"]) == ["inner"]


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ("yes", "compile is 'yes'; it must be True, False or a dict"),
        ({"backnd": "eager"}, "compile has no key 'backnd': did you mean 'backend'"),
        ({"disable": True}, "compile has no key 'disable'"),
        ({"fullgraph": "yes"}, "compile.fullgraph is 'yes'"),
    ],
)
def test_wrong_options_are_named_by_the_plan(choice, words):
    with pytest.raises(ConfigException, match=words):
        Plan(compile=choice)
    with pytest.raises(ConfigException, match=words):
        Plan.from_config(Config(compile=choice))


def test_what_the_config_says_is_in_the_plan():
    assert Plan.from_config(Config(compile=True)).compile is True
    assert Plan.from_config(Config(compile=EAGER)).compile == EAGER
    assert Plan.from_config(Config(compile=False)) == Plan.from_config(Config())


def test_what_cannot_be_compiled_is_said(mesh, monkeypatch):
    with pytest.raises(
        ValueError,
        match=r"compile: torch.compile refuses its options: InvalidBackend: Invalid backend: 'none'",
    ):
        run(Plan(compile={"backend": "none"}), mesh, Net())
    with pytest.raises(ValueError, match=r"the model is a result of torch.compile.* compile=True to Booster"):
        run(Plan(), mesh, torch.compile(Net()))
    model = Net()
    model.blocks[1] = torch.compile(model.blocks[1])
    with pytest.raises(ValueError, match=r"the model's blocks\.1 is a result of torch.compile"):
        run(Plan(), mesh, model)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(
        ValueError, match=r"C\+\+ compiler on the CPU, and 'no-such-compiler' .*backend='aot_eager'"
    ):
        run(Plan(compile=True), mesh, Net())


def apply_to_ranks(axes, model, *, pipeline=None, tensor_axis=None):
    """Compile on one of several ranks, of which nothing but their numbers is asked."""
    sizes = {"dp": 1, **axes}
    ranks = SimpleNamespace(world_size=math.prod(sizes.values()), axes=sizes, axis_size=sizes.get)
    blocks, device = list(model.blocks), torch.device("cpu")
    job = SimpleNamespace(model=model, blocks=blocks, mesh=ranks, tensor_axis=tensor_axis, device=device)
    method = CompiledBlocks(EAGER, pipeline)
    method.validate(job)
    method.apply(job)


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v"])
def test_a_pipeline_that_splits_its_backward_is_refused(schedule):
    pipeline = PipelineOptions(num_microbatches=4, schedule=schedule)
    with pytest.raises(ValueError, match=f"compile and the schedule '{schedule}' cannot be combined"):
        apply_to_ranks({"pp": 2}, Net(), pipeline=pipeline)
    apply_to_ranks({"pp": 2}, Net(), pipeline=PipelineOptions(num_microbatches=4))


def test_chunks_and_compiled_forwards_are_refused_before_the_model_changes():
    with pytest.raises(ValueError, match=r"compile and Gemini cannot be combined.*leave compile out"):
        Plan(compile=EAGER, data=Gemini())
    model = Net()
    model.blocks[1].compile(backend="eager")
    with pytest.raises(ValueError, match=r"blocks\.1 was compiled by module\.compile\(\)"):
        Gemini().check(model, [], blocks=[], replicas=None)


def test_it_is_off_in_modes_that_communicate_inside_of_products(capfd):
    model = Net()
    apply_to_ranks({"row": 2, "col": 2}, model)
    assert "compile has no effect in this tensor mode" in capfd.readouterr().err
    assert not any("forward" in vars(block) for block in model.blocks)
    apply_to_ranks({"tp": 2}, model, tensor_axis=object())
    assert all("forward" in vars(block) for block in model.blocks)


def test_an_error_of_the_compiler_is_one_sentence(mesh):
    model = run(
        Plan(compile={"backend": "eager", "fullgraph": True}), mesh, nn.Sequential(Failing(), Failing())
    )
    with pytest.raises(RuntimeError, match="cannot compile '0', a Failing") as caught:
        model(torch.randn(3, 4))
    assert len(str(caught.value)) < 500
    assert "\n" not in str(caught.value)
    assert caught.value.__suppress_context__

    def ill(graph, inputs):
        raise OSError("first line\n" + 100 * "a long one\n")

    model = run(Plan(compile={"backend": ill}), mesh, Net())
    with pytest.raises(
        RuntimeError, match=r"'blocks\.0', a Block \(OSError: first line\): leave compile out"
    ):
        model(torch.randn(3, 4))


def test_errors_of_the_model_stay_what_they_are(mesh):
    model = run(Plan(compile=EAGER), mesh, Unsure())
    with pytest.raises(KeyError, match="the user's own"):
        model(torch.randn(3, 4))


def test_checkpoints_of_the_model_itself(mesh):
    class Own(Block):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False)

    x = torch.randn(3, 4)
    model = nn.Sequential(Own(), Own())
    expected = model(x)
    assert torch.equal(run(Plan(compile=EAGER), mesh, model)(x), expected)
