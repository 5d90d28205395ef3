"""The closure of `Optimizer.step`."""

from collections.abc import Callable

import torch


def loss_of(closure: Callable[[], float] | None) -> float | None:
    """Call a closure with gradients enabled and return its loss; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
