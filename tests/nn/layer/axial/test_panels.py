"""Attention in panels: values and gradients of the plain form, whose scores of all rows never exist."""

from itertools import product

import pytest
import torch
from torch import Tensor, nn

from colossalai.nn.layer.axial import GatedAttention, RowAttention
from tests.nn.live_bytes import LiveBytes

pytestmark = pytest.mark.unit

# A panel has 2**20 scores on a CPU: two rows of these.
BATCH, ROWS, N, DIM, HEADS, HEAD_DIM = 2, 3, 256, 4, 8, 2


def arguments(dtype: torch.dtype = torch.float64, n: int = N) -> tuple[GatedAttention, list[Tensor]]:
    """Return a layer with random parameters, and an input, bias and mask; the last row has no position."""
    torch.manual_seed(0)
    layer = GatedAttention(DIM, HEADS, HEAD_DIM, dtype=torch.float64)
    for param in layer.parameters():
        nn.init.normal_(param, std=0.5)
    x = torch.randn(BATCH, ROWS, n, DIM, dtype=torch.float64)
    bias = torch.randn(BATCH, n, n, HEADS, dtype=torch.float64)
    mask = torch.rand(BATCH, ROWS, n) < 0.7
    mask[-1, -1] = False
    return layer.to(dtype), [x.to(dtype), bias.to(dtype).movedim(-1, 1), mask]


def plain(layer: GatedAttention, x: Tensor, bias: Tensor | None, mask: Tensor | None) -> Tensor:
    """Return the output of a layer by all scores at once; a row without positions attends to all."""
    heads = (HEADS, HEAD_DIM)
    query, key, value = (
        linear(x).unflatten(-1, heads).transpose(-2, -3) for linear in (layer.query, layer.key, layer.value)
    )
    scores = query @ key.mT / HEAD_DIM**0.5  # (batch, rows, heads, n, n)
    if bias is not None:
        scores = scores + bias.unsqueeze(1)
    if mask is not None:
        exists = mask | ~mask.any(-1, keepdim=True)
        scores = scores.masked_fill(~exists[:, :, None, None, :], float("-inf"))
    mean = (scores.softmax(-1) @ value).transpose(-2, -3).flatten(-2)
    output: Tensor = layer.out(mean * layer.gate(x).sigmoid())
    return output


@pytest.mark.parametrize(("has_bias", "has_mask"), product([True, False], repeat=2))
@pytest.mark.parametrize("n", [N, 7])
def test_values_and_gradients(has_bias: bool, has_mask: bool, n: int) -> None:
    """Panels of two rows and of one, of two samples, and a panel of all rows."""
    layer, (x, bias, mask) = arguments(n=n)
    given = (x.requires_grad_(), bias.requires_grad_() if has_bias else None, mask if has_mask else None)
    params = [x, *([bias] if has_bias else []), *layer.parameters()]
    found, wanted = layer(*given), plain(layer, *given)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
    weight = torch.randn_like(found)
    grads = [torch.autograd.grad((output * weight).sum(), params) for output in (found, wanted)]
    torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_bias", [True, False])
def test_low_precision(dtype: torch.dtype, has_bias: bool) -> None:
    """Products are rounded; scores and exponentials are not: those near 128 would lose all digits but one."""
    layer, (x, bias, mask) = arguments(dtype, n=9)
    bias = 128 + bias.detach().round()
    exact_layer, _ = arguments(n=9)
    exact_layer.load_state_dict(layer.state_dict())
    outputs, grads = [], []
    for each, compute in ((layer, layer), (exact_layer, lambda *args: plain(exact_layer, *args))):
        inputs = [tensor.detach().to(each.out.weight.dtype).requires_grad_() for tensor in (x, bias)]
        output = compute(inputs[0], inputs[1] if has_bias else None, mask)
        outputs.append(output.double())
        grads.append(torch.autograd.grad(output.sum(), inputs[: 1 + has_bias]))
    eps = torch.finfo(dtype).eps
    assert outputs[0].sub(outputs[1]).norm() < 3 * eps * outputs[1].norm()
    for own, wanted in zip(*grads, strict=True):
        assert own.dtype == dtype
        assert own.sub(wanted).norm() < 4 * eps * wanted.norm()


def test_scores_of_all_rows_never_exist() -> None:
    """The peak of a forward and backward is below the scores of all rows, with a mask, too."""
    layer = GatedAttention(8, 16, 2)
    x, bias = torch.randn(1, 96, 96, 8), torch.randn(1, 16, 96, 96, requires_grad=True)
    scores = 4 * 16 * 96**3
    with LiveBytes() as live:
        layer(x, bias, torch.ones(1, 96, 96)).sum().backward()
    assert live.peak < 0.75 * scores
    with LiveBytes() as live:
        plain_output = nn.functional.scaled_dot_product_attention(
            *(torch.randn(96, 16, 96, 2, requires_grad=True) for _ in range(3)), bias
        )
        plain_output.sum().backward()
    assert live.peak > scores


def test_recomputed_and_autocast() -> None:
    """`torch.utils.checkpoint` has the same gradients, and autocast the products' type."""
    torch.manual_seed(0)
    layer = RowAttention(6, 2, 3, 4)
    nn.init.normal_(layer.attention.out.weight)
    x, pair = torch.randn(2, 3, 5, 6, requires_grad=True), torch.randn(2, 5, 5, 4, requires_grad=True)
    params = [x, pair, *layer.parameters()]
    wanted = torch.autograd.grad(layer(x, pair).sum(), params)
    again = torch.utils.checkpoint.checkpoint(layer, x, pair, use_reentrant=False)
    for own, theirs in zip(torch.autograd.grad(again.sum(), params), wanted, strict=True):
        assert torch.equal(own, theirs)
    with torch.autocast("cpu", torch.bfloat16):
        found = layer(x, pair)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), layer(x, pair), rtol=0.05, atol=0.05)
    for own, theirs in zip(torch.autograd.grad(found.float().sum(), params), wanted, strict=True):
        torch.testing.assert_close(own, theirs, rtol=0.1, atol=0.1)


def test_export_has_any_length() -> None:
    """An exported layer has no loop over panels, and its lengths can be dynamic."""
    layer = RowAttention(6, 2, 3, 4).eval()
    nn.init.normal_(layer.attention.out.weight)
    residues = torch.export.Dim("residues", min=2, max=64)
    exported = torch.export.export(
        layer,
        (torch.randn(2, 3, 5, 6), torch.randn(2, 5, 5, 4), torch.ones(2, 3, 5)),
        dynamic_shapes=({2: residues}, {1: residues, 2: residues}, {2: residues}),
        strict=False,
    ).module()
    mask = torch.ones(2, 3, 9)
    mask[..., 7:] = 0
    given = (torch.randn(2, 3, 9, 6), torch.randn(2, 9, 9, 4), mask)
    torch.testing.assert_close(exported(*given), layer(*given))
