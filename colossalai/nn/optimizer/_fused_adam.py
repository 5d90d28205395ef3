"""Adam with the arguments of the fused Adam that libraries of kernels have."""

from torch import Tensor
from torch.optim.optimizer import ParamsT

from colossalai.nn.optimizer._adam import Adam, disk_offload
from colossalai.nn.optimizer._disk import DiskOptions
from colossalai.nn.optimizer._stepping import SetGradNone
from colossalai.registry import OPTIMIZERS


@OPTIMIZERS.register_module
class FusedAdam(SetGradNone, Adam):
    """Adam on torch's fused kernels.

    Args:
        params: Parameters, or groups of them with their own options.
        lr: Learning rate.
        bias_correction: Whether the averages, which start at 0, are corrected for it.
        betas: Rates of the running averages of the gradient and of its square.
        eps: Added to the denominator.
        adamw_mode: Whether the decay is decoupled as in AdamW, and not a part of the gradient.
        weight_decay: Weight decay.
        amsgrad: Not supported.
        set_grad_none: Default of `set_to_none` in `zero_grad`.

    Raises:
        ValueError: `lr`, `eps` or `weight_decay` is negative, a rate of `betas` is not in [0, 1), or
            `amsgrad` is set.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adamw_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        if amsgrad:
            raise ValueError("amsgrad=True is not supported; use torch.optim.AdamW(amsgrad=True)")
        self.set_grad_none = set_grad_none
        super().__init__(
            params,
            lr,
            bias_correction=bias_correction,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            decoupled_weight_decay=adamw_mode,
            offload=disk_offload(0.0, None, DiskOptions()),
        )
