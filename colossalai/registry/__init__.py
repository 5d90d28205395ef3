"""Registries: tables from names in config files, such as `"AdamW"`, to classes."""

from colossalai.registry._registry import DATASETS as DATASETS
from colossalai.registry._registry import DIST_GROUP_INITIALIZER as DIST_GROUP_INITIALIZER
from colossalai.registry._registry import GRADIENT_HANDLER as GRADIENT_HANDLER
from colossalai.registry._registry import HOOKS as HOOKS
from colossalai.registry._registry import LAYERS as LAYERS
from colossalai.registry._registry import LOSSES as LOSSES
from colossalai.registry._registry import LR_SCHEDULERS as LR_SCHEDULERS
from colossalai.registry._registry import MODELS as MODELS
from colossalai.registry._registry import OPTIMIZERS as OPTIMIZERS
from colossalai.registry._registry import SCHEDULE as SCHEDULE
from colossalai.registry._registry import Registry as Registry
