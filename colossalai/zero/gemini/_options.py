"""The documented options of Gemini, for plugins, wrappers and config: defaults and validation."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch

from colossalai.amp import FullPrecision, NaiveFP16, Precision, PureBF16, check_clipping
from colossalai.context import ConfigException, check_keys, check_mapping
from colossalai.logging import get_dist_logger
from colossalai.zero.gemini._search import DEFAULT_INTERVAL, ChunkSizes

if TYPE_CHECKING:
    from colossalai.zero.gemini._method import Gemini
    from colossalai.zero.gemini._whole_modules import ModuleChoice

_PRECISIONS = ("fp16", "bf16", "fp32")
_SCALER = (
    *("initial_scale", "min_scale", "growth_factor", "backoff_factor", "growth_interval"),
    *("hysteresis", "max_scale", "verbose"),
)


@dataclass(frozen=True, kw_only=True)
class GeminiOptions:
    """The options of users; see `GeminiPlugin` for their meaning."""

    device: torch.device | str | int | None = None
    placement_policy: str = "cpu"
    precision: str = "fp16"
    pin_memory: bool = False
    force_outputs_fp32: bool = False
    strict_ddp_mode: bool = False
    search_range_mb: float = 32
    hidden_dim: int | None = None
    min_chunk_size_mb: float = 32
    memstats: Any = None
    gpu_margin_mem_ratio: float = 0.0
    initial_scale: float = 2.0**32
    min_scale: float = 1.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 1000
    hysteresis: int = 2
    max_scale: float = 2.0**32
    max_norm: float = 0.0
    norm_type: float = 2.0
    verbose: bool = False
    memory_budget: int | None = None
    host_budget: int | None = None
    warmup_ratio: float = 0.3
    offload_dir: str | os.PathLike[str] | None = None
    whole_modules: Sequence["ModuleChoice"] = ()

    def __post_init__(self) -> None:
        check_clipping(self.max_norm, self.norm_type)
        if self.precision not in _PRECISIONS:
            raise ValueError(f"precision is {self.precision!r}; it must be one of {', '.join(_PRECISIONS)}")
        for name in ("pin_memory", "force_outputs_fp32", "strict_ddp_mode", "verbose"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be True or False")
        if not 0 <= self.gpu_margin_mem_ratio <= 1:
            raise ValueError(
                f"gpu_margin_mem_ratio is {self.gpu_margin_mem_ratio}; it must be from 0 to 1: the part of "
                "the free device memory that optimizer states take"
            )
        if self.memstats is not None:
            raise ValueError(
                "memstats is given, and the statistics are of this run: the first iteration is recorded; "
                "leave it out"
            )
        self._chunk_sizes()

    def method(self, *, in_pipeline: bool = False) -> "Gemini":
        """Return the data method, for a whole model or for the stages of a pipeline."""
        # Imported here, so that plugins and config can name the options without loading Gemini (20 modules).
        from colossalai.zero.gemini._method import Gemini
        from colossalai.zero.gemini._whole_modules import check_choices

        return Gemini(
            sizes=self._chunk_sizes(),
            placement_policy=self.placement_policy,
            memory_budget=self.memory_budget,
            host_budget=self.host_budget,
            warmup_ratio=self.warmup_ratio,
            gpu_margin_mem_ratio=self.gpu_margin_mem_ratio,
            offload_dir=self.offload_dir,
            pin_memory=self.pin_memory,
            whole_modules=check_choices(self.whole_modules),
            is_strict=self.strict_ddp_mode,
            keeps_grads=in_pipeline,
        )

    def make_precision(self) -> Precision:
        """Return the precision; options of the loss scale without effect are logged once."""
        if self.precision == "fp16":
            return NaiveFP16(**{name: getattr(self, name) for name in _SCALER})
        defaults = {field.name: field.default for field in fields(self)}
        if useless := [name for name in _SCALER if getattr(self, name) != defaults[name]]:
            get_dist_logger().log_once(
                f"{', '.join(useless)}: no effect, only precision='fp16' has a loss scale", ranks=[0]
            )
        if self.precision == "fp32":
            return FullPrecision(returns_float32=self.force_outputs_fp32)
        return PureBF16()

    def _chunk_sizes(self) -> ChunkSizes:
        interval = DEFAULT_INTERVAL if self.hidden_dim is None else self.hidden_dim
        if isinstance(interval, bool) or not isinstance(interval, int) or interval < 1:
            raise ValueError(
                f"hidden_dim is {self.hidden_dim!r}; it must be an integer of at least 1: the step between "
                "sizes of chunks, in elements, such as the hidden size of the model"
            )
        return ChunkSizes.in_mb(self.search_range_mb, interval, self.min_chunk_size_mb)


def gemini_of_config(gemini: Mapping[str, Any]) -> GeminiOptions:
    """Return the options of `gemini=dict(...)` in a config.

    Raises:
        ConfigException: `gemini` is not a dict, or has an unknown key or a wrong value.
    """
    check_mapping(gemini, "gemini", example="gemini=dict(placement_policy='auto')")
    check_keys(gemini, [option.name for option in fields(GeminiOptions)], "gemini")
    try:
        return GeminiOptions(**gemini)
    except ValueError as error:
        raise ConfigException(f"gemini.{error}") from error
