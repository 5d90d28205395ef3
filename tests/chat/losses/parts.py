"""What holds for every loss: parts of a batch add up, and what is masked has no say."""

import math
from collections.abc import Callable, Sequence

import torch
from hypothesis import strategies as st
from torch import Tensor

Loss = Callable[..., Tensor]

JUNK = (math.nan, math.inf, -math.inf, 1e38, -1e38)


@st.composite
def masks(draw: st.DrawFn, *, max_batch: int = 4, max_length: int = 5) -> Tensor:
    """Draw a mask (batch, length) with at least one token."""
    batch = draw(st.integers(1, max_batch))
    length = draw(st.integers(2, max_length))
    bits = draw(st.lists(st.booleans(), min_size=batch * length, max_size=batch * length))
    mask = torch.tensor(bits).view(batch, length)
    mask[draw(st.integers(0, batch - 1)), draw(st.integers(1, length - 1))] = True
    return mask


def normal(seed: int, *shape: int, scale: float = 1.0) -> Tensor:
    """Return normal numbers in float64."""
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def with_grads(loss: Loss, *tensors: Tensor) -> list[Tensor]:
    """Return the loss and its gradients, zeros for those that it does not give."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    value = loss(*leaves)
    grads = torch.autograd.grad(value, leaves, allow_unused=True)
    return [
        value.detach(),
        *(torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads, strict=True)),
    ]


def assert_same(found: Sequence[Tensor], wanted: Sequence[Tensor], atol: float = 1e-12) -> None:
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, atol=atol, rtol=1e-12)


def assert_parts_add_up(loss: Loss, whole: Loss, tensors: Sequence[Tensor], sizes: Sequence[int]) -> None:
    """Compare the sum of parts of a batch with the whole one, and the gradients side by side.

    Args:
        loss: Of tensors that are parts, with the divisor of the whole.
        whole: Of all of them, without a divisor.
        tensors: What is differentiated, and whatever else is cut along the batch.
        sizes: Of the parts.
    """
    floats = [tensor.is_floating_point() for tensor in tensors]
    leaves = [x.detach().clone().requires_grad_(f) for x, f in zip(tensors, floats, strict=True)]
    parts = zip(*(leaf.split(list(sizes)) for leaf in leaves), strict=True)
    total = torch.stack([loss(*part) for part in parts]).sum()
    total.backward()
    others = [x.detach().clone().requires_grad_(f) for x, f in zip(tensors, floats, strict=True)]
    value = whole(*others)
    value.backward()
    torch.testing.assert_close(total, value, atol=1e-13, rtol=1e-13)
    for leaf, other in zip(leaves, others, strict=True):
        assert (leaf.grad is None) == (other.grad is None)
        if leaf.grad is not None:
            torch.testing.assert_close(leaf.grad, other.grad, atol=1e-13, rtol=1e-13)


def assert_masked_places_have_no_say(loss: Loss, tensors: Sequence[Tensor], mask: Tensor) -> None:
    """Put junk where the mask is False: loss and gradients stay the same bit for bit, and are zero there."""
    wanted = with_grads(loss, *tensors)
    for junk in JUNK:
        spoiled = [x.masked_fill(~mask.view(*mask.shape, *[1] * (x.dim() - 2)), junk) for x in tensors]
        found = with_grads(loss, *spoiled)
        for a, b in zip(found, wanted, strict=True):
            assert torch.equal(a, b), junk
        for grad in found[1:]:
            assert not grad[~mask].any()
