"""LARS: momentum SGD with one learning rate per layer. You et al. 2017, arXiv 1708.03888, algorithm 1.

For a parameter w with gradient g and momentum buffer u

    ratio = eeta * |w| / (|g| + weight_decay * |w| + epsilon)
    u = momentum * u + lr * ratio * (g + weight_decay * w)
    w = w - u

with 2-norms of the whole tensors. Where |w| or |g| is 0 the ratio is 1. The learning rate is inside of the
momentum, as in the paper and unlike in `torch.optim.SGD`: after a change of the rate the buffer still has the
old one.
"""

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from colossalai.nn.optimizer._stepping import SteppingOptimizer, check_decay_rates, check_not_negative
from colossalai.nn.optimizer._whole_tensor import whole_norms
from colossalai.registry import OPTIMIZERS


@OPTIMIZERS.register_module
class Lars(SteppingOptimizer):
    """Layer-wise adaptive rate scaling for large batches.

    Args:
        params: Parameters, or groups of them with their own options.
        lr: Learning rate.
        momentum: Rate of the momentum.
        eeta: The trust coefficient: the relative change of a layer in one step at lr = 1.
        weight_decay: Weight decay; it is part of the gradient that the ratio scales.
        epsilon: Added to the denominator of the ratio.

    Raises:
        ValueError: `lr`, `eeta`, `weight_decay` or `epsilon` is negative, or `momentum` is not in [0, 1).
    """

    elementwise = False
    """The update of an element needs norms of the whole tensor: a slice of the parameter is not enough."""

    measures_wholes = True
    """If the spec of a parameter cuts it, the ranks add up their squares: see `whole_norms`."""

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        *,
        momentum: float = 0.0,
        eeta: float = 1e-3,
        weight_decay: float = 0.0,
        epsilon: float = 0.0,
    ) -> None:
        check_not_negative(lr=float(lr), eeta=eeta, weight_decay=weight_decay, epsilon=epsilon)
        check_decay_rates(momentum=momentum)
        options = {
            "lr": lr,
            "momentum": momentum,
            "eeta": eeta,
            "weight_decay": weight_decay,
            "epsilon": epsilon,
        }
        super().__init__(params, options)

    def _update_all(self) -> None:
        for params, group in self._lists():
            self._update(params, group)

    def _update(self, params: list[Tensor], group: dict[str, Any]) -> None:
        grads = [param.grad for param in params if param.grad is not None]
        ratios = _trust_ratios(whole_norms(params, params), whole_norms(grads, params), group)
        scales = list((group["lr"] * ratios).unbind())
        updates = list(torch._foreach_add(grads, params, alpha=group["weight_decay"]))
        torch._foreach_mul_(updates, scales)
        if group["momentum"] != 0:
            buffers = [self._momentum_of(param) for param in params]
            torch._foreach_mul_(buffers, group["momentum"])
            torch._foreach_add_(buffers, updates)
            updates = buffers
        torch._foreach_sub_(params, updates)

    def _momentum_of(self, param: Tensor) -> Tensor:
        state = self.state[param]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        buffer: Tensor = state["momentum_buffer"]
        return buffer


def _trust_ratios(param_norms: Tensor, grad_norms: Tensor, group: dict[str, Any]) -> Tensor:
    both = (param_norms > 0) & (grad_norms > 0)
    denominators = grad_norms + group["weight_decay"] * param_norms + group["epsilon"]
    return torch.where(both, group["eeta"] * param_norms / denominators, 1.0)
