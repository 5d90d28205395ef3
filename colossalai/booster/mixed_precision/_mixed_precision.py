"""Precisions of a Booster, by name or as objects with options.

An object is a precision of `colossalai.amp` with the name and options of the documents; each option is
defined and checked there only.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from colossalai._aliases import NAMES
from colossalai._lazy import find_name
from colossalai._not_landed import FP8
from colossalai.amp import (
    AMP_TYPE,
    AutoPrecision,
    BF16Autocast,
    FP16Autocast,
    FullPrecision,
    NaiveFP16,
    Precision,
    precision_of,
)


class MixedPrecision(ABC):
    """A choice of precision; a user's subclass returns its own `colossalai.amp.Precision`."""

    @abstractmethod
    def precision(self) -> Precision:
        """Return the precision of this choice."""


@dataclass(frozen=True)
class FP16TorchMixedPrecision(FP16Autocast, MixedPrecision):
    """Autocast to float16 with a dynamic loss scale; the options are those of `FP16Autocast`."""

    def precision(self) -> Precision:
        """See the base class."""
        return FP16Autocast(**vars(self))


@dataclass(frozen=True)
class BF16MixedPrecision(MixedPrecision):
    """Bfloat16, which needs no loss scale: autocast, or a model in bfloat16.

    Args:
        master_weights: Hold the model in bfloat16, with float32 masters of the weights in the optimizer.
            Default: parameters keep their dtype, and torch casts the inputs of operations.
    """

    master_weights: bool = False

    def __post_init__(self) -> None:
        self.precision()  # checks the option

    def precision(self) -> Precision:
        """See the base class."""
        return precision_of(AMP_TYPE.BF16, vars(self))


@dataclass(frozen=True)
class FP16NaiveMixedPrecision(NaiveFP16, MixedPrecision):
    """All in float16, with float32 masters of the weights and a dynamic loss scale.

    The options are those of `NaiveFP16`.
    """

    def precision(self) -> Precision:
        """See the base class."""
        return NaiveFP16(**vars(self))


@dataclass(frozen=True)
class _Named(MixedPrecision):
    """A precision without options."""

    named: Precision

    def precision(self) -> Precision:
        """See the base class."""
        return self.named


def apex_mixed_precision() -> Callable[..., MixedPrecision]:
    """Return `FP16ApexMixedPrecision`, an older spelling, which is imported at the first call."""
    found: Callable[..., MixedPrecision] = find_name(
        __package__, NAMES[__package__], "FP16ApexMixedPrecision"
    )
    return found


_FACTORIES: Mapping[str, Callable[[], MixedPrecision]] = {
    "fp16": FP16TorchMixedPrecision,
    "fp16_naive": FP16NaiveMixedPrecision,
    "fp16_apex": lambda: apex_mixed_precision()(),
    "bf16": BF16MixedPrecision,
    "bf16_master": lambda: BF16MixedPrecision(master_weights=True),
    "fp32": lambda: _Named(FullPrecision()),
    "auto": lambda: _Named(AutoPrecision(BF16Autocast())),
}


PRECISION_NAMES = tuple(_FACTORIES)
"""The names of `mixed_precision_factory`."""


def mixed_precision_factory(name: str) -> MixedPrecision:
    """Return the precision of a name, with its default options.

    Raises:
        ValueError: `name` is unknown.
    """
    if str(name).lower().startswith("fp8"):
        raise ValueError(f"mixed_precision is {name!r}; it must be one of {list(_FACTORIES)}. {FP8}")
    if name not in _FACTORIES:
        raise ValueError(
            f"mixed_precision is {name!r}; it must be one of {list(_FACTORIES)} or a MixedPrecision object"
        )
    return _FACTORIES[name]()
