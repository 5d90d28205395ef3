"""Mixed precision: what surrounds the forward, how the loss is scaled, and when a step is skipped."""

from colossalai.amp._amp_type import AMP_TYPE as AMP_TYPE
from colossalai.amp._amp_type import convert_to_amp as convert_to_amp
from colossalai.amp._amp_type import convert_to_apex_amp as convert_to_apex_amp
from colossalai.amp._amp_type import precision_of as precision_of
from colossalai.amp._apex import ApexPrecision as ApexPrecision
from colossalai.amp._fit import refuse_misfit as refuse_misfit
from colossalai.amp._low_weights import NaiveFP16 as NaiveFP16
from colossalai.amp._low_weights import PureBF16 as PureBF16
from colossalai.amp._masters import Masters as Masters
from colossalai.amp._model import PrecisionModule as PrecisionModule
from colossalai.amp._model import apply_precision as apply_precision
from colossalai.amp._optimizer import OptimizerWrapper as OptimizerWrapper
from colossalai.amp._overflow import Overflow as Overflow
from colossalai.amp._precision import BF16Autocast as BF16Autocast
from colossalai.amp._precision import FP16Autocast as FP16Autocast
from colossalai.amp._precision import FullPrecision as FullPrecision
from colossalai.amp._precision import Precision as Precision
from colossalai.amp._scaler import CheckedLossScaler as CheckedLossScaler
from colossalai.amp._scaler import DynamicLossScaler as DynamicLossScaler
from colossalai.amp._scaler import LossScaler as LossScaler
from colossalai.amp._scaler import RepeatedOverflowError as RepeatedOverflowError
from colossalai.amp._scaler import ScaleRecord as ScaleRecord
from colossalai.amp._scaler import StaticLossScaler as StaticLossScaler
from colossalai.amp._stand_ins import MASTERS_KEY as MASTERS_KEY
from colossalai.amp._stand_ins import STATE_KEY as STATE_KEY
from colossalai.amp._stand_ins import StandIns as StandIns
