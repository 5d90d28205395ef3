"""LAMB: Adam with one learning rate per layer. You et al. 2019, arXiv 1904.00962, algorithm 2.

For a parameter w with gradient g, at its step t = 1, 2, ...

    m = beta1 * m + (1 - beta1) * g               v = beta2 * v + (1 - beta2) * g * g
    r = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay * w
    w = w - lr * (|w| / |r|) * r

with 2-norms of the whole tensors. If one of them is 0 the ratio is 1: a parameter that starts at 0 must be
able to leave it. The paper's function phi of |w| is the identity.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from colossalai.nn.optimizer._stepping import SteppingOptimizer, check_decay_rates, check_not_negative
from colossalai.nn.optimizer._whole_tensor import whole_norms
from colossalai.registry import OPTIMIZERS


@OPTIMIZERS.register_module
class Lamb(SteppingOptimizer):
    """Layer-wise adaptive moments for large batches.

    Args:
        params: Parameters, or groups of them with their own options.
        lr: Learning rate.
        betas: Rates of the running averages of the gradient and of its square.
        eps: Added to the denominator.
        weight_decay: Decoupled weight decay; it is part of the update that the trust ratio scales.
        bias_correction: Whether the averages, which start at 0, are corrected for it.
        adam: Whether the trust ratio is 1, which makes this AdamW with the same options, for comparison.

    Raises:
        ValueError: `lr`, `eps` or `weight_decay` is negative, or a rate of `betas` is not in [0, 1).
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
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        bias_correction: bool = True,
        adam: bool = False,
    ) -> None:
        check_not_negative(lr=float(lr), eps=eps, weight_decay=weight_decay)
        check_decay_rates(beta1=betas[0], beta2=betas[1])
        options = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "adam": adam,
        }
        super().__init__(params, options)

    def _update_all(self) -> None:
        for params, group in self._lists():
            self._update(params, group)

    def _update(self, params: list[Tensor], group: dict[str, Any]) -> None:
        updates = self._adam_directions(params, self._gradients(params, group), group)
        decay = self._decay_of_update(group)
        if decay != 0:
            torch._foreach_add_(updates, params, alpha=decay)
        scales = [-group["lr"]] * len(params)
        if self._has_trust_ratio(group):
            ratios = _trust_ratios(whole_norms(params, params), whole_norms(updates, params))
            scales = list((-group["lr"] * ratios).unbind())
        torch._foreach_mul_(updates, scales)
        torch._foreach_add_(params, updates)

    def _gradients(self, params: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        """Return the gradients to average."""
        return [param.grad for param in params if param.grad is not None]

    def _average(self, averages: list[Tensor], grads: list[Tensor], beta1: float) -> None:
        """Move the first averages on."""
        torch._foreach_lerp_(averages, grads, 1 - beta1)

    def _decay_of_update(self, group: dict[str, Any]) -> float:
        """Return the weight decay that is a part of the update."""
        weight_decay: float = group["weight_decay"]
        return weight_decay

    def _has_trust_ratio(self, group: dict[str, Any]) -> bool:
        return not group["adam"]

    def _adam_directions(
        self, params: list[Tensor], grads: list[Tensor], group: dict[str, Any]
    ) -> list[Tensor]:
        """Move the averages on and return the first, corrected, over the root of the second."""
        beta1, beta2 = group["betas"]
        states = [self._state_of(param) for param in params]
        averages = [state["exp_avg"] for state in states]
        square_averages = [state["exp_avg_sq"] for state in states]
        for state in states:
            state["step"] += 1
        self._average(averages, grads, beta1)
        torch._foreach_mul_(square_averages, beta2)
        torch._foreach_addcmul_(square_averages, grads, grads, 1 - beta2)
        # Each parameter has its own step: it is lower if the parameter was frozen for a while.
        steps = [state["step"].item() if group["bias_correction"] else math.inf for state in states]
        roots = torch._foreach_sqrt(square_averages)
        torch._foreach_div_(roots, [math.sqrt(1 - beta2**step) for step in steps])
        torch._foreach_add_(roots, group["eps"])
        directions = torch._foreach_div(averages, roots)
        torch._foreach_div_(directions, [1 - beta1**step for step in steps])
        return list(directions)

    def _state_of(self, param: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[param]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)  # on the CPU: it is read in every step
            state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        return state


def _trust_ratios(param_norms: Tensor, update_norms: Tensor) -> Tensor:
    both = (param_norms > 0) & (update_norms > 0)
    return torch.where(both, param_norms / update_norms, 1.0)
