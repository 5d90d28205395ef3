"""Chunked models: the same results within the budget."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from colossalai.autochunk import ChunkedModule, ChunkPlan, autochunk
from colossalai.autochunk._loop import ChunkLoop
from tests.autochunk.models import MODELS, model_of, one_trace
from tests.nn.live_bytes import LiveBytes

pytestmark = pytest.mark.unit


def counted(module: nn.Module, arguments: dict[str, Any]) -> tuple[list[Tensor], int]:
    """Return the tensors that a call returns, and the peak of its live bytes."""
    outside = [*module.parameters(), *module.buffers(), *tree_leaves(arguments)]
    with torch.no_grad(), LiveBytes(*(each for each in outside if isinstance(each, Tensor))) as live:
        result = module(**arguments)
    return [each for each in tree_leaves(result) if isinstance(each, Tensor)], live.peak


def check(model: nn.Module, chunked: ChunkedModule, arguments: dict[str, Any]) -> None:
    """Compare with the model; the counted peak is the predicted one, within the budget."""
    expected, _ = counted(model, arguments)
    found, peak = counted(chunked, arguments)
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-10)
    assert peak == chunked.plan.peak <= chunked.plan.memory_budget


def smallest_budget(model: nn.Module, arguments: dict[str, Any], *, inplace: bool = False) -> int:
    with pytest.raises(ValueError, match="smallest possible budget") as error:
        autochunk(model, arguments, memory_budget=1000, inplace=inplace)
    found = re.search(r"budget is [^(]*\((\d+) bytes\)", str(error.value))
    assert found is not None
    return int(found[1])


@pytest.mark.parametrize("name", sorted(set(MODELS) - {"esmfold"}))
def test_two_budgets(name: str) -> None:
    """The smallest budget, with outputs in place, and one in the middle, without."""
    model, arguments = model_of(name)
    with one_trace():
        smallest = smallest_budget(model, arguments, inplace=True)
        chunked = autochunk(model, arguments, memory_budget=smallest, inplace=True)
        check(model, chunked, arguments)
        middle = (smallest + chunked.plan.unchunked_peak) // 2
        other = autochunk(model, arguments, memory_budget=middle)
        check(model, other, arguments)
        for each in (chunked, other):
            assert each.plan.regions
            plan = ChunkPlan.from_json(each.plan.to_json())
            assert plan == each.plan
            assert autochunk(model, arguments, plan=plan).code == each.code


def test_trunk_of_esmfold() -> None:
    """With its structure module, whose caches of tensors stay free of those of the trace."""
    model, arguments = model_of("esmfold")
    with one_trace():
        for ratio, inplace in ((0.5, True), (0.7, False)):
            chunked = autochunk(model, arguments, memory_ratio=ratio, inplace=inplace)
            check(model, chunked, arguments)
    assert type(model(**arguments)["positions"]) is Tensor


@pytest.mark.long
@pytest.mark.parametrize("inplace", [False, True], ids=["", "inplace"])
@pytest.mark.parametrize("name", MODELS)
def test_ten_budgets(name: str, inplace: bool) -> None:
    """From the smallest one to that without chunks."""
    model, arguments = model_of(name)
    with one_trace():
        smallest = smallest_budget(model, arguments, inplace=inplace)
        largest = autochunk(model, arguments, memory_ratio=1).plan.unchunked_peak
        with pytest.raises(ValueError, match="smallest possible budget"):
            autochunk(model, arguments, memory_budget=smallest - 1, inplace=inplace)
        peaks = []
        for step in range(10):
            budget = smallest + (largest - smallest) * step // 9
            chunked = autochunk(model, arguments, memory_budget=budget, inplace=inplace)
            check(model, chunked, arguments)
            peaks.append(chunked.plan.peak)
    assert not chunked.plan.regions
    assert peaks[0] < 0.6 * largest


def test_evoformer_in_place() -> None:
    """Updates take the memory of what they update, and norms are computed again; arguments are unchanged."""
    model, arguments = model_of("evoformer")
    with one_trace():
        least = smallest_budget(model, arguments, inplace=True)
        assert least < smallest_budget(model, arguments)
        with pytest.raises(ValueError, match=f"smallest possible budget is .* \\({least} bytes\\)"):
            autochunk(model, arguments, memory_budget=least - 1, inplace=True)
        chunked = autochunk(model, arguments, memory_budget=least, inplace=True)
        assert chunked.plan.recompute
        assert "recomputed norms, in place" in str(chunked.plan)
        with pytest.raises(ValueError, match="without inplace=True"):
            autochunk(model, arguments, plan=replace(chunked.plan, inplace=False), inplace=True)
        assert any(each.replaced for each in chunked.modules() if isinstance(each, ChunkLoop))
    copies = {name: each.clone() for name, each in arguments.items()}
    with torch.no_grad():
        first = [each.clone() for each in chunked(**arguments)]
        second = chunked(**arguments)
    for name, each in arguments.items():
        torch.testing.assert_close(each, copies[name], rtol=0, atol=0)
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize(("ratio", "inplace"), [(0.5, False), (0.8, False), (0.3, True)])
def test_gradients(ratio: float, inplace: bool) -> None:
    """Gradients of the parameters, which are the model's own, without and with recomputation."""
    model, arguments = model_of("eager")
    chunked = autochunk(model, arguments, memory_ratio=ratio, inplace=inplace)
    assert chunked.plan.regions
    names = dict(model.named_parameters())
    assert all(names[name] is param for name, param in chunked.named_parameters())
    assert chunked.state_dict().keys() == model.state_dict().keys()

    def gradients(run: Any) -> list[Tensor]:
        x = arguments["input"].clone().requires_grad_()
        model.zero_grad()
        (run(x) ** 2).sum().backward()
        return [x.grad, *(param.grad.clone() for param in model.parameters())]

    expected = gradients(model)
    for run in (chunked, lambda x: torch.utils.checkpoint.checkpoint(chunked, x, use_reentrant=False)):
        for mine, other in zip(gradients(run), expected, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-10)


def test_recomputation_frees_activations() -> None:
    """In the forward of a recomputed module, the budget holds for what is not an argument or result."""
    model, arguments = model_of("eager")
    chunked = autochunk(model, arguments, memory_ratio=0.4)
    x = arguments["input"].clone().requires_grad_()
    with LiveBytes(x, *model.parameters()) as live:
        torch.utils.checkpoint.checkpoint(chunked, x, use_reentrant=False)
    assert live.peak <= chunked.plan.memory_budget


class SavedByAutograd(nn.Module):
    """Saves a tensor for the backward that an update without parameters could replace."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 2, dtype=torch.float64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return (64, 2) and (64, 64)."""
        h = torch.tanh(x)
        return h @ self.weight, torch.relu(torch.exp(torch.sin(h) + 1).cos() * 2 + h)


def test_saved_tensors_are_not_replaced() -> None:
    """With gradients, outputs in place are new tensors."""
    torch.manual_seed(0)
    model, x = SavedByAutograd(), torch.randn(64, 64, dtype=torch.float64)
    smallest = smallest_budget(model, {"x": x}, inplace=True)
    chunked = autochunk(model, x, memory_budget=smallest, inplace=True)
    assert any(each.replaced for each in chunked.modules() if isinstance(each, ChunkLoop))
    gradients = []
    for each in (model, chunked):
        model.zero_grad()
        each(x)[0].sum().backward()
        gradients.append(model.weight.grad.clone())
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


class Contiguous(nn.Module):
    """Updates a copy of a strided argument."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        """Return (64, 64)."""
        copied = x.contiguous()
        return torch.relu(self.down(self.up(copied).tanh()) + copied)


def test_arguments_with_other_strides() -> None:
    """The copy of the trace is the argument itself in a call with a contiguous one: it is not replaced."""
    torch.manual_seed(0)
    model, x = Contiguous().double(), torch.randn(64, 64, dtype=torch.float64)
    strided = x.t()
    smallest = smallest_budget(model, {"x": strided}, inplace=True)
    chunked = autochunk(model, strided, memory_budget=smallest, inplace=True)
    kept = x.clone()
    with torch.no_grad():
        torch.testing.assert_close(chunked(x), model(x), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(x, kept, rtol=0, atol=0)


def test_random_operations() -> None:
    """Dropouts draw the same numbers in the same order, and are not chunked."""
    model, arguments = model_of("eager")
    model = nn.Sequential(model[0], nn.Dropout(0.3), model[1], nn.Dropout(0.3)).train()
    chunked = autochunk(model, arguments["input"], memory_ratio=0.5)
    assert len(chunked.plan.regions) > 1
    torch.manual_seed(5)
    expected = model(arguments["input"])
    torch.manual_seed(5)
    torch.testing.assert_close(chunked(arguments["input"]), expected, rtol=1e-10, atol=1e-10)


@torch.library.custom_op("autochunk_test::reversed", mutates_args=())
def reversed_rows(x: Tensor) -> Tensor:
    """An operator without a rule."""
    return x.flip(1)


@reversed_rows.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_batch_statistics() -> None:
    """A normalization by the batch is not cut along it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64, track_running_stats=False), nn.Linear(64, 8))
    model, x = model.double().eval(), torch.randn(32, 8, dtype=torch.float64)
    chunked = autochunk(model, x, memory_budget=smallest_budget(model, {"input": x}))
    torch.testing.assert_close(chunked(x), model(x), rtol=1e-10, atol=1e-10)


class WithUnknown(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 64), nn.Linear(64, 8)

    def forward(self, x: Tensor, scale: float = 1.0) -> dict[str, Any]:
        x = reversed_rows(x + self.down(self.up(x).relu()) * scale)
        x.add_(1.0)
        attention = (x @ x.transpose(1, 2)).softmax(-1)
        return {"x": attention @ x, "pair": [attention[:, :, 0], x]}


def test_unknown_operators() -> None:
    """A region ends at an operator without a rule, and at one that changes its argument."""
    torch.manual_seed(0)
    model, x = WithUnknown().double().eval(), torch.randn(2, 40, 8, dtype=torch.float64)
    chunked = autochunk(model, {"x": x}, memory_ratio=0.6)
    assert chunked.plan.regions
    check(model, chunked, {"x": x})
    names = {str(node.target) for node in chunked.graph.nodes}
    assert "autochunk_test.reversed.default" in names
    assert "aten.add_.Tensor" in names
