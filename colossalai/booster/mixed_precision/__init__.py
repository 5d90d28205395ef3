"""The precisions that Booster takes."""

from colossalai.booster.mixed_precision._mixed_precision import (
    FP16NaiveMixedPrecision as FP16NaiveMixedPrecision,
)
from colossalai.booster.mixed_precision._mixed_precision import (
    FP16TorchMixedPrecision as FP16TorchMixedPrecision,
)
from colossalai.booster.mixed_precision._mixed_precision import MixedPrecision as MixedPrecision
from colossalai.booster.mixed_precision._mixed_precision import (
    mixed_precision_factory as mixed_precision_factory,
)
