"""Matrix products of the variants of a benchmark: the job's choice, torch's, or torch's at "medium".

The choice of a job applies to the whole process, so peers would use it as well. Peers therefore run with
torch's products, their default, and again with `torch.set_float32_matmul_precision("medium")`. Our variants
run with the choice of the job, and again with torch's.
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
    """Set torch's products of float32 matrices to the precision "medium" within the block."""
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
    """Return all steps, with "NAME medium" for peers and "NAME torch" for ours, and their contexts.

    Args:
        steps: Step of each variant.
        theirs: Names of the peers.
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
    """Return the number of correct leading bits of a product at "medium": about 8 in bfloat16."""
    a, b = torch.randn(512, 512), torch.randn(512, 512)
    exact = a.double() @ b.double()
    with medium():
        error = (torch.mm(a, b) - exact).abs().max() / exact.abs().max()
    return round(-math.log2(error.item()), 1)
