"""Mixed precision: the context of the forward, loss scaling, and skipped steps."""

from functools import partial
from typing import TYPE_CHECKING

from colossalai._aliases import NAMES
from colossalai._lazy import find_name
from colossalai.amp._amp_type import AMP_TYPE as AMP_TYPE
from colossalai.amp._amp_type import convert_to_amp as convert_to_amp
from colossalai.amp._amp_type import convert_to_apex_amp as convert_to_apex_amp
from colossalai.amp._amp_type import convert_to_naive_amp as convert_to_naive_amp
from colossalai.amp._amp_type import convert_to_torch_amp as convert_to_torch_amp
from colossalai.amp._amp_type import precision_of as precision_of
from colossalai.amp._amp_type import precision_of_config as precision_of_config
from colossalai.amp._gradients import OptimizerGroup as OptimizerGroup
from colossalai.amp._loss_scaling import MAX_CONSECUTIVE_SKIPS as MAX_CONSECUTIVE_SKIPS
from colossalai.amp._loss_scaling import CheckedLossScaler as CheckedLossScaler
from colossalai.amp._loss_scaling import DynamicLossScaler as DynamicLossScaler
from colossalai.amp._loss_scaling import LossScaler as LossScaler
from colossalai.amp._loss_scaling import Overflow as Overflow
from colossalai.amp._loss_scaling import RepeatedOverflowError as RepeatedOverflowError
from colossalai.amp._loss_scaling import ScaleRecord as ScaleRecord
from colossalai.amp._loss_scaling import StaticLossScaler as StaticLossScaler
from colossalai.amp._loss_weights import GivenLoss as GivenLoss
from colossalai.amp._loss_weights import LossTerm as LossTerm
from colossalai.amp._loss_weights import Weight as Weight
from colossalai.amp._loss_weights import check_loss as check_loss
from colossalai.amp._loss_weights import read_loss as read_loss
from colossalai.amp._low_weights import NaiveFP16 as NaiveFP16
from colossalai.amp._low_weights import PureBF16 as PureBF16
from colossalai.amp._low_weights import cast_floats as cast_floats
from colossalai.amp._low_weights import tensors_of_batch_norms as tensors_of_batch_norms
from colossalai.amp._masters import Casts as Casts
from colossalai.amp._masters import Masters as Masters
from colossalai.amp._optimizer import OptimizerWrapper as OptimizerWrapper
from colossalai.amp._optimizer import check_clipping as check_clipping
from colossalai.amp._precision import AutoPrecision as AutoPrecision
from colossalai.amp._precision import BF16Autocast as BF16Autocast
from colossalai.amp._precision import FP16Autocast as FP16Autocast
from colossalai.amp._precision import FullPrecision as FullPrecision
from colossalai.amp._precision import Precision as Precision
from colossalai.amp._precision import PrecisionModule as PrecisionModule
from colossalai.amp._precision import apply_precision as apply_precision
from colossalai.amp._precision import is_fast_at_bfloat16 as is_fast_at_bfloat16
from colossalai.amp._precision import refuse_misfit as refuse_misfit
from colossalai.amp._precision import to_float32 as to_float32
from colossalai.amp._sharded_params import MASTERS_KEY as MASTERS_KEY
from colossalai.amp._sharded_params import STATE_KEY as STATE_KEY
from colossalai.amp._sharded_params import OptimizerParams as OptimizerParams

if TYPE_CHECKING:
    from colossalai.compat._apex import ApexPrecision as ApexPrecision
else:
    __getattr__ = partial(find_name, __name__, NAMES[__name__])  # PEP 562
