"""Names for classes: a config file says `"AdamW"`, a registry knows which class that is."""

from colossalai.registry._registries import DATASETS as DATASETS
from colossalai.registry._registries import DIST_GROUP_INITIALIZER as DIST_GROUP_INITIALIZER
from colossalai.registry._registries import GRADIENT_HANDLER as GRADIENT_HANDLER
from colossalai.registry._registries import HOOKS as HOOKS
from colossalai.registry._registries import LAYERS as LAYERS
from colossalai.registry._registries import LOSSES as LOSSES
from colossalai.registry._registries import LR_SCHEDULERS as LR_SCHEDULERS
from colossalai.registry._registries import MODELS as MODELS
from colossalai.registry._registries import OPTIMIZERS as OPTIMIZERS
from colossalai.registry._registries import SCHEDULE as SCHEDULE
from colossalai.registry._registry import Registry as Registry
