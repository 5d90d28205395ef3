"""A linear layer for each group of rows, against one after the other in float64."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from colossalai.nn.layer.moe import grouped_linear

pytestmark = pytest.mark.unit

# Relative to the largest value. Sums of half types are in float32 and round once, with a bias twice.
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
FEATURES = (1, 4, 5, 7, 8, 11, 16, 24)


def plain(
    rows: Tensor,
    weight: Tensor,
    sizes: list[int],
    *,
    bias: Tensor | None = None,
    transposed: bool = False,
) -> Tensor:
    """Return the same by a plain loop over experts."""
    results = []
    for expert, part in enumerate(rows.split(sizes)):
        matrix = weight[expert].t() if transposed else weight[expert]
        results.append(functional.linear(part, matrix, None if bias is None else bias[expert]))
    return torch.cat(results)


def operands(
    sizes: list[int],
    num_in: int,
    num_out: int,
    dtype: torch.dtype = torch.float64,
    *,
    transposed: bool = False,
    has_bias: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    shape = (num_in, num_out) if transposed else (num_out, num_in)
    rows = torch.randn(sum(sizes), num_in).to(dtype).requires_grad_()
    weight = torch.randn(len(sizes), *shape).to(dtype).requires_grad_()
    bias = torch.randn(len(sizes), num_out).to(dtype).requires_grad_() if has_bias else None
    return rows, weight, bias


def error(found: Tensor, wanted: Tensor) -> float:
    assert found.shape == wanted.shape
    if not found.numel():
        return 0.0
    return ((found.double() - wanted).abs().max() / wanted.abs().max().clamp(min=1e-3)).item()


OPERANDS: dict[str, Any] = {
    "seed": st.integers(0, 2**31),
    "sizes": st.lists(st.sampled_from([0, 0, 1, 2, 5, 17]), min_size=1, max_size=9).flatmap(
        lambda sizes: st.sampled_from([sizes, 7 * sizes])  # few experts, and many
    ),
    "num_in": st.sampled_from(FEATURES),
    "num_out": st.sampled_from(FEATURES),
    "dtype": st.sampled_from(list(TOLERANCES)),
    "transposed": st.booleans(),
    "has_bias": st.booleans(),
    "is_strided": st.booleans(),
}


def compare_with_a_loop(
    seed: int,
    sizes: list[int],
    num_in: int,
    num_out: int,
    dtype: torch.dtype,
    transposed: bool,
    has_bias: bool,
    is_strided: bool,
) -> None:
    torch.manual_seed(seed)
    rows, weight, bias = operands(sizes, num_in, num_out, dtype, transposed=transposed, has_bias=has_bias)
    dy = torch.randn(sum(sizes), num_out).to(dtype)
    if is_strided:
        dy = torch.randn(num_out, 2 * sum(sizes)).to(dtype).t()[::2]
    check(rows, weight, sizes, dy, bias=bias, transposed=transposed)


def check(
    rows: Tensor,
    weight: Tensor,
    sizes: list[int],
    dy: Tensor,
    *,
    bias: Tensor | None = None,
    transposed: bool = False,
) -> None:
    """Compare results and gradients with those of a loop in float64."""
    found = grouped_linear(rows, weight, sizes, bias=bias, transposed=transposed)
    parts = [part for part in (rows, weight, bias) if part is not None]
    truths = [part.detach().double().requires_grad_() for part in parts]
    wanted = plain(*truths[:2], sizes, bias=truths[2] if len(truths) > 2 else None, transposed=transposed)
    assert found.dtype == rows.dtype
    assert found.is_contiguous()
    assert error(found.detach(), wanted.detach()) < TOLERANCES[rows.dtype]
    grads = torch.autograd.grad(found, parts, dy)
    for grad, truth in zip(grads, torch.autograd.grad(wanted, truths, dy.double()), strict=True):
        assert grad.dtype == rows.dtype
        assert grad.is_contiguous()
        assert error(grad, truth) < TOLERANCES[rows.dtype]
    for expert, size in enumerate(sizes):
        if size == 0:
            assert all(torch.count_nonzero(grad[expert]) == 0 for grad in grads[1:])


@settings(max_examples=100)
@given(**OPERANDS)
def test_as_one_after_the_other(**case: Any) -> None:
    compare_with_a_loop(**case)


@pytest.mark.long
@settings(max_examples=400)
@given(**OPERANDS)
def test_as_one_after_the_other_for_longer(**case: Any) -> None:
    compare_with_a_loop(**case)


class CountsProducts(TorchDispatchMode):
    """Counts products, a grouped one once, and new tensors from a size on, made by whatever operation.

    Args:
        least: The number of elements from which on tensors count.
    """

    def __init__(self, least: int = 0) -> None:
        super().__init__()
        self.least = least
        self.num = self.num_large = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten._grouped_mm)
        known = {part.data_ptr() for part in tree_leaves((args, kwargs)) if isinstance(part, Tensor)}
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.data_ptr() not in known:
            self.num_large += result.numel() >= self.least
        return result


# Few experts take a product each, and so does float64; of many in float32 one is for all.
@pytest.mark.parametrize(
    ("dtype", "sizes", "each"),
    [
        (torch.float64, [3, 0, 5, 4], 3),
        (torch.float32, [3, 0, 5, 4], 3),
        (torch.float64, [2, 0] * 20, 20),
        (torch.float32, [2, 0] * 20, 1),
    ],
)
@pytest.mark.parametrize("transposed", [False, True])
def test_computes_what_is_wanted_only(
    dtype: torch.dtype, sizes: list[int], each: int, transposed: bool
) -> None:
    rows, weight, bias = operands(sizes, 8, 4, dtype, transposed=transposed, has_bias=True)
    assert bias is not None
    everything = (rows, weight, bias)
    wanted = torch.autograd.grad(
        plain(rows, weight, sizes, bias=bias, transposed=transposed).square().sum(), everything
    )
    for frozen, num in (((), 3), ((0,), 2), ((1,), 2), ((0, 1), 1), ((2,), 3), ((0, 1, 2), 1)):
        for number, part in enumerate(everything):
            part.requires_grad_(number not in frozen)
        kept = [number for number in range(3) if number not in frozen]
        with CountsProducts() as products:
            found = grouped_linear(rows, weight, sizes, bias=bias, transposed=transposed)
            assert found.requires_grad == bool(kept)
            loss = found.square().sum()
            grads = torch.autograd.grad(loss, [everything[number] for number in kept]) if kept else ()
        assert products.num == num * each
        for number, grad in zip(kept, grads, strict=True):
            assert error(grad, wanted[number].double()) < TOLERANCES[dtype]


def test_keeps_what_is_needed_only() -> None:
    sizes = [3, 0, 5]
    rows, weight, _ = operands(sizes, 8, 4)
    for needs_rows, needs_weight in ((True, True), (True, False), (False, True)):
        rows.requires_grad_(needs_rows)
        weight.requires_grad_(needs_weight)
        kept: list[Tensor] = []

        def keep(tensor: Tensor, kept: list[Tensor] = kept) -> Tensor:
            kept.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            grouped_linear(rows, weight, sizes)
        kinds = {tensor.data_ptr() for tensor in kept}
        assert (rows.data_ptr() in kinds, weight.data_ptr() in kinds) == (needs_weight, needs_rows)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_gradient_of_the_weight_is_made_once(dtype: torch.dtype) -> None:
    """No gradient of the size of all experts for each of them."""
    sizes = [2] * 20
    rows, weight, _ = operands(sizes, 8, 16, dtype)
    with CountsProducts(weight.numel()) as ours:
        grouped_linear(rows, weight, sizes).sum().backward()
    assert weight.grad is not None
    assert ours.num_large == (4 if dtype == torch.bfloat16 else 1)  # the weight in float32 twice, and dW
    with CountsProducts(weight.numel()) as in_a_loop:
        plain(rows, weight, sizes).sum().backward()
    assert in_a_loop.num_large >= len(sizes)


@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.parametrize("transposed", [False, True])
def test_without_rows(dtype: torch.dtype, transposed: bool) -> None:
    rows, weight, bias = operands([0, 0, 0], 8, 16, dtype, transposed=transposed, has_bias=True)
    check(rows, weight, [0, 0, 0], torch.ones(0, 16, dtype=dtype), bias=bias, transposed=transposed)


@pytest.mark.parametrize("dtype", list(TOLERANCES))
def test_recomputed(dtype: torch.dtype) -> None:
    sizes = [3, 0, 9]
    rows, weight, bias = operands(sizes, 8, 16, dtype, has_bias=True)
    everything = [part for part in (rows, weight, bias) if part is not None]

    def compute(rows: Tensor) -> Tensor:
        return torch.tanh(grouped_linear(torch.tanh(rows), weight, sizes, bias=bias))

    once = torch.autograd.grad(compute(rows).square().sum(), everything)
    again = torch.autograd.grad(checkpoint(compute, rows, use_reentrant=False).square().sum(), everything)
    assert all(torch.equal(first, second) for first, second in zip(once, again, strict=True))


@pytest.mark.parametrize("inner", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_rows", [3, 700])  # of bfloat16, multiplied in float32 and as it is
def test_under_autocast(inner: torch.dtype, num_rows: int) -> None:
    sizes = [num_rows, 0, num_rows + 2]
    rows, weight, bias = operands(sizes, 32, 64, torch.float32, has_bias=True)
    everything = [part for part in (rows, weight, bias) if part is not None]
    with torch.autocast("cpu", inner):
        found = grouped_linear(rows, weight, sizes, bias=bias)
        grads = torch.autograd.grad(found.float().square().sum(), everything)
        theirs = plain(rows, weight, sizes, bias=bias)
    assert found.dtype == theirs.dtype == inner
    truths = [part.detach().double().requires_grad_() for part in everything]
    wanted = plain(truths[0], truths[1], sizes, bias=truths[2])
    assert error(found.detach(), wanted.detach()) < TOLERANCES[inner]
    for grad, truth in zip(grads, torch.autograd.grad(wanted.square().sum(), truths), strict=True):
        assert grad.dtype == torch.float32
        assert error(grad, truth) < 2 * TOLERANCES[inner]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_large_products(dtype: torch.dtype, transposed: bool) -> None:
    """Where bfloat16 is multiplied as it is; rows sliced out of wider ones and widths that are odd, too."""
    for num_in, num_out in ((64, 48), (61, 64), (64, 61)):
        sizes = [400, 0, 300]
        rows, weight, _ = operands(sizes, num_in, num_out, dtype, transposed=transposed)
        wide = torch.randn(700, 2 * num_in).to(dtype)
        rows = wide[:, :num_in].requires_grad_()
        check(rows, weight, sizes, torch.randn(700, 2 * num_out).to(dtype)[:, ::2], transposed=transposed)


def test_slices_of_memory() -> None:
    """A weight that is a slice of a wider one, and one that is stored the other way round."""
    sizes = [3, 5]
    rows = torch.randn(8, 8, requires_grad=True)
    wide = torch.randn(2, 16, 12)
    for weight in (wide[:, :, 2:10], wide.mT[:, :8].mT[:, :8], torch.randn(2, 8, 16).mT):
        assert error(grouped_linear(rows, weight, sizes), plain(rows, weight, sizes).double()) < 1e-5


def test_a_second_derivative_raises() -> None:
    rows, weight, _ = operands([3, 4], 8, 8)
    found = grouped_linear(rows, weight, [3, 4])
    (grad,) = torch.autograd.grad(found.square().sum(), rows, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_refuses_operands() -> None:
    rows, weight, _ = operands([3, 4], 8, 6)
    refused: list[tuple[str, Any, Any, Any, Any]] = [
        (
            "do not fit: they must be \\(rows, in\\) and \\(experts, out, in\\)",
            rows[:, :6],
            weight,
            [3, 4],
            None,
        ),
        ("\\(experts, out, in\\)", rows, weight[0], [3, 4], None),
        ("3 sizes with the sum 7 for 2 experts and 7 rows", rows, weight, [3, 4, 0], None),
        ("2 sizes with the sum 8", rows, weight, [4, 4], None),
        ("2 sizes with the sum 7", rows, weight, [8, -1], None),
        (
            "a bias of shape \\(6,\\); with this weight it must be \\(2, 6\\)",
            rows,
            weight,
            [3, 4],
            weight[0, :, 0],
        ),
        ("rows of type torch.float32 and a weight of type torch.float64", rows.float(), weight, [3, 4], None),
        ("a bias of type torch.float32", rows, weight, [3, 4], weight[:, :, 0].float()),
    ]
    for message, given_rows, given_weight, sizes, bias in refused:
        with pytest.raises(ValueError, match=message):
            grouped_linear(given_rows, given_weight, sizes, bias=bias)
    with pytest.raises(ValueError, match="\\(experts, in, out\\)"):
        grouped_linear(rows, weight, [3, 4], transposed=True)


@pytest.mark.parametrize("dtype", list(TOLERANCES))
def test_what_is_not_a_number_stays_with_its_expert(dtype: torch.dtype) -> None:
    """Where groups are multiplied as larger ones, nothing of a neighbour gets in."""
    sizes = [301, 0, 270, 407, 5]
    rows, weight, _ = operands(sizes, 48, 64, dtype)
    dy = torch.randn(sum(sizes), 64).to(dtype)
    clean = grouped_linear(rows, weight, sizes)
    clean_grads = torch.autograd.grad(clean, [rows, weight], dy)
    broken, broken_dy = rows.detach().clone(), dy.clone()
    broken[301:571] = broken_dy[301:571] = float("nan")
    broken.requires_grad_()
    found = grouped_linear(broken, weight, sizes)
    grads = torch.autograd.grad(found, [broken, weight], broken_dy)
    of_others = [*range(301), *range(571, sum(sizes))]
    assert torch.equal(found[of_others], clean[of_others])
    assert torch.equal(grads[0][of_others], clean_grads[0][of_others])
    assert torch.equal(grads[1][[0, 1, 3, 4]], clean_grads[1][[0, 1, 3, 4]])
    assert found[301:571].isnan().all()
    assert grads[1][2].isnan().all()
