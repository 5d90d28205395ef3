"""The precisions that Booster takes."""

from functools import partial
from typing import TYPE_CHECKING

from colossalai._not_landed import refuse_name
from colossalai.booster.mixed_precision._mixed_precision import (
    PRECISION_NAMES as PRECISION_NAMES,
)
from colossalai.booster.mixed_precision._mixed_precision import (
    BF16MixedPrecision as BF16MixedPrecision,
)
from colossalai.booster.mixed_precision._mixed_precision import (
    FP16ApexMixedPrecision as FP16ApexMixedPrecision,
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
from colossalai.booster.mixed_precision._table import precision_table as precision_table

if not TYPE_CHECKING:
    __getattr__ = partial(refuse_name, __name__)  # PEP 562: names that have not landed
