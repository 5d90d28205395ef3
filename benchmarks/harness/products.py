"""Whose products of matrices a variant of a benchmark is measured with: the job's, torch's, or at `medium`.

What a job has chosen holds for the whole process, so peers would profit. They run with torch's own, as
they are used, and once more at `torch.set_float32_matmul_precision("medium")`; ours run with what the job has
chosen, and once more with torch's.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from colossalai.kernel import torch_products

Step = Callable[[], Any]
Around = Callable[[], AbstractContextManager[None]]


@contextmanager
def medium() -> Iterator[None]:
    """Let torch's own products of float32 matrices be at the precision "medium"."""
    before = torch.get_float32_matmul_precision()
    with torch_products():
        torch.set_float32_matmul_precision("medium")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)


def with_products(
    steps: Mapping[str, Step], *, theirs: Collection[str]
) -> tuple[dict[str, Step], dict[str, Around]]:
    """Return steps, those of peers again as "NAME medium", ours as "NAME torch", and what goes around each.

    Args:
        steps: The step of each variant.
        theirs: The names of the peers.
    """
    more, around = dict(steps), {}
    for name, step in steps.items():
        if name in theirs:
            around[name] = torch_products
            more[f"{name} medium"], around[f"{name} medium"] = step, medium
        else:
            more[f"{name} torch"], around[f"{name} torch"] = step, torch_products
    return more, around


def bits_at_medium() -> float:
    """Return how many leading bits of a product are right at "medium": about 8 where it is in bfloat16."""
    a, b = torch.randn(512, 512), torch.randn(512, 512)
    exact = a.double() @ b.double()
    with medium():
        error = (torch.mm(a, b) - exact).abs().max() / exact.abs().max()
    return round(-math.log2(error.item()), 1)
