"""The precisions that Booster takes, by name or as objects with options."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

import torch

from colossalai.amp import (
    ApexPrecision,
    BF16Autocast,
    FP16Autocast,
    FullPrecision,
    NaiveFP16,
    Precision,
    PureBF16,
)


class MixedPrecision(ABC):
    """A choice of precision; a subclass of your own returns a `colossalai.amp.Precision` of your own."""

    @abstractmethod
    def precision(self) -> Precision:
        """Return what the core does for this choice."""


@dataclass(frozen=True)
class FP16TorchMixedPrecision(MixedPrecision):
    """Autocast to float16 with a dynamic loss scale.

    Args:
        init_scale: The first scale.
        growth_factor: Factor of the scale after `growth_interval` steps without overflow.
        backoff_factor: Factor of the scale after an overflow.
        growth_interval: Number of steps without overflow before the scale grows.
        max_consecutive_skips: So many skipped steps in a row stop training; 0 for no bound.
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    max_consecutive_skips: int = 50

    def precision(self) -> Precision:
        """See the base class."""
        return FP16Autocast(**asdict(self))


@dataclass(frozen=True)
class FP16ApexMixedPrecision(MixedPrecision):
    """One of the optimization levels of NVIDIA Apex, built on torch; None leaves an option to the level.

    O0 is float32; O1 autocast to float16; O2 a float16 model with float32 batch normalization and masters of
    the weights; O3 a float16 model and nothing else. O1 and O2 scale the loss dynamically.

    Args:
        opt_level: "O0", "O1", "O2" or "O3".
        cast_model_type: The dtype of parameters, buffers and inputs; not under O1.
        patch_torch_functions: Let torch choose the dtype of each operation (autocast); under O1 only.
        keep_batchnorm_fp32: Leave batch normalizations in float32; not under O1.
        master_weights: Let the optimizer work on float32 copies of the weights; not under O1.
        loss_scale: "dynamic", or a fixed number above 0.
        cast_model_outputs: The dtype of what the model returns; None: float32.
        num_losses: Number of losses. They share one scale: more than one has no effect.
        verbosity: 0 for silence, 1 to warn of skipped steps, 2 to log every change of the scale.
        min_loss_scale: A dynamic scale does not shrink below it; None for no bound.
        max_loss_scale: A dynamic scale does not grow above it.
        max_consecutive_skips: So many skipped steps in a row stop training; 0 for no bound.

    Raises:
        ValueError: An option is not what it must be, or does not go with the level.
    """

    opt_level: str = "O1"
    cast_model_type: torch.dtype | None = None
    patch_torch_functions: bool | None = None
    keep_batchnorm_fp32: bool | None = None
    master_weights: bool | None = None
    loss_scale: float | str | None = None
    cast_model_outputs: torch.dtype | None = None
    num_losses: int = 1
    verbosity: int = 1
    min_loss_scale: float | None = None
    max_loss_scale: float = 2.0**24
    max_consecutive_skips: int = 50

    def __post_init__(self) -> None:
        self.precision()  # it checks the options

    def precision(self) -> Precision:
        """See the base class."""
        return ApexPrecision(**asdict(self))


@dataclass(frozen=True)
class BF16MixedPrecision(MixedPrecision):
    """Bfloat16, which needs no loss scale: autocast, or a model that is all bfloat16.

    Args:
        master_weights: Hold the model in bfloat16, with float32 masters of the weights in the optimizer;
            default: leave the parameters as they are and let torch cast what operations take.
    """

    master_weights: bool = False

    def precision(self) -> Precision:
        """See the base class."""
        return PureBF16() if self.master_weights else BF16Autocast()


@dataclass(frozen=True)
class FP16NaiveMixedPrecision(MixedPrecision):
    """All in float16, with float32 masters of the weights and a dynamic loss scale.

    Args:
        log_num_zeros_in_grad: Log before every step how many elements of the gradients are 0.
        initial_scale: The first scale.
        min_scale: The scale does not shrink below it.
        growth_factor: Factor of the scale after `growth_interval` steps without overflow.
        backoff_factor: Factor of the scale after overflows.
        growth_interval: Number of steps without overflow before the scale grows.
        hysteresis: Number of overflows since the last growth before the scale shrinks.
        max_scale: The scale does not grow above it.
        verbose: Log every change of the scale.
        max_consecutive_skips: So many skipped steps in a row stop training; 0 for no bound.
    """

    log_num_zeros_in_grad: bool = False
    initial_scale: float = 2.0**32
    min_scale: float = 1.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 1000
    hysteresis: int = 2
    max_scale: float = 2.0**32
    verbose: bool = False
    max_consecutive_skips: int = 50

    def precision(self) -> Precision:
        """See the base class."""
        return NaiveFP16(**asdict(self))


@dataclass(frozen=True)
class _Named(MixedPrecision):
    """A precision without options."""

    named: Precision

    def precision(self) -> Precision:
        """See the base class."""
        return self.named


_FACTORIES: Mapping[str, Callable[[], MixedPrecision]] = {
    "fp16": FP16TorchMixedPrecision,
    "fp16_naive": FP16NaiveMixedPrecision,
    "fp16_apex": FP16ApexMixedPrecision,
    "bf16": BF16MixedPrecision,
    "bf16_master": lambda: BF16MixedPrecision(master_weights=True),
    "fp32": lambda: _Named(FullPrecision()),
}


PRECISION_NAMES = tuple(_FACTORIES)
"""The names that `mixed_precision_factory` knows."""


def mixed_precision_factory(name: str) -> MixedPrecision:
    """Return the choice of precision of a name, with its default options.

    Raises:
        ValueError: There is no such name.
    """
    if name not in _FACTORIES:
        raise ValueError(
            f"mixed_precision is {name!r}; it must be one of {list(_FACTORIES)} or a MixedPrecision object"
        )
    return _FACTORIES[name]()
