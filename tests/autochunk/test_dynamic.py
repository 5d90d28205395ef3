"""Chunked models for lengths that change."""

import copy
import json
import pickle
from collections import OrderedDict
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from colossalai.autochunk import ChunkPlan, DynamicChunkedModule, _module, _trace, autochunk
from tests.autochunk.models import EagerBlock, model_of, random
from tests.autochunk.test_models import check, counted

pytestmark = pytest.mark.unit

SEQ = Dim("seq", max=128)
X = random(2, 64, 32)


def masked(num_sequences: int, num_residues: int) -> dict[str, Tensor]:
    """Return arguments of the Evoformer of the tests."""
    exists = torch.arange(num_residues) < num_residues - 2
    return {
        "msa": random(1, num_sequences, num_residues, 16),
        "pair": random(1, num_residues, num_residues, 8),
        "msa_mask": exists.expand(1, num_sequences, num_residues),
        "pair_mask": (exists & exists[:, None])[None],
    }


def sample(height: int, width: int) -> dict[str, Any]:
    """Return arguments of the U-Net of the tests."""
    context = random(1, 7, 16)
    sizes = {"encoder_hidden_states": context, "return_dict": False}
    return {"sample": random(1, 4, height, width), "timestep": torch.tensor(5), **sizes}


S, R = Dim("sequences"), Dim("residues")
PAIR = {1: R, 2: R}
CASES: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "eager": ({"input": {0: Dim("batch"), 1: SEQ}}, [{"input": random(3, 51, 32)}]),
    "gpt": ({"input_ids": {1: Dim("seq", max=96)}}, [{"input_ids": torch.randint(0, 40, (2, 77))}]),
    "gpt2-sdpa": (
        {"input_ids": {0: Dim("batch"), 1: Dim("seq", max=96)}},
        [{"input_ids": torch.randint(0, 40, (3, 37)), "use_cache": False}],
    ),
    "evoformer": (
        {"msa": {1: S, 2: R}, "pair": PAIR, "msa_mask": {1: S, 2: R}, "pair_mask": PAIR},
        [masked(6, 13), masked(11, 9)],
    ),
    "unet": ({"sample": {2: Dim.AUTO, 3: Dim.AUTO}}, [sample(12, 20), sample(14, 14)]),
}


@pytest.mark.parametrize("name", [*[*CASES][:-1], pytest.param("unet", marks=pytest.mark.long)])
def test_lengths(name: str) -> None:
    """Each length has the model's results, and a plan within the budget of the example."""
    model, arguments = model_of(name)
    dynamic_shapes, calls = CASES[name]
    chunked = autochunk(model, arguments, memory_ratio=0.7, dynamic_shapes=dynamic_shapes)
    check(model, chunked, arguments)
    assert chunked.plan.regions
    for call in calls:
        expected, _ = counted(model, call)
        found, peak = counted(chunked, call)
        for mine, other in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-10)
        assert peak == chunked.plan_for(**call).peak <= chunked.plan.memory_budget
    assert chunked.plan_for(**arguments) == chunked.plan
    planned = [each for each, _ in chunked._planned.values()]
    for graph in (chunked._symbolic.graph, chunked._symbolic.static, *(each.graph for each in planned)):
        assert not any("val" in node.meta for node in graph.nodes)  # fake tensors


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return model_of("eager")[0]


@pytest.fixture(scope="module")
def chunked(model: nn.Module) -> DynamicChunkedModule:
    return autochunk(model, X, memory_ratio=0.4, dynamic_shapes={"input": {0: Dim("batch"), 1: SEQ}})


def test_plans(model: nn.Module, chunked: DynamicChunkedModule) -> None:
    """A plan of the example's lengths gives the same module, with its budget for the others."""
    plan = ChunkPlan.from_json(chunked.plan.to_json())
    again = autochunk(model, X, plan=plan, dynamic_shapes=({0: Dim("batch"), 1: SEQ},))
    assert again.plan == chunked.plan
    torch.testing.assert_close(again(X), chunked(X), rtol=0, atol=0)
    shorter = X[:, :40]
    assert again.plan_for(shorter) == chunked.plan_for(shorter)
    assert chunked.plan_for(X[:, :8]).regions == ()  # few positions need no chunks
    assert autochunk(model, X, plan=plan).plan == plan  # that of a static trace
    static = autochunk(model, shorter, chunked.plan.memory_budget)
    assert [each.size for each in static.plan.regions] == [
        each.size for each in chunked.plan_for(shorter).regions
    ]


def test_lengths_that_do_not_fit(model: nn.Module, chunked: DynamicChunkedModule) -> None:
    """Lengths out of the range or beyond the budget are refused; others still work."""
    for x, message in [
        (random(2, 129, 32), "seq is 129; this model was chunked for at least 2 and at most 128$"),
        (random(1, 64, 32), "batch is 1; this model was chunked for at least 2$"),
        (random(2, 0, 32), "seq is 0"),
        (random(2, 64, 31), r"shape \(batch, seq, 32\) and torch.float64, but .* \(2, 64, 31\)"),
        (random(64, 32), r"shape \(batch, seq, 32\) and torch.float64, but .* \(64, 32\)"),
        (random(9, 100, 32), r"smallest possible budget is .* of shape \(9, "),
    ]:
        for _ in range(2):
            with pytest.raises(ValueError, match=message):
                chunked(x)
    torch.testing.assert_close(chunked(X), model(X), rtol=1e-10, atol=1e-10)


class Paired(nn.Module):
    """Layers whose operations depend on lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.block = EagerBlock()

    def forward(self, x: Tensor, other: Tensor) -> tuple[Tensor, int, float]:
        """Return (batch, seq, width), and numbers."""
        seq = x.shape[1]
        if seq % 2 == 1:
            x = x + 1
        positions = torch.arange(seq, dtype=x.dtype) * seq**-0.5 / 3
        return self.block(x + other[:, 1:]) * positions[:, None], seq * 3 // 2, seq / 7


def test_conditions() -> None:
    """Other operations at other lengths are refused by their condition, as are lengths that do not match."""
    model = Paired().double()
    arguments = (X, random(2, 65, 32))
    seq, half = Dim("seq", max=100), Dim("half", max=50)
    with pytest.raises(ValueError, match=r"violated \(seq\)! .*x.shape\[1\] % 2.*Dim.AUTO takes"):
        autochunk(model, arguments, memory_ratio=0.5, dynamic_shapes=({1: seq}, {1: seq + 1}))
    for shapes, odd, other_length in [
        (
            ({1: Dim.AUTO}, {1: Dim.AUTO}),
            r"for x.shape\[1\] % 2 != 1, and .* for x.shape\[1\] = 31",
            r"other.shape\[1\]",
        ),
        (
            ({1: 2 * half}, {1: 2 * half + 1}),
            r"2\*half is 31, which is not possible in the trace; 30 is",
            r"2\*half \+ 1 is 32, but must be 31, as 2\*half requires",
        ),
    ]:
        chunked = autochunk(model, arguments, memory_ratio=0.5, dynamic_shapes=shapes)
        for length in (64, 20):
            x, other = random(2, length, 32), random(2, length + 1, 32)
            (found, *numbers), (expected, *exact) = chunked(x, other), model(x, other)
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
            assert numbers == exact
        with pytest.raises(ValueError, match=odd):
            chunked(random(2, 31, 32), random(2, 32, 32))
        with pytest.raises(ValueError, match=other_length):
            chunked(random(2, 30, 32), random(2, 32, 32))
    with pytest.raises(ValueError, match="half is 51; this model was chunked for at least 2 and at most 50"):
        chunked(random(2, 102, 32), random(2, 103, 32))


@pytest.mark.parametrize(
    ("dynamic_shapes", "message"),
    [
        ({}, "has no length that changes: give one as in"),
        ({"input": None}, "has no length that changes"),
        ({"input": {1: Dim.STATIC}}, "has no length that changes"),
        ({"x": {1: SEQ}}, "it must be a mapping from input"),
        ({"input": {3: SEQ}}, r"a tensor of shape \(2, 64, 32\)"),
        ({"input": SEQ}, "it must be a mapping from dimensions"),
        ({"input": {1: 3}}, r"\['input'\]\[1\] is 3, but the example has 64 there"),
        ({"input": {1: 64}}, "has no length that changes"),
        ({"input": {-2: SEQ}}, "it must be a mapping from dimensions"),
        ({"input": {1: Dim("seq", max=32)}}, r"64 not in range \[2, 32\]; change dynamic_shapes"),
        ({"input": {1: "seq"}}, "change dynamic_shapes"),
        ({"input": {0: SEQ, 1: SEQ}}, "change dynamic_shapes"),
        ({"input": {2: Dim.AUTO}}, r"Sequential fix lengths of dynamic_shapes: input.shape\[2\]: call"),
        ({"input": {2: Dim("width")}}, r"Suggested: width = 32"),
        (({1: SEQ}, {1: SEQ}), "has 2 elements"),
        (3, "dynamic_shapes is 3"),
    ],
)
def test_wrong_dynamic_shapes(model: nn.Module, dynamic_shapes: Any, message: str) -> None:
    """A mistake is refused with what would be right."""
    with pytest.raises(ValueError, match=message):
        autochunk(model, X, memory_ratio=0.5, dynamic_shapes=dynamic_shapes)


class Structured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = EagerBlock()

    def forward(
        self, parts: list[Tensor], scale: float, *, bias: Tensor | None = None, **more: Any
    ) -> dict[str, Tensor]:
        x = self.block(parts[0] + more["other"]) * scale + more["tables"]["a"]
        x = x + more["tables"]["c"][:, None]
        return {"x": x if bias is None else x + bias, "last": parts[1] * 2}


def test_structures() -> None:
    """Lengths of tensors in lists and mappings, by position and by name, in any order."""
    model = Structured().double()

    def arguments(seq: int) -> dict[str, Any]:
        x = random(2, seq, 32)
        tables = {"a": x[:, :, :1], "b": None, "c": random(seq)}
        return {"parts": [x, random(3)], "scale": 0.5, "other": random(2, seq, 32), "tables": tables}

    for dynamic_shapes, message in [
        ({"scale": {0: SEQ}}, r"dynamic_shapes\['scale'\] is .*, but that argument is of type float"),
        ({"parts": [{1: SEQ}]}, r"dynamic_shapes\['parts'\] is .* sequence of 2 elements"),
        ({"kwargs": {1: SEQ}}, "mapping from parts, scale, bias, other, tables"),
    ]:
        with pytest.raises(ValueError, match=message):
            autochunk(model, arguments(64), memory_ratio=0.5, dynamic_shapes=dynamic_shapes)
    tables = {"a": {1: SEQ}, "c": {0: SEQ}}
    dims = {"parts": [{1: SEQ}, None], "other": (None, SEQ, None), "tables": tables}
    chunked = autochunk(model, arguments(64), memory_ratio=0.7, dynamic_shapes=dims)
    assert chunked.plan.regions
    assert "forward" not in vars(model)
    for seq in (64, 30):
        call = arguments(seq)
        expected = model(**call)
        call["tables"] = dict(reversed(call["tables"].items()))
        torch.testing.assert_close(chunked(call.pop("parts"), **call), expected, rtol=1e-10, atol=1e-10)
    with pytest.raises(ValueError, match="seq is 31, but must be 30, as seq requires"):
        chunked(**{**arguments(30), "other": random(2, 31, 32)})


class Bound(nn.Module):
    """A block with a function of it and of its arguments."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.block = EagerBlock()
        self.function = function

    def forward(self, x: Tensor, *rest: Tensor) -> Any:
        return self.function(self.block(x), x, *rest)


@pytest.mark.parametrize(
    "function",
    [
        lambda y, x: y * (x.shape[1] ** -0.5 if isinstance(x.shape[1], int) else 1.0),
        lambda y, x: y * len(str(x.shape[1])),
        lambda y, x: {f"length {x.shape[1]}": y},
        lambda y, x: y * torch.tensor(x.shape[1]),
    ],
    ids=["isinstance", "str", "key", "tensor"],
)
def test_symbols_that_a_model_sees(function: Any) -> None:
    """A model that is another one if lengths are symbols is refused: its results would be wrong."""
    model = Bound(function).double()
    with pytest.raises(
        ValueError, match=r"Bound has other operations if lengths are symbols, .*difference is"
    ):
        autochunk(model, X, memory_ratio=0.8, dynamic_shapes=({1: SEQ},))


def test_lengths_of_other_lengths() -> None:
    """A length that is the sum or product of later ones, as `Dim.AUTO` finds."""
    model = Bound(lambda y, z, x, other: y + torch.cat([x, other], 1)).double()
    auto = {1: Dim.AUTO}
    example = (random(2, 60, 32), random(2, 20, 32), random(2, 40, 32))
    chunked = autochunk(model, example, memory_ratio=0.8, dynamic_shapes=(auto, (auto, auto)))
    call = (random(2, 13, 32), random(2, 10, 32), random(2, 3, 32))
    torch.testing.assert_close(chunked(*call), model(*call), rtol=1e-10, atol=1e-10)
    with pytest.raises(ValueError, match=r"x.shape\[1\] is 14, but must be 13, as rest.0.shape"):
        chunked(random(2, 14, 32), *call[1:])


def test_lengths_that_a_model_fixes() -> None:
    """They are static, with a warning."""
    model = Bound(lambda y, x, other: y + x[:, : other.shape[1]].mean() * other.reshape(5, 4).sum()).double()
    dims = ({1: Dim.AUTO}, ({1: Dim.AUTO},))
    with mock.patch.object(_trace, "get_dist_logger") as logger:
        chunked = autochunk(model, (X, random(1, 20)), memory_ratio=0.8, dynamic_shapes=dims)
    assert "fix lengths of dynamic_shapes: rest.0.shape[1]" in logger().warning.call_args.args[0]
    with pytest.raises(ValueError, match=r"rest.0 = a tensor of shape \(1, 20\) .*passes .*\(1, 21\)"):
        chunked(X, random(1, 21))


def test_values_are_no_lengths() -> None:
    """The error is that of a static trace."""
    model = Bound(lambda y, x: y * x.sum().item()).double()
    with pytest.raises(ValueError, match=r"the shape of item .* depends on values"):
        autochunk(model, X, memory_ratio=0.8, dynamic_shapes=({1: SEQ},))


def test_strides() -> None:
    """Arguments of other strides have a plan of their own, within the budget."""
    model = Bound(lambda y, x: y + x.reshape(-1, 32).sin().reshape(x.shape)).double().eval()
    chunked = autochunk(model, X, memory_ratio=0.5, inplace=True, dynamic_shapes=({1: SEQ},))
    for x in (X, random(64, 2, 32).transpose(0, 1), random(50, 2, 32).transpose(0, 1), random(2, 50, 32)):
        found, peak = counted(chunked, {"x": x})
        torch.testing.assert_close(found[0], model(x), rtol=1e-10, atol=1e-10)
        plan = chunked.plan_for(x)
        assert peak == plan.peak <= chunked.plan.memory_budget
        assert plan.inplace
    assert len(chunked._planned) == 4


@pytest.mark.parametrize("name", ["plan", "chunk_0", "_call", "graph"])
@pytest.mark.parametrize("dynamic_shapes", [None, ({1: SEQ},)], ids=["static", "dynamic"])
def test_names_of_a_chunked_module(name: str, dynamic_shapes: Any) -> None:
    """A child with the name of an attribute is refused by name."""
    model = nn.Sequential(OrderedDict([("first", EagerBlock()), (name, EagerBlock())])).double()
    with pytest.raises(ValueError, match=f"the model has {name}, the name of an attribute"):
        autochunk(model, X, memory_ratio=0.8, dynamic_shapes=dynamic_shapes)


class WithState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = EagerBlock()
        self.scale = nn.Parameter(random(32))
        self.register_buffer("saved", random(32))
        self.register_buffer("not_saved", random(32), persistent=False)
        self.plain = random(32)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x * self.saved + self.not_saved) * self.plain * self.scale


def test_state() -> None:
    """All lengths share the parameters and buffers, under the model's names; also those of a copy."""
    model = WithState().double()
    chunked = autochunk(model, X, memory_ratio=0.6, dynamic_shapes={"x": {1: SEQ}})
    assert chunked.state_dict().keys() == model.state_dict().keys()
    calls = [X, random(2, 20, 32)]
    for x in calls:
        torch.testing.assert_close(chunked(x), model(x), rtol=1e-10, atol=1e-10)
    other = copy.deepcopy(chunked)
    assert [name for name, _ in chunked.named_parameters()] == [name for name, _ in model.named_parameters()]
    changed = {name: value + 0.5 for name, value in model.state_dict().items()}
    chunked.load_state_dict(changed, assign=True)
    for x in calls:
        torch.testing.assert_close(other(x), model(x), rtol=1e-10, atol=1e-10)
    twin = copy.deepcopy(model)
    twin.load_state_dict(changed)
    for x in [*calls, random(2, 30, 32)]:
        torch.testing.assert_close(chunked(x), twin(x), rtol=1e-10, atol=1e-10)
    assert other.plan == chunked.plan
    assert other.state_dict().keys() == model.state_dict().keys()
    other.load_state_dict(changed, assign=True)
    for x in calls:
        torch.testing.assert_close(other(x), twin(x), rtol=1e-10, atol=1e-10)
    chunked.block = copy.deepcopy(other.block)
    chunked.block.norms = copy.deepcopy(twin.block.norms)
    with torch.no_grad():
        for each in (chunked, twin):
            each.block.norms.get_submodule("0").weight.add_(1.0)
    for x in calls:
        torch.testing.assert_close(chunked(x), twin(x), rtol=1e-10, atol=1e-10)
    assert not chunked.requires_grad_(False)(X).requires_grad
    with pytest.raises(TypeError, match="save its state_dict"):
        pickle.dumps(chunked)
    with pytest.raises(ValueError, match="already"):
        autochunk(chunked, X, memory_ratio=0.5)


def test_gradients() -> None:
    """Those of the model, at every length; hooks see each call; the mode is that of the trace."""
    model = Paired().double()
    shapes = ({1: Dim.AUTO}, {1: Dim.AUTO})
    chunked = autochunk(model, (X, random(2, 65, 32)), memory_ratio=0.5, dynamic_shapes=shapes)
    seen: list[torch.Size] = []
    chunked.register_forward_hook(lambda module, args, result: seen.append(result[0].shape))
    for seq in (64, 22):
        x, other = random(2, seq, 32), random(2, seq + 1, 32)
        found, expected = (
            torch.autograd.grad(run(x, other)[0].square().sum(), list(model.parameters()))
            for run in (chunked, model)
        )
        for mine, each in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, each, rtol=1e-10, atol=1e-10)
    assert [each[1] for each in seen] == [64, 22]
    with pytest.raises(ValueError, match=r"call train\(\), or autochunk"):
        chunked.eval()(X, random(2, 65, 32))


def test_number_of_plans(model: nn.Module) -> None:
    """The plan that has not been used for longest is dropped, and made again."""
    with mock.patch.object(_module, "MAX_PLANS", 2):
        chunked = autochunk(model, X, memory_ratio=0.6, dynamic_shapes={"input": {1: SEQ}})
        first = chunked.plan_for(X[:, :40])
        assert chunked.plan_for(X[:, :40]) is first
        chunked(X)
        chunked(X[:, :30])
        assert chunked.plan_for(X[:, :40]) is not first
        assert chunked.plan_for(X[:, :40]) == first
    content = json.loads(chunked.plan.to_json())
    content["regions"][0]["size"] = 1
    plan = ChunkPlan.from_json(json.dumps(content))
    edited = autochunk(model, X, plan=plan, dynamic_shapes={"input": {1: SEQ}})
    assert edited.plan.regions[0].size == 1
    assert copy.deepcopy(edited).plan_for(X) == edited.plan


def test_inference_mode(model: nn.Module) -> None:
    """A length can be planned under it, with tensors of that mode."""
    with torch.inference_mode():
        x = random(2, 50, 32)
        chunked = autochunk(model, x.clone(), memory_ratio=0.6, dynamic_shapes={"input": {1: SEQ}})
        x = random(2, 40, 32)
        found, expected = chunked(x), model(x)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    x = random(2, 40, 32).requires_grad_()
    gradients = [torch.autograd.grad(run(x).square().sum(), x)[0] for run in (chunked, model)]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-10)
