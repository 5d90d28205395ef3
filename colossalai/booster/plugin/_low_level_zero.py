"""Plugin of ZeRO 1 and 2: optimizer states, and gradients, sharded over the data-parallel ranks."""

from collections.abc import Sequence
from inspect import signature
from typing import Any

import torch

from colossalai.amp import AutoPrecision, FullPrecision, NaiveFP16, Precision, PureBF16, check_clipping
from colossalai.booster.mixed_precision import MixedPrecision
from colossalai.booster.plugin._plugin import Plugin
from colossalai.context import names_arguments
from colossalai.logging import get_dist_logger
from colossalai.runtime import Plan
from colossalai.zero import ZeroReplicas


class LowLevelZeroPlugin(Plugin):
    """ZeRO: stage 1 shards optimizer states (with float32 masters) over the ranks, stage 2 also gradients.

    Elementwise optimizers work on slices, others get whole tensors; see
    `colossalai.zero.declare_elementwise`.

    Args:
        stage: 1 or 2.
        precision: "bf16" and "fp16": all in that precision, with float32 masters of the weights in the
            optimizer. "fp32": as the model is. "auto" (default): "bf16" on devices that are fast at it, else
            "fp32"; decided by rank 0 at `boost`, and logged. Or a `MixedPrecision` object.
        initial_scale: First loss scale of "fp16", like the options up to `max_scale`.
        min_scale: Lower bound of the scale.
        growth_factor: Factor of the scale after `growth_interval` steps without overflow.
        backoff_factor: Factor of the scale after overflows.
        growth_interval: Number of steps without overflow before the scale grows.
        hysteresis: Number of overflows since the last growth before the scale shrinks.
        max_scale: Upper bound of the scale.
        max_norm: Bound of the gradient norm over all ranks in `optimizer.step()`; 0 for no clipping.
        norm_type: The p of that norm.
        reduce_bucket_size_in_m: Size of a bucket of gradients in MB (1024 * 1024 bytes).
        communication_dtype: Dtype of gradients in collectives; None: their own.
        overlap_communication: Average gradients while the backward runs; False: at its end.
        cpu_offload: Keep optimizer states and masters in host memory.
        verbose: Log every change of the loss scale.
        recompute: Checkpoint activations: True for the model's blocks, names of sub-modules, or one name.

    Raises:
        ValueError: `stage` is not 1 or 2, `precision` is unknown, a number is out of range, or a flag is not
            a bool.
    """

    @names_arguments
    def __init__(  # noqa: PLR0913 - the documented options
        self,
        stage: int = 1,
        precision: MixedPrecision | str = "auto",
        initial_scale: float = 2.0**32,
        min_scale: float = 1.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
        max_scale: float = 2.0**32,
        max_norm: float = 0.0,
        norm_type: float = 2.0,
        reduce_bucket_size_in_m: float = 12.0,
        communication_dtype: torch.dtype | None = None,
        overlap_communication: bool = True,
        cpu_offload: bool = False,
        verbose: bool = False,
        *,
        recompute: bool | str | Sequence[str] = False,
    ) -> None:
        check_clipping(max_norm, norm_type)
        if norm_type != 2.0 and max_norm == 0:
            get_dist_logger().log_once(
                "norm_type has no effect with max_norm=0: nothing is clipped", ranks=[0]
            )
        if not reduce_bucket_size_in_m > 0:
            raise ValueError(f"reduce_bucket_size_in_m is {reduce_bucket_size_in_m}; it must be above 0")
        flags = {
            "overlap_communication": overlap_communication,
            "cpu_offload": cpu_offload,
            "verbose": verbose,
        }
        for name, value in flags.items():
            if not isinstance(value, bool):
                raise ValueError(f"{name} is {value!r}; it must be True or False")
        self.precision = _precision(
            precision,
            {
                "initial_scale": initial_scale,
                "min_scale": min_scale,
                "growth_factor": growth_factor,
                "backoff_factor": backoff_factor,
                "growth_interval": growth_interval,
                "hysteresis": hysteresis,
                "max_scale": max_scale,
                "verbose": verbose,
            },
        )
        self.max_norm = max_norm
        self.norm_type = norm_type
        self.recompute = recompute
        self.method = ZeroReplicas(
            stage=stage,
            bucket_cap_mb=reduce_bucket_size_in_m,
            overlap=overlap_communication,
            cpu_offload=cpu_offload,
            communication_dtype=communication_dtype,
        )

    def plan(self, precision: Precision) -> Plan:
        """See the base class.

        Raises:
            ValueError: `precision` was given to Booster, and the plugin has its own.
        """
        if not isinstance(precision, FullPrecision):
            raise ValueError(
                "Booster is given a precision, and LowLevelZeroPlugin has one of its own (default 'auto'): "
                "give it to the plugin only"
            )
        return Plan(
            data=self.method,
            precision=self.precision,
            recompute=self.recompute,
            clip_grad_norm=self.max_norm,
            clip_norm_type=self.norm_type,
        )


def _precision(name: MixedPrecision | str, scaler: dict[str, Any]) -> Precision:
    if name == "fp16":
        return NaiveFP16(**scaler)
    defaults = signature(LowLevelZeroPlugin.__init__).parameters
    useless = [key for key, value in scaler.items() if value != defaults[key].default]
    if useless:
        get_dist_logger().log_once(
            f"{', '.join(useless)}: no effect, only precision='fp16' has a loss scale", ranks=[0]
        )
    if isinstance(name, MixedPrecision):
        return name.precision()
    named = {"auto": AutoPrecision(PureBF16()), "bf16": PureBF16(), "fp32": FullPrecision()}
    if name not in named:
        raise ValueError(
            f"precision is {name!r}; it must be 'bf16', 'fp16' (both with float32 masters of the weights), "
            "'fp32', 'auto' or a MixedPrecision object"
        )
    return named[name]
