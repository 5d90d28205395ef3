"""Momentum SGD on torch's fused kernels.

For a weight w with gradient g and momentum buffer u, which is g at first,

    u = momentum * u + (1 - dampening) * g        d = g + momentum * u with Nesterov's momentum, else u
    w = w - lr * d

Weight decay is a part of g, or, after the momentum, of d: then it is `w = w * (1 - lr * weight_decay) - lr *
d`.
"""

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from colossalai.nn.optimizer._adam_kernel import is_dense, laid_out_as, local
from colossalai.nn.optimizer._stepping import SetGradNone, SteppingOptimizer, check_not_negative
from colossalai.registry import OPTIMIZERS


@OPTIMIZERS.register_module
class FusedSGD(SetGradNone, SteppingOptimizer):
    """Stochastic gradient descent with the state of `torch.optim.SGD`.

    Args:
        params: Parameters, or groups of them with their own options.
        lr: Learning rate.
        momentum: Rate of the momentum.
        dampening: Fraction of the gradient that does not enter the momentum.
        weight_decay: Weight decay.
        nesterov: Whether to look ahead along the momentum.
        wd_after_momentum: Whether the weight decay does not enter the momentum.
        set_grad_none: Default of `set_to_none` in `zero_grad`.

    Raises:
        ValueError: `lr`, `momentum` or `weight_decay` is negative, or `nesterov` is set without momentum or
            with dampening.
    """

    elementwise = True
    """The update of an element needs that element alone: slices may be updated one by one."""

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        check_not_negative(lr=float(lr), momentum=momentum, weight_decay=weight_decay)
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError(
                f"nesterov=True with momentum={momentum} and dampening={dampening}: give a momentum above 0 "
                f"and a dampening of 0"
            )
        self.set_grad_none = set_grad_none
        options = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "wd_after_momentum": wd_after_momentum,
            "maximize": False,
            "foreach": None,
            "differentiable": False,
            "fused": True,
        }
        super().__init__(params, options)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # one of torch's SGD lacks some
            for key, value in self.defaults.items():
                group.setdefault(key, value)

    def _update_all(self) -> None:
        for params, group in self._lists():
            new = [param for param in params if self.state[param].get("momentum_buffer") is None]
            old = [param for param in params if self.state[param].get("momentum_buffer") is not None]
            self._update(new, group, is_first_step=True)
            self._update(old, group, is_first_step=False)

    def _update(self, params: list[Tensor], group: dict[str, Any], *, is_first_step: bool) -> None:
        if not params:
            return
        held = [local(param).detach() for param in params]
        # Torch's fused kernels go through memory in a line: layouts must agree, and have no holes.
        weights = [param if is_dense(param) else param.contiguous() for param in held]
        grads = [
            laid_out_as(local(param.grad), weight)
            for param, weight in zip(params, weights, strict=True)
            if param.grad is not None
        ]
        buffers: list[Tensor] = []
        if group["momentum"] != 0:
            buffers = [self._buffer(*pair) for pair in zip(params, weights, strict=True)]
        weight_decay = group["weight_decay"]
        if group["wd_after_momentum"] and weight_decay != 0:
            torch._foreach_mul_(weights, 1 - float(group["lr"]) * weight_decay)
            weight_decay = 0.0
        torch._fused_sgd_(
            weights,
            grads,
            buffers,
            weight_decay=weight_decay,
            momentum=group["momentum"],
            lr=group["lr"],
            dampening=group["dampening"],
            nesterov=group["nesterov"],
            maximize=group["maximize"],
            is_first_step=is_first_step,
        )
        for param, weight in zip(held, weights, strict=True):
            if weight is not param:
                param.copy_(weight)

    def _buffer(self, param: Tensor, weight: Tensor) -> Tensor:
        """Return the momentum buffer, laid out as the weight; a first step writes it before it reads it."""
        state = self.state[param]
        if state.get("momentum_buffer") is None:
            state["momentum_buffer"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        buffer = local(state["momentum_buffer"])
        if buffer.stride() != weight.stride():
            buffer = state["momentum_buffer"] = laid_out_as(buffer, weight)
        return buffer
