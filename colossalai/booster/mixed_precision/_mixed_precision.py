"""The precisions that Booster takes, by name or as objects with options."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

from colossalai.amp import BF16Autocast, FP16Autocast, FullPrecision, NaiveFP16, Precision


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
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000

    def precision(self) -> Precision:
        """See the base class."""
        return FP16Autocast(
            init_scale=self.init_scale,
            growth_factor=self.growth_factor,
            backoff_factor=self.backoff_factor,
            growth_interval=self.growth_interval,
        )


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
        verbose: Log every skipped step and every change of the scale.
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
    "bf16": lambda: _Named(BF16Autocast()),
    "fp32": lambda: _Named(FullPrecision()),
}


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
