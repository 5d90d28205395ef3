"""Linear layer and cross entropy in chunks, against the whole of both."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from colossalai.nn import LinearCrossEntropyLoss
from tests.nn.live_bytes import LiveBytes

pytestmark = pytest.mark.unit

HIDDEN, CLASSES = 5, 11


def whole_loss(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    token_weights: Tensor | None = None,
    *,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logits_scale: float = 1.0,
    softcap: float | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Return the loss over whole logits, by the formulas."""
    logits = functional.linear(x, weight, bias).flatten(0, -2) * logits_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    counted = (labels != -100).flatten()
    losses = functional.cross_entropy(
        logits, labels.flatten(), reduction="none", label_smoothing=label_smoothing
    )
    losses = losses + z_loss * logits.logsumexp(-1).square().masked_fill(~counted, 0.0)
    weights = counted.to(losses) if token_weights is None else token_weights.flatten() * counted
    losses = losses * weights
    if reduction == "none":
        return losses.view(labels.shape)
    return losses.sum() if reduction == "sum" else losses.sum() / weights.sum()


def operands(*shape: int, classes: int = CLASSES, hidden: int = HIDDEN) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(*shape, hidden, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(classes, hidden, dtype=torch.float64, requires_grad=True)
    return x, weight, torch.randint(classes, shape)


def relative(found: Tensor, wanted: Tensor) -> float:
    assert found.shape == wanted.shape
    return ((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-3)).item()


@given(
    seed=st.integers(0, 2**31),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 7)),
    classes=st.integers(1, 13),
    share_ignored=st.sampled_from([0.0, 0.5]),
    has_bias=st.booleans(),
    has_weights=st.booleans(),
    options=st.fixed_dictionaries(
        {
            "reduction": st.sampled_from(["mean", "sum", "none"]),
            "label_smoothing": st.sampled_from([0.0, 0.1, 1.0]),
            "z_loss": st.sampled_from([0.0, 0.01]),
            "logits_scale": st.sampled_from([1.0, -0.7]),
            "softcap": st.sampled_from([None, 3.0]),
            "chunk": st.sampled_from([None, 1, 3]),
        }
    ),
)
@settings(max_examples=150)
def test_as_the_whole(
    seed: int,
    shape: tuple[int, int],
    classes: int,
    share_ignored: float,
    has_bias: bool,
    has_weights: bool,
    options: dict[str, Any],
) -> None:
    torch.manual_seed(seed)
    x, weight, labels = operands(*shape, classes=classes)
    labels[torch.rand(shape) < share_ignored] = -100
    labels[0, 0] = 0  # one counts: of none there are tests below
    bias = torch.randn(classes, dtype=torch.float64, requires_grad=True) if has_bias else None
    token_weights = 0.1 + torch.rand(shape, dtype=torch.float64) if has_weights else None
    wanted_of = [part for part in (x, weight, bias) if part is not None]
    arriving = torch.randn(shape if options["reduction"] == "none" else (), dtype=torch.float64)
    wanted = whole_loss(x, weight, labels, bias, token_weights, **options)
    found = LinearCrossEntropyLoss(**options)(x, weight, labels, bias, token_weights)
    assert relative(found.detach(), wanted.detach()) < 1e-12
    grads = torch.autograd.grad(wanted, wanted_of, arriving)
    first = torch.autograd.grad(found, wanted_of, arriving, retain_graph=True)
    second = torch.autograd.grad(found, wanted_of, arriving)
    for grad, once, again in zip(grads, first, second, strict=True):
        assert relative(once, grad) < 1e-12
        assert torch.equal(once, again)


class CountsProducts(TorchDispatchMode):
    """Counts the matrix products within the block."""

    def __init__(self) -> None:
        super().__init__()
        self.num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_)
        return func(*args, **(kwargs or {}))


def test_computes_what_is_wanted_only() -> None:
    x, weight, labels = operands(12)
    loss = LinearCrossEntropyLoss(chunk=4)
    wanted = torch.autograd.grad(whole_loss(x, weight, labels), [x, weight])
    cases: list[tuple[bool, bool, int]] = [
        (True, True, 9),
        (True, False, 6),
        (False, True, 6),
        (False, False, 3),
    ]
    for needs_x, needs_weight, num_products in cases:
        x.requires_grad_(needs_x)
        weight.requires_grad_(needs_weight)
        with CountsProducts() as products:
            value = loss(x, weight, labels)
            parts = [part for part in (x, weight) if part.requires_grad]
            grads = torch.autograd.grad(value, parts) if parts else ()
        assert products.num == num_products
        kept = [grad for grad, needed in zip(wanted, (needs_x, needs_weight), strict=True) if needed]
        assert all(relative(found, grad) < 1e-12 for found, grad in zip(grads, kept, strict=True))
    x.requires_grad_(True)
    with torch.no_grad(), CountsProducts() as products:
        assert not loss(x, weight, labels).requires_grad
    assert products.num == 3
    labels[:8] = -100
    with CountsProducts() as products:  # two chunks' worth of rows do not count
        loss(x, weight, labels)
    assert products.num == 2


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_all_labels_ignored(reduction: str) -> None:
    x, weight, labels = operands(6)
    labels.fill_(-100)
    wanted = functional.cross_entropy(functional.linear(x, weight), labels, reduction=reduction)
    found = LinearCrossEntropyLoss(reduction=reduction)(x, weight, labels)
    torch.testing.assert_close(found, wanted, equal_nan=True)
    for value in (wanted, found):
        grads = torch.autograd.grad(value, [x, weight], torch.ones_like(value))
        assert all(torch.equal(grad, torch.zeros_like(grad)) for grad in grads)
    half = LinearCrossEntropyLoss(reduction=reduction)(x.half(), weight.half(), labels)
    assert torch.autograd.grad(half.sum(), x)[0].abs().max() == 0


def test_a_tied_weight_that_is_used_twice() -> None:
    _, weight, labels = operands(6)
    grads = []
    for loss in (whole_loss, LinearCrossEntropyLoss(chunk=2)):
        hidden = functional.embedding(labels, weight)
        value = loss(hidden, weight, labels) + loss(hidden.square(), weight, labels.roll(1))
        grads.append(torch.autograd.grad(value, weight)[0])
    assert relative(grads[1], grads[0]) < 1e-12


def test_a_weight_that_changes_before_a_second_backward() -> None:
    x, weight, labels = operands(6)
    value = LinearCrossEntropyLoss()(x, weight, labels)
    value.backward(retain_graph=True)
    with torch.no_grad():
        weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()


def test_a_second_derivative_is_refused() -> None:
    x, weight, labels = operands(6)
    for reduction in ("mean", "none"):
        value = LinearCrossEntropyLoss(reduction=reduction)(x, weight, labels).sum()
        (grad,) = torch.autograd.grad(value, x, create_graph=True)
        with pytest.raises(RuntimeError, match="no second derivative"):
            (grad.square().sum() + x.sum()).backward()


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_half_precision_and_autocast(reduction: str) -> None:
    x, weight, labels = operands(40, 2, classes=50, hidden=16)
    bias = torch.randn(50, dtype=torch.float64, requires_grad=True)
    parts = [x, weight, bias]
    wanted = whole_loss(x, weight, labels, bias, reduction=reduction)
    grads = torch.autograd.grad(wanted.sum(), parts)
    options: dict[str, Any] = {"reduction": reduction, "chunk": 32}
    for dtype in (torch.bfloat16, torch.float16):
        low = [part.detach().to(dtype).requires_grad_() for part in parts]
        found = LinearCrossEntropyLoss(**options)(low[0], low[1], labels, low[2])
        assert found.dtype == torch.float32
        assert relative(found.detach().double(), wanted.detach()) < 0.03
        for grad, exact in zip(torch.autograd.grad(found.sum(), low), grads, strict=True):
            assert grad.dtype == dtype
            assert relative(grad.double(), exact) < 0.05
    single = [part.detach().float().requires_grad_() for part in parts]
    with torch.autocast("cpu", torch.bfloat16):
        found = LinearCrossEntropyLoss(**options)(single[0], single[1], labels, single[2])
    assert found.dtype == torch.float32
    assert relative(found.detach().double(), wanted.detach()) < 0.03
    for grad, exact in zip(torch.autograd.grad(found.sum(), single), grads, strict=True):
        assert grad.dtype == torch.float32
        assert relative(grad.double(), exact) < 0.05


def test_strided_inputs() -> None:
    x = torch.randn(HIDDEN, 3, 8, dtype=torch.float64, requires_grad=True)
    stored = torch.randn(HIDDEN, 2 * CLASSES, dtype=torch.float64, requires_grad=True)
    one_bias = torch.randn(1, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(CLASSES, (3, 1)).expand(3, 4)
    grads = []
    for loss in (whole_loss, LinearCrossEntropyLoss(chunk=5)):
        value = loss(x.permute(1, 2, 0)[:, ::2], stored.t()[::2], labels, one_bias.expand(CLASSES))
        grads.append(torch.autograd.grad(value, [x, stored, one_bias]))
    assert all(relative(found, wanted) < 1e-12 for wanted, found in zip(*grads, strict=True))


def test_large_and_masked_logits() -> None:
    x, weight, labels = operands(6)
    bias = torch.zeros(CLASSES, dtype=torch.float64)
    bias[3] = float("-inf")  # a class that is masked
    labels[labels == 3] = 4
    x = (300.0 * x).detach().requires_grad_()
    values = [loss(x, weight, labels, bias) for loss in (whole_loss, LinearCrossEntropyLoss(chunk=4))]
    assert relative(values[1].detach(), values[0].detach()) < 1e-12
    grads = [torch.autograd.grad(value, [x, weight]) for value in values]
    assert all(relative(found, wanted) < 1e-12 for wanted, found in zip(*grads, strict=True))


@pytest.mark.skipif(not hasattr(functional, "linear_cross_entropy"), reason="this torch has none")
def test_as_the_one_of_torch() -> None:
    x, weight, labels = operands(40)
    labels[::3] = -100
    options = nn.LinearCrossEntropyOptions(batch_chunk_size=8, chunking_method=None)
    wanted = functional.linear_cross_entropy(x, weight, labels, options=options)
    found = LinearCrossEntropyLoss(chunk=8)(x, weight, labels)
    assert relative(found.detach(), wanted.detach()) < 1e-12
    grads = [torch.autograd.grad(value, [x, weight]) for value in (wanted, found)]
    assert all(relative(mine, theirs) < 1e-12 for theirs, mine in zip(*grads, strict=True))


def test_memory() -> None:
    """A chunk of logits in the place of three times all of them, and the gradients."""
    rows, hidden, classes, chunk = 512, 16, 1000, 64
    x = torch.randn(rows, hidden, requires_grad=True)
    weight = torch.randn(classes, hidden, requires_grad=True)
    labels = torch.randint(classes, (rows,))
    with LiveBytes(x, weight, labels) as whole:
        whole_loss(x, weight, labels).backward()
    x.grad = weight.grad = None
    with LiveBytes(x, weight, labels) as chunked:
        LinearCrossEntropyLoss(chunk=chunk)(x, weight, labels).backward()
    grads = 4 * hidden * (rows + classes)
    logits = 4 * rows * classes
    assert whole.peak > 2 * logits
    few_rows = 100 * rows  # losses and labels
    assert chunked.peak < grads + logits * chunk // rows + 4 * hidden * (classes + chunk) + few_rows
    x.grad = weight.grad = None
    with torch.no_grad(), LiveBytes(x, weight, labels) as alone:
        LinearCrossEntropyLoss(chunk=chunk)(x, weight, labels)
    assert alone.peak < logits * chunk // rows + few_rows


@pytest.mark.long
def test_under_torch_compile() -> None:
    x, weight, labels = operands(6)
    loss = LinearCrossEntropyLoss()

    def twice(x: Tensor) -> Tensor:
        return 2.0 * loss(x + x, weight, labels)

    values = [torch.compile(twice, backend="eager")(x), twice(x)]
    assert torch.equal(*values)
    assert torch.equal(*(torch.autograd.grad(value, x)[0] for value in values))


def test_a_copy() -> None:
    assert copy.deepcopy(LinearCrossEntropyLoss(chunk=3)).chunk == 3
    assert "chunk=3" in repr(LinearCrossEntropyLoss(chunk=3))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reduction": "batchmean"}, "reduction is 'batchmean'; it must be 'mean', 'sum' or 'none'"),
        ({"label_smoothing": 1.5}, "label_smoothing is 1.5"),
        ({"z_loss": -1.0}, "z_loss is -1.0"),
        ({"z_loss": float("nan")}, "z_loss is nan"),
        ({"logits_scale": 0.0}, "logits_scale is 0.0"),
        ({"softcap": 0.0}, "softcap is 0.0"),
        ({"chunk": 0}, "chunk is 0"),
        ({"chunk": 2.0}, "chunk is 2.0"),
    ],
)
def test_refuses_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LinearCrossEntropyLoss(**options)


def test_refuses_operands() -> None:
    x, weight, labels = operands(6)
    loss = LinearCrossEntropyLoss()
    bias = torch.zeros(CLASSES, dtype=torch.float64)
    refused: list[tuple[str, tuple[Any, ...]]] = [
        ("labels from 0 to 11, but there are 11 classes", (x, weight, torch.arange(6) * 11 // 5)),
        ("labels from -1 to", (x, weight, labels.index_fill(0, torch.tensor([2]), -1))),
        ("labels of type torch.float32", (x, weight, labels.float())),
        ("labels of shape \\(5,\\)", (x, weight, labels[1:])),
        ("they must be \\(..., hidden\\) and \\(classes, hidden\\)", (x, weight.t(), labels)),
        ("a bias of shape \\(11, 1\\)", (x, weight, labels, bias[:, None])),
        ("a weight of type torch.float32", (x, weight.float(), labels)),
        ("a bias of type torch.float32", (x, weight, labels, bias.float())),
        ("token_weights of shape \\(1,\\)", (x, weight, labels, None, torch.ones(1))),
        ("need no gradient", (x, weight, labels, None, torch.ones(6, requires_grad=True))),
    ]
    for message, given_operands in refused:
        with pytest.raises(ValueError, match=message):
            loss(*given_operands)
