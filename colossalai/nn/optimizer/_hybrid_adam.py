"""Adam for parameters on any device, whose states in the host's memory may go to disk."""

from pathlib import Path

from torch import Tensor
from torch.optim.optimizer import ParamsT

from colossalai.nn.optimizer._adam import Adam, disk_offload
from colossalai.nn.optimizer._disk import DiskOptions
from colossalai.registry import OPTIMIZERS


@OPTIMIZERS.register_module
class HybridAdam(Adam):
    """Adam on torch's fused kernels, for parameters on the host, on accelerators, or on both.

    A parameter is updated on its device. Its gradient is there too.

    Args:
        model_params: Parameters, or groups of them with their own options.
        lr: Learning rate.
        bias_correction: Whether the averages, which start at 0, are corrected for it.
        betas: Rates of the running averages of the gradient and of its square.
        eps: Added to the denominator.
        weight_decay: Weight decay.
        adamw_mode: Whether the decay is decoupled as in AdamW, and not a part of the gradient.
        nvme_offload_fraction: The fraction of the states that is in files, by whole parameters. Only states
            in the memory of the host can be.
        nvme_offload_dir: Parent of the private folder of those files; None for the system's temporary folder.
        nvme_options: Options of reading and writing them.

    Raises:
        ValueError: `lr`, `eps` or `weight_decay` is negative, a rate of `betas` is not in [0, 1), or
            `nvme_offload_fraction` is not in [0, 1].
        OSError: The folder for the states cannot be made.
    """

    def __init__(
        self,
        model_params: ParamsT,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adamw_mode: bool = True,
        nvme_offload_fraction: float = 0.0,
        nvme_offload_dir: str | Path | None = None,
        *,
        nvme_options: DiskOptions = DiskOptions(),  # noqa: B008 - frozen
    ) -> None:
        super().__init__(
            model_params,
            lr,
            bias_correction=bias_correction,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            decoupled_weight_decay=adamw_mode,
            offload=disk_offload(nvme_offload_fraction, nvme_offload_dir, nvme_options),
        )


@OPTIMIZERS.register_module
class CPUAdam(HybridAdam):
    """`HybridAdam` under its older name: torch's fused kernels leave nothing special to a CPU."""
