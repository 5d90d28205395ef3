"""Plugin of Gemini: parameters, gradients and optimizer states in chunks that are sharded over the ranks."""

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from colossalai.amp import FullPrecision, Precision
from colossalai.booster.plugin._plugin import Plugin
from colossalai.context import names_arguments
from colossalai.runtime import Plan
from colossalai.zero.gemini import GeminiOptions


class GeminiPlugin(Plugin):
    """ZeRO stage 3 in chunks: each rank holds a section of every chunk, which is gathered for its use.

    Models need no changes: tied, reused, frozen and unused weights and both kinds of activation checkpointing
    work. Outside of a forward or a backward, read and write parameters inside `with model.gathered():`.

    Args:
        device: Accepted for compatibility: the model is on the device of this rank.
        placement_policy: Placement of sections and optimizer states: "cuda" on the compute device, "cpu" on
            the host except during computation, "const" within `memory_budget` on the device, "auto" by the
            memory use of the first iteration, "nvme" like "auto", with disk as a third tier.
        precision: "fp16" and "bf16": all in that precision, with float32 masters; "fp32": as the model is.
        pin_memory: Pin sections in host memory; no effect without an accelerator.
        force_outputs_fp32: Accepted for compatibility: the model's output is always float32.
        strict_ddp_mode: Refuse parameters that tensor parallelism has cut.
        search_range_mb: Range of chunk sizes to try above `min_chunk_size_mb`, in MB of 2**20 elements.
        hidden_dim: Step between chunk sizes, in elements. Default: 1024.
        min_chunk_size_mb: Smallest chunk size, in MB of 2**20 elements; a smaller model has one chunk.
        memstats: Not accepted: the first iteration is recorded.
        gpu_margin_mem_ratio: Fraction of the free device memory for optimizer states; no effect without
            an accelerator, where states use all free memory.
        initial_scale: First loss scale of "fp16", like the options up to `max_scale`.
        min_scale: Lower bound of the scale.
        growth_factor: Factor of the scale after `growth_interval` steps without overflow.
        backoff_factor: Factor of the scale after overflows.
        growth_interval: Number of steps without overflow before the scale grows.
        hysteresis: Number of overflows since the last growth before the scale shrinks.
        max_scale: Upper bound of the scale.
        max_norm: Bound of the gradient norm over all ranks in `optimizer.step()`; 0 for no clipping.
        norm_type: The p of that norm.
        verbose: Log every change of the loss scale.
        memory_budget: Number of bytes on the compute device of a rank; None: the free memory; no bound on a
            CPU.
        host_budget: Number of bytes of model data in host memory; None: no bound.
        warmup_ratio: Fraction of `memory_budget` for model data in the first iteration.
        offload_dir: Folder for data on disk.
        whole_modules: Names of modules as in `model.named_modules()`, or classes, that all ranks gather at
            their entry: ranks can run different parts inside, such as experts chosen by data. All enter
            them equally often; not in a pipeline.
        recompute: Checkpoint activations: True for the model's blocks, names of sub-modules, or one name.

    Raises:
        ValueError: An option is unknown, of the wrong type or out of range.
    """

    @names_arguments
    def __init__(  # noqa: PLR0913 - the documented options
        self,
        device: torch.device | str | int | None = None,
        placement_policy: str = "cpu",
        precision: str = "fp16",
        pin_memory: bool = False,
        force_outputs_fp32: bool = False,
        strict_ddp_mode: bool = False,
        search_range_mb: float = 32,
        hidden_dim: int | None = None,
        min_chunk_size_mb: float = 32,
        memstats: Any = None,
        gpu_margin_mem_ratio: float = 0.0,
        initial_scale: float = 2.0**32,
        min_scale: float = 1.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
        max_scale: float = 2.0**32,
        max_norm: float = 0.0,
        norm_type: float = 2.0,
        verbose: bool = False,
        *,
        memory_budget: int | None = None,
        host_budget: int | None = None,
        warmup_ratio: float = 0.3,
        offload_dir: str | os.PathLike[str] | None = None,
        whole_modules: Sequence[str | type[nn.Module]] = (),
        recompute: bool | str | Sequence[str] = False,
    ) -> None:
        self.options = GeminiOptions(
            device=device,
            placement_policy=placement_policy,
            precision=precision,
            pin_memory=pin_memory,
            force_outputs_fp32=force_outputs_fp32,
            strict_ddp_mode=strict_ddp_mode,
            search_range_mb=search_range_mb,
            hidden_dim=hidden_dim,
            min_chunk_size_mb=min_chunk_size_mb,
            memstats=memstats,
            gpu_margin_mem_ratio=gpu_margin_mem_ratio,
            initial_scale=initial_scale,
            min_scale=min_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            hysteresis=hysteresis,
            max_scale=max_scale,
            max_norm=max_norm,
            norm_type=norm_type,
            verbose=verbose,
            memory_budget=memory_budget,
            host_budget=host_budget,
            warmup_ratio=warmup_ratio,
            offload_dir=offload_dir,
            whole_modules=whole_modules,
        )
        self.method = self.options.method()
        self.recompute = recompute

    def plan(self, precision: Precision) -> Plan:
        """See the base class.

        Raises:
            ValueError: `precision` was given to Booster, and the plugin has its own.
        """
        if not isinstance(precision, FullPrecision):
            raise ValueError(
                "Booster is given a precision, and GeminiPlugin has one of its own (default 'fp16'): give it "
                "to the plugin only"
            )
        return Plan(
            data=self.method,
            precision=self.options.make_precision(),
            recompute=self.recompute,
            clip_grad_norm=self.options.max_norm,
            clip_norm_type=self.options.norm_type,
        )
