"""Small functions with writes, views, tuples and blocks: the same results, chunked."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from colossalai.autochunk import autochunk
from colossalai.autochunk._flow import candidates_of
from colossalai.autochunk._profile import GraphProfiler
from colossalai.autochunk._rewrite import GraphRewriter
from colossalai.autochunk._search import RegionChoice
from colossalai.autochunk._trace import trace
from tests.autochunk.test_models import smallest_budget
from tests.nn.live_bytes import LiveBytes

pytestmark = pytest.mark.unit


class Cases(nn.Module):
    """A model of one function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(64, dtype=torch.float64))

    def forward(self, x: Tensor) -> Any:
        """Return the function of x, (32, 8), and of x (32, 8, 64), large."""
        return self.function(x, (x[..., None] * self.weight).exp())


def views_written(x: Tensor, large: Tensor) -> Tensor:
    """Write through a view of another result."""
    h = large.sum(-1)
    view, w = h.t(), large.sin().sum(-1)
    view.mul_(2.0)
    return h + w


def views_written_without_grad(x: Tensor, large: Tensor) -> Tensor:
    """Write through a view in a block that torch traces as one operation."""
    h = large.sum(-1)
    view, w = h.t(), large.sin().sum(-1)
    with torch.no_grad():
        view.mul_(2.0)
    return h + w


def residual_in_place(x: Tensor, large: Tensor) -> Tensor:
    """Write into large tensors, whose older values are not read again."""
    y = large.sin()
    y += large
    y.clamp_(max=3.0).mul_(y.mean(-1, keepdim=True))
    return y.sum(-1)


def argument_written(x: Tensor, large: Tensor) -> Tensor:
    """Write through a view of the argument."""
    z = (large.sin() * large).sum(-1)
    x.transpose(0, 1).add_(1.0)
    return z + x


def read_whole(x: Tensor, large: Tensor) -> Tensor:
    """Write into a tensor that all chunks have read whole."""
    y = large.sum(1).sin()  # (32, 64)
    scores = (large @ y.t()).softmax(-1).sum(-1)
    y.mul_(0.5)
    return scores + y[:, :8]


def written_whole(x: Tensor, large: Tensor) -> Tensor:
    """Write into a tensor that is read in parts before, and whole after."""
    y = large.sin()
    before = (y + 1.0).exp()
    y.mul_(0.5)
    return (before * y.mean(0)).sum(-1)


def part_contiguous(x: Tensor, large: Tensor) -> Tensor:
    """Write into a copy, of which a part of one element would be a view of the original."""
    copied = large.transpose(0, 1).contiguous()
    copied.mul_(2.0)
    return (copied.sin() * copied).sum(2).t() + large.sum(-1)


def whole_tuple(x: Tensor, large: Tensor) -> Tensor:
    """Parts of an element of a tuple that is computed whole."""
    w = (large * 2).cos()
    values, _ = x.sort(-1)
    return (values[..., None] * w).sin().sum(-1)


def pieces(x: Tensor, large: Tensor) -> Tensor:
    """Elements of tuples, of which some are needed whole."""
    first, second = large.chunk(2, 0)
    values, order = large.sort(-1)
    return (first * second.mean(0)).sum(-1) + values.sin().sum(-1)[:16] + order.sum(-1)[16:]


def bits(x: Tensor, large: Tensor) -> Tensor:
    """Elements of another type over the same bytes."""
    return (large.detach().exp().view(torch.int64) >> 3).sum(-1).double() * 1e-18


def dead(x: Tensor, large: Tensor) -> Tensor:
    """Results that nothing reads."""
    large.cos().sin()
    return (large.sin() * 2).exp().sum(-1)


def without_grad(x: Tensor, large: Tensor) -> Tensor:
    """A block that torch traces as one operation."""
    y = large.sin()
    with torch.no_grad():
        z = y.exp().sum(-1)
    return (y * large).sum(-1) + z


def crossed(x: Tensor, large: Tensor) -> Tensor:
    """Read rows and columns of a tensor of the shape of the result."""
    y = x @ x.t()
    return y + torch.einsum("ji,k->ijk", y, large[0, 0]).tanh().sum(-1)


def crossed_views(x: Tensor, large: Tensor) -> Tensor:
    """Read two views of a tensor of the shape of the result, of before a write."""
    y = x @ x.t()
    columns = y.t()
    x.add_(1.0)
    return y + (columns[..., None] * large[0, 0]).tanh().sum(-1)


def copied_view(x: Tensor, large: Tensor) -> Tensor:
    """Update a tensor after a copy of its columns; of one column, that is a view."""
    y, z = x @ x.t(), x.sin()
    columns = y.t().contiguous()
    update = y + (y[..., None] * large[0, 0]).tanh().sum(-1) + z.sum(-1, keepdim=True)
    return update @ columns


def view_copied_later(x: Tensor, large: Tensor) -> Tensor:
    """Copy the columns of a tensor after the update that takes its memory."""
    y, z = x @ x.t(), x.sin()
    update = y + (y[..., None] * large[0, 0]).tanh().sum(-1) + z.sum(-1, keepdim=True)
    columns = y.t().contiguous()
    return update @ columns


def written_after_use(x: Tensor, large: Tensor) -> Tensor:
    """Use a result before and after its input is written into."""
    y = large.sin()
    z = y.exp()
    before = z.sum(-1)
    y.mul_(0.5)
    return before + (z * y).sum(-1)


def argument_written_between(x: Tensor, large: Tensor) -> Tensor:
    """Use a result of the argument before and after a write into the argument."""
    y = x * 2
    first = (y[..., None] * large).tanh().sum(-1)
    x.add_(1.0)
    return first * (y[..., None] * large).cos().sum(-1)


def copy_of_columns_written(x: Tensor, large: Tensor) -> tuple[Tensor, Tensor]:
    """Write into a copy of columns, which are a tensor of their own if they are computed in chunks."""
    columns = large.sum(1).tanh()[:, :32]
    other = (columns * 2).tanh()
    copied = columns.reshape(-1)
    copied.add_(1.0)
    return copied, other + columns


def broadcast_tensors(x: Tensor, large: Tensor) -> tuple[Tensor, Tensor]:
    """Return views of the second of two results of equal operations."""
    first, second = torch.tanh(x @ x.t()), torch.tanh(x @ x.t())
    _, view = torch.broadcast_tensors(first, second[None])
    update = second + (second[..., None] * large[0, 0]).tanh().sum(-1)
    return update.exp(), view.sin()


FUNCTIONS = [
    *(
        views_written,
        views_written_without_grad,
        residual_in_place,
        argument_written,
        read_whole,
        written_whole,
    ),
    *(part_contiguous, whole_tuple, pieces, bits, dead, without_grad),
    *(crossed, crossed_views, copied_view, view_copied_later, written_after_use),
    *(argument_written_between, copy_of_columns_written, broadcast_tensors),
]


@pytest.mark.parametrize("inplace", [False, True], ids=["", "inplace"])
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda each: each.__name__)
def test_functions(function: Callable[..., Any], inplace: bool) -> None:
    """Writes, views, tuples, blocks: values at two budgets, and of the argument after it is written into."""
    torch.manual_seed(0)
    model = Cases(function)
    x = torch.randn(32, 8, dtype=torch.float64)
    largest = autochunk(model, x, memory_ratio=1).plan.unchunked_peak
    smallest = smallest_budget(model, {"x": x}, inplace=inplace)
    for budget in (smallest, (smallest + largest) // 2):
        chunked = autochunk(model, x, memory_budget=budget, inplace=inplace)
        assert chunked.plan.regions or smallest == largest
        first, second = x.clone(), x.clone()
        with torch.no_grad():
            expected = model(first)
            torch.testing.assert_close(chunked(second), expected, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(second, first, rtol=0, atol=0)
        with torch.no_grad(), LiveBytes(first, *model.parameters()) as live:
            chunked(first)
        assert live.peak == chunked.plan.peak <= budget
    if function is residual_in_place:
        assert smallest < 0.3 * largest
        assert any("add_" in str(node.target) for node in chunked.get_submodule("chunk_0").body.graph.nodes)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda each: each.__name__)
def test_every_region(function: Callable[..., Any]) -> None:
    """Each candidate by itself, in chunks of one element, in place where it can be, is right."""
    torch.manual_seed(0)
    model, x = Cases(function), torch.randn(32, 8, dtype=torch.float64)
    expected = model(x.clone())
    root = trace(model, (x,), {}).module
    profiler = GraphProfiler(root, [x])
    profile = profiler.profile(root.graph)
    rewriter = GraphRewriter(root.graph, profile, inplace=True)
    number = 0
    for last in range(len(profile.nodes)):
        found = candidates_of(profile, last, inplace=True)
        for operations, choices in zip(found.num_operations, found.choices, strict=True):
            dims = {last - distance: dim for distance, dim in choices.items()}
            graph, loops = rewriter.rewrite([RegionChoice(last + 1 - int(operations), last, dims, size=1)])
            for name, loop in loops.items():
                root.add_module(name, loop)
            with torch.no_grad():
                result = torch.fx.GraphModule(root, graph)(x.clone())
            torch.testing.assert_close(result, expected, rtol=1e-10, atol=1e-10)
            number += 1
    assert number > 3


def firsts_with(function: Callable[..., Any], target: str) -> tuple[int, int, set[int]]:
    """Return where a tensor is made, where it is written into, and where regions around the write begin."""
    model, x = Cases(function), torch.randn(32, 8, dtype=torch.float64)
    traced = trace(model, (x,), {}).module
    profile = GraphProfiler(traced, [x]).profile(traced.graph)
    write = next(at for at, node in enumerate(profile.nodes) if str(node.target) == target)
    found: set[int] = set()
    for last in range(write, len(profile.nodes)):
        firsts = last + 1 - candidates_of(profile, last).num_operations
        found.update(int(first) for first in firsts if first <= write)
    return profile.storages[profile.of_node[write][0]].first, write, found


def test_writes_are_in_regions_that_make_the_tensor() -> None:
    """Otherwise a later chunk reads the values that an earlier one has written."""
    made, write, firsts = firsts_with(residual_in_place, "aten.add_.Tensor")
    assert made < write
    assert firsts
    assert max(firsts) <= made
    for function in (read_whole, written_whole, part_contiguous):
        made, _, firsts = firsts_with(function, "aten.mul_.Tensor")
        assert max(firsts, default=-1) <= made
