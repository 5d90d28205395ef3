"""Optimizers that torch does not have: layer-wise learning rates for large batches."""

from colossalai.nn.optimizer._lamb import Lamb as Lamb
from colossalai.nn.optimizer._lars import Lars as Lars
