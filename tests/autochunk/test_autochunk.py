"""The face of AutoChunk: plans, arguments, errors."""

import copy
import functools
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from colossalai.autochunk import ChunkedModule, ChunkPlan, autochunk
from tests.autochunk.models import EagerBlock, model_of, random

pytestmark = pytest.mark.unit

X = random(2, 64, 32)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return model_of("eager")[0]


@pytest.fixture(scope="module")
def chunked(model: nn.Module) -> ChunkedModule:
    return autochunk(model, X, memory_ratio=0.4)


def test_plan_from_a_file(model: nn.Module, chunked: ChunkedModule, tmp_path: Path) -> None:
    """A saved plan gives the same module without a search; another model refuses it."""
    chunked.plan.save(tmp_path / "plan.json")
    plan = ChunkPlan.load(tmp_path / "plan.json")
    assert plan == chunked.plan
    again = autochunk(model, X, plan=plan)
    assert again.plan == plan
    assert again.code == chunked.code
    torch.testing.assert_close(again(X), chunked(X), rtol=0, atol=0)
    with pytest.raises(ValueError, match="other operations or shapes"):
        autochunk(model, X[:1], plan=plan)
    with pytest.raises(OSError, match="nothing"):
        ChunkPlan.load(tmp_path / "nothing.json")


def test_plan_text(chunked: ChunkedModule) -> None:
    """The table fits 80 columns and names modules; the explanation has each region."""
    text = str(chunked.plan)
    assert max(map(len, text.splitlines())) <= 80
    assert "0" in text
    assert "AutoChunk of Sequential" in text
    for number, region in enumerate(chunked.plan.regions):
        assert f"chunk_{number}: {region.first} to {region.last}" in chunked.plan.explain()
        assert region.peak <= chunked.plan.peak <= region.unchunked_peak
        assert isinstance(chunked.get_submodule(f"chunk_{number}").body, torch.fx.GraphModule)


def edited(plan: ChunkPlan, number: int = 0, **changes: Any) -> ChunkPlan:
    content = json.loads(plan.to_json())
    content["regions"][number].update(changes)
    return ChunkPlan.from_json(json.dumps(content))


def test_plan_changed_by_hand(model: nn.Module, chunked: ChunkedModule) -> None:
    """Smaller chunks are taken; what does not fit the model is refused by name."""
    plan = chunked.plan
    first = plan.regions[0]
    number = next(number for number, each in enumerate(plan.regions) if each.size > 1)
    smaller = autochunk(model, X, plan=edited(plan, number, size=plan.regions[number].size // 2))
    torch.testing.assert_close(smaller(X), model(X), rtol=1e-10, atol=1e-10)
    assert smaller.plan.regions[number].peak < plan.regions[number].peak
    wrong = [
        (edited(plan, first="nothing"), "names 'nothing'"),
        (edited(plan, first=plan.regions[-1].last), "not a range"),
        (edited(plan, dims={first.last: 7}), "along dimension 7"),
        (edited(plan, dims={}), "cannot be cut"),
        (edited(plan, number=1, first=first.last), "overlap"),
        (edited(plan, size=first.extent), "more than its budget"),
    ]
    for changed, message in wrong:
        with pytest.raises(ValueError, match=message):
            autochunk(model, X, plan=changed)
    content = json.loads(plan.to_json())
    for change, message in [
        ({"format": "x"}, "not a plan"),
        ({"version": 2}, "this release reads 1"),
        ({"peak": "x"}, "peak is 'x'"),
        ({"regions": 3}, "must be a list"),
        ({"regions": [{}]}, "lacks"),
        ({"more": 1}, "more"),
    ]:
        with pytest.raises(ValueError, match=message):
            ChunkPlan.from_json(json.dumps({**content, **change}))
    with pytest.raises(ValueError, match="not JSON"):
        ChunkPlan.from_json("{")
    with pytest.raises(ValueError, match="size is 0"):
        edited(plan, size=0)


@pytest.mark.parametrize(
    ("budget", "num_bytes"),
    [(300_000, 300_000), ("300 KB", 300_000), ("0.5MiB", 2**19), ("300000", 300_000), (3e5, 300_000)],
)
def test_budgets(model: nn.Module, budget: Any, num_bytes: int) -> None:
    """Numbers, and texts with a unit."""
    plan = autochunk(model, X, budget).plan
    assert plan.memory_budget == num_bytes
    assert plan.peak <= num_bytes


@pytest.mark.parametrize(
    ("inputs", "options", "message"),
    [
        (X, {}, "exactly one"),
        (X, {"memory_budget": 1, "memory_ratio": 0.5}, "exactly one"),
        (X, {"memory_ratio": 1.5}, "at most 1"),
        (X, {"memory_ratio": float("nan")}, "at most 1"),
        (X, {"memory_budget": -3}, "above 0"),
        (X, {"memory_budget": "2 XB"}, "2 GB"),
        (X, {"memory_budget": True}, "above 0"),
        (X, {"memory_budget": "0 GB"}, "'0 GB': give bytes above 0"),
        (X, {"memory_ratio": True}, "at most 1"),
        (X, {"plan": "plan.json"}, "read a file with ChunkPlan.load"),
        (X, {"memory_ratio": 0.5, "inplace": "no"}, "inplace='no' must be True or False"),
        (3, {"memory_ratio": 0.5}, "it must be a tensor, a sequence"),
        ([X, X], {"memory_ratio": 0.5}, "do not fit Sequential.forward"),
        ({"y": X}, {"memory_ratio": 0.5}, "do not fit Sequential.forward"),
        (X[..., :3], {"memory_ratio": 0.5}, "cannot be traced"),
        (X, {"memory_budget": 100}, "smallest possible budget"),
    ],
)
def test_wrong_arguments(model: nn.Module, inputs: Any, options: dict[str, Any], message: str) -> None:
    """A mistake is refused with what would be right."""
    with pytest.raises(ValueError, match=message):
        autochunk(model, inputs, **options)


def test_wrong_calls(chunked: ChunkedModule) -> None:
    """A call has the shapes, dtypes and other values of the trace."""
    for args, kwargs, message in [
        ((X[:1],), {}, r"input = a tensor of shape \(2, 64, 32\)"),
        ((X.float(),), {}, "torch.float32"),
        (([X],), {}, "input = a tensor"),
    ]:
        with pytest.raises(ValueError, match=message):
            chunked(*args, **kwargs)
    for args, kwargs, message in [
        ((X, X), {}, "too many positional"),
        ((), {}, "missing a required argument: 'input'"),
        ((), {"y": X}, "missing a required"),
    ]:
        with pytest.raises(TypeError, match=message):
            chunked(*args, **kwargs)
    with torch.autocast("cpu"), pytest.raises(ValueError, match="called under"):
        chunked(X)
    with pytest.raises(ValueError, match="already"):
        autochunk(chunked, X, memory_ratio=0.5)


class Flagged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = EagerBlock()

    def forward(self, x: Tensor, double: bool = False, mask: Tensor | None = None) -> dict[str, Tensor]:
        y = self.block(x) * (2 if double else 1)
        return {"y": y if mask is None else y * mask}


def test_arguments_by_position_and_name() -> None:
    """Arguments can be passed by position or name, whichever the trace had."""
    torch.manual_seed(0)
    model = Flagged().double().eval()
    expected = model(X, True)["y"]
    for inputs in ((X, True), {"double": True, "x": X, "mask": None}):
        chunked = autochunk(model, inputs, memory_ratio=0.6)
        assert chunked.plan.regions
        for result in (chunked(X, True), chunked(X, double=True), chunked(double=True, x=X, mask=None)):
            torch.testing.assert_close(result["y"], expected, rtol=1e-10, atol=1e-10)
        with pytest.raises(ValueError, match="double = True, but the call passes False"):
            chunked(X)
        with pytest.raises(ValueError, match="mask = None, but the call passes a tensor"):
            chunked(X, True, X)


class Decorated(nn.Module):
    """A model whose decorator takes an option by name, as those of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.block = EagerBlock()

    @staticmethod
    def by_name(forward: Any) -> Any:
        @functools.wraps(forward)
        def wrapped(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return forward(self, *args, **{**kwargs, "double": kwargs.pop("double", None) or False})

        return wrapped

    @by_name
    def forward(self, x: Tensor, double: bool | None = None) -> Tensor:
        return self.block(x) * (2 if double else 1)


def test_options_by_name() -> None:
    """Arguments that the example has not by position are passed by name."""
    model = Decorated().double()
    for inputs in (X, {"x": X}):
        chunked = autochunk(model, inputs, memory_ratio=0.6)
        torch.testing.assert_close(chunked(X), model(X), rtol=1e-10, atol=1e-10)


def test_modes() -> None:
    """A chunked part has the model's mode; in the other one, a call is refused, and a switch is not."""
    parent = nn.Sequential(EagerBlock(), nn.Dropout(0.5), EagerBlock()).double().eval()
    expected = parent(X)
    parent[0] = autochunk(parent[0], X, memory_ratio=0.6)
    assert not any(each.training for each in parent[0].modules())
    parent.train()
    with pytest.raises(ValueError, match=r"call eval\(\), or autochunk"):
        parent(X)
    torch.testing.assert_close(parent.eval()(X), expected, rtol=1e-10, atol=1e-10)


class WithBuffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = EagerBlock()
        self.register_buffer("saved", random(32))
        self.register_buffer("not_saved", random(32), persistent=False)
        self.plain = random(32)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x * self.saved + self.not_saved) * self.plain


def test_state_dict() -> None:
    """It has the model's names, and loads into the model and from it; also that of a copy."""
    model = WithBuffers().double()
    chunked = autochunk(model, X, memory_ratio=0.6)
    for each in (chunked, copy.deepcopy(chunked)):
        assert each.state_dict().keys() == model.state_dict().keys()
        torch.testing.assert_close(each(X), model(X), rtol=1e-10, atol=1e-10)
        model.load_state_dict(each.state_dict())
        each.load_state_dict(model.state_dict())


class Registers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = EagerBlock()

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "scale"):
            self.register_buffer("scale", torch.ones(32, dtype=torch.float64))
        return self.block(x) * self.scale


def test_buffers_of_a_forward() -> None:
    """A trace leaves no fake tensor in the model."""
    model = Registers().double()
    with pytest.raises(ValueError, match=r"Registers.scale: call the model once"):
        autochunk(model, X, memory_ratio=0.6)
    expected = model(X)
    chunked = autochunk(model, X, memory_ratio=0.6)
    torch.testing.assert_close(chunked(X), expected, rtol=1e-10, atol=1e-10)


@functools.lru_cache(maxsize=8)
def positions(length: int) -> Tensor:
    return torch.arange(length, dtype=torch.float64)


@functools.cache
def pair_of_positions(length: int) -> tuple[Tensor, Tensor]:
    return torch.arange(length, dtype=torch.float64), torch.ones(length, dtype=torch.float64)


class WithCaches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = EagerBlock()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x) * positions(32) + sum(pair_of_positions(32))


def test_cached_tensors() -> None:
    """Caches of functions are free of fake tensors after a trace, so that the model runs as before."""
    model = WithCaches().double()
    chunked = autochunk(model, X, memory_ratio=0.6)
    expected = model(X)
    assert type(expected) is Tensor
    torch.testing.assert_close(chunked(X), expected, rtol=1e-10, atol=1e-10)


def test_copies(chunked: ChunkedModule) -> None:
    """A deep copy has its own parameters, and the plan; a pickle would lose it."""
    with pytest.raises(TypeError, match="save its state_dict"):
        pickle.dumps(chunked)
    other = copy.deepcopy(chunked)
    torch.testing.assert_close(other(X), chunked(X), rtol=0, atol=0)
    assert other.plan == chunked.plan
    with torch.no_grad():
        next(other.parameters()).add_(1.0)
    assert not torch.equal(other(X), chunked(X))


def test_updated_parameters(model: nn.Module) -> None:
    """A change of the model's parameters is one of the chunked model's."""
    chunked = autochunk(model, X, memory_ratio=0.5)
    changed = {name: value + 0.1 for name, value in model.state_dict().items()}
    model.load_state_dict(changed)
    torch.testing.assert_close(chunked(X), model(X), rtol=1e-10, atol=1e-10)


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Rounded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = EagerBlock()

    def forward(self, x: Tensor) -> Tensor:
        return StraightThrough.apply(self.block(x) * 4)


def test_own_autograd_functions() -> None:
    """Their backward is not in the trace: no wrong gradients."""
    model = Rounded().double()
    chunked = autochunk(model, X, memory_ratio=0.6)
    with pytest.raises(ValueError, match="StraightThrough"):
        chunked(X)
    with torch.no_grad():
        torch.testing.assert_close(chunked(X), model(X))
    frozen = autochunk(model.requires_grad_(False), X, memory_ratio=0.6)
    frozen(X)
    with pytest.raises(ValueError, match="StraightThrough"):
        frozen(X.clone().requires_grad_())
    assert not any(each.requires_grad for each in model.parameters())


class Conditional(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))


class Branches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[: int(x.sum().item())]


class Selects(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[x > 0]


def test_models_without_a_trace(capfd: pytest.CaptureFixture[str]) -> None:
    """The error names the reason, and torch's report is not printed."""
    with pytest.raises(ValueError, match="Branches cannot be traced"):
        autochunk(Branches(), X, memory_ratio=0.5)
    assert "def forward" not in "".join(capfd.readouterr())
    with pytest.raises(ValueError, match=r"the shape of \w+ \(aten.index.Tensor\) depends on values"):
        autochunk(Selects(), X, memory_ratio=0.5)
    with pytest.raises(ValueError, match=r"the memory of \w+ \(cond\) is unknown"):
        autochunk(Conditional(), X, memory_ratio=0.5)
    with pytest.raises(ValueError, match="takes an eager"):
        autochunk(lambda x: x, X, memory_ratio=0.5)
