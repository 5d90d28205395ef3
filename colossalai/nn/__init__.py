"""Layers, losses, metrics, optimizers and learning-rate schedules."""

from colossalai.nn import loss as loss
from colossalai.nn import lr_scheduler as lr_scheduler
from colossalai.nn import metric as metric
from colossalai.nn import optimizer as optimizer
from colossalai.nn.loss import CrossEntropyLoss as CrossEntropyLoss
from colossalai.nn.metric import Accuracy as Accuracy
from colossalai.nn.optimizer import Lamb as Lamb
from colossalai.nn.optimizer import Lars as Lars
