"""LAMB with the arguments of the fused LAMB that libraries of kernels have; `_lamb.py` has the formulas."""

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from colossalai.nn.optimizer._lamb import Lamb
from colossalai.nn.optimizer._stepping import SetGradNone, check_not_negative
from colossalai.nn.optimizer._whole_tensor import whole_norms
from colossalai.registry import OPTIMIZERS


@OPTIMIZERS.register_module
class FusedLAMB(SetGradNone, Lamb):
    """Lamb that clips the gradients, with a trust ratio only where there is weight decay.

    Args:
        params: Parameters, or groups of them with their own options.
        lr: Learning rate.
        bias_correction: Whether the averages, which start at 0, are corrected for it.
        betas: Rates of the running averages of the gradient and of its square.
        eps: Added to the denominator.
        weight_decay: Weight decay.
        amsgrad: Not supported.
        adamw_mode: Whether the decay is a part of the update, and not of the gradient.
        grad_averaging: Whether a gradient enters the first average with weight 1 - beta1, and not 1.
        set_grad_none: Default of `set_to_none` in `zero_grad`.
        max_grad_norm: The norm of all gradients that this process holds is clipped to it before the update;
            0 to leave them. Under a method that cuts or spreads parameters, give 0, and clip where the
            norm over all ranks is known: `clip_grad_norm` of the config, `max_norm` of a plugin.
        use_nvlamb: Whether parameters without weight decay have a trust ratio too.

    Raises:
        ValueError: `lr`, `eps`, `weight_decay` or `max_grad_norm` is negative, a rate of `betas` is not in
            [0, 1), or `amsgrad` is set.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
    ) -> None:
        if amsgrad:
            raise ValueError("amsgrad=True is not supported: LAMB has no such variant")
        check_not_negative(max_grad_norm=max_grad_norm)
        self.adamw_mode = adamw_mode
        self.grad_averaging = grad_averaging
        self.set_grad_none = set_grad_none
        self.max_grad_norm = max_grad_norm
        self.use_nvlamb = use_nvlamb
        self._grad_scale: Tensor | None = None  # within a step: the clipping factor
        super().__init__(
            params,
            lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            bias_correction=bias_correction,
        )

    def __getstate__(self) -> dict[str, Any]:
        own = ("adamw_mode", "grad_averaging", "max_grad_norm", "use_nvlamb", "_grad_scale")
        return {**super().__getstate__(), **{name: vars(self)[name] for name in own}}

    def _update_all(self) -> None:
        self._grad_scale = self._clip_factor() if self.max_grad_norm > 0 else None
        super()._update_all()

    def _clip_factor(self) -> Tensor | None:
        norms = [
            whole_norms([param.grad for param in params if param.grad is not None], params)
            for params, _ in self._lists()
        ]
        if not norms:
            return None
        norm = torch.cat([each.to(norms[0].device) for each in norms]).norm()
        factor: Tensor = (self.max_grad_norm / norm).clamp(max=1.0)
        return factor

    def _gradients(self, params: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        grads = super()._gradients(params, group)
        if self._grad_scale is not None:
            grads = list(torch._foreach_mul(grads, self._grad_scale.to(grads[0].device, grads[0].dtype)))
        if not self.adamw_mode and group["weight_decay"] != 0:
            grads = list(torch._foreach_add(grads, params, alpha=group["weight_decay"]))
        return grads

    def _average(self, averages: list[Tensor], grads: list[Tensor], beta1: float) -> None:
        if self.grad_averaging:
            super()._average(averages, grads, beta1)
        else:
            torch._foreach_mul_(averages, beta1)
            torch._foreach_add_(averages, grads)

    def _decay_of_update(self, group: dict[str, Any]) -> float:
        return group["weight_decay"] if self.adamw_mode else 0.0

    def _has_trust_ratio(self, group: dict[str, Any]) -> bool:
        return self.use_nvlamb or group["weight_decay"] != 0
