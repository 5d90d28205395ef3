"""Precisions of a Booster."""

from functools import partial
from typing import TYPE_CHECKING

from colossalai._aliases import NAMES
from colossalai._lazy import find_name
from colossalai.booster.mixed_precision._mixed_precision import (
    PRECISION_NAMES as PRECISION_NAMES,
)
from colossalai.booster.mixed_precision._mixed_precision import (
    BF16MixedPrecision as BF16MixedPrecision,
)
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

if TYPE_CHECKING:
    from colossalai.booster.mixed_precision._table import precision_table as precision_table
    from colossalai.compat._apex import FP16ApexMixedPrecision as FP16ApexMixedPrecision
else:
    _HOMES = {"precision_table": "colossalai.booster.mixed_precision._table", **NAMES[__name__]}
    __getattr__ = partial(find_name, __name__, _HOMES)  # PEP 562
