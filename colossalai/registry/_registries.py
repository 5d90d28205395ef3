"""The registries of the package.

A name that nobody registered is looked up in the library that users would take it from, imported at that
moment: `OPTIMIZERS.get_module("AdamW")` is `torch.optim.AdamW`.
"""

from colossalai.registry._registry import Registry

LAYERS = Registry("layers", ["torch.nn"])
LOSSES = Registry("losses", ["torch.nn"])
OPTIMIZERS = Registry("optimizers", ["torch.optim"])
LR_SCHEDULERS = Registry("lr_schedulers", ["torch.optim.lr_scheduler"])
MODELS = Registry("models", ["torchvision.models"])
DATASETS = Registry("datasets", ["torchvision.datasets"])
GRADIENT_HANDLER = Registry("gradient_handler")
HOOKS = Registry("hooks")
SCHEDULE = Registry("schedule")
DIST_GROUP_INITIALIZER = Registry("dist_group_initializer")
