"""The training loop over an Engine, with hooks."""

from colossalai.trainer import hooks as hooks
from colossalai.trainer._loggers import CSVLogger as CSVLogger
from colossalai.trainer._loggers import JsonLinesLogger as JsonLinesLogger
from colossalai.trainer._loggers import MetricLogger as MetricLogger
from colossalai.trainer._loggers import MLflowLogger as MLflowLogger
from colossalai.trainer._loggers import TensorboardLogger as TensorboardLogger
from colossalai.trainer._loggers import WandbLogger as WandbLogger
from colossalai.trainer._loss_watch import NanLossError as NanLossError
from colossalai.trainer._timer import MultiTimer as MultiTimer
from colossalai.trainer._timer import Timer as Timer
from colossalai.trainer._tracker import Tracker as Tracker
from colossalai.trainer._tracker import tracker as tracker
from colossalai.trainer._trainer import Trainer as Trainer
