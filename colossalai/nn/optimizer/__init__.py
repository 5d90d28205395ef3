"""Optimizers: Adam and SGD on torch's fused kernels, states on disk, layer-wise rates for large batches."""

from functools import partial
from typing import TYPE_CHECKING

from colossalai._not_landed import refuse_name
from colossalai.nn.optimizer._adam_kernel import AdamOptions as AdamOptions
from colossalai.nn.optimizer._adam_kernel import Slot as Slot
from colossalai.nn.optimizer._adam_kernel import mixed_adam_step as mixed_adam_step
from colossalai.nn.optimizer._disk import DiskOptions as DiskOptions
from colossalai.nn.optimizer._disk_file import PAGE as PAGE
from colossalai.nn.optimizer._disk_file import StateFile as StateFile
from colossalai.nn.optimizer._fused_adam import FusedAdam as FusedAdam
from colossalai.nn.optimizer._fused_lamb import FusedLAMB as FusedLAMB
from colossalai.nn.optimizer._fused_sgd import FusedSGD as FusedSGD
from colossalai.nn.optimizer._hybrid_adam import CPUAdam as CPUAdam
from colossalai.nn.optimizer._hybrid_adam import HybridAdam as HybridAdam
from colossalai.nn.optimizer._lamb import Lamb as Lamb
from colossalai.nn.optimizer._lars import Lars as Lars
from colossalai.nn.optimizer._row_wise_adagrad import RowWiseAdagrad as RowWiseAdagrad

if not TYPE_CHECKING:
    __getattr__ = partial(refuse_name, __name__)  # PEP 562: missing names
