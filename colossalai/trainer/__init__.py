"""The training loop over an Engine, with hooks."""

from colossalai.trainer import hooks as hooks
from colossalai.trainer._timer import MultiTimer as MultiTimer
from colossalai.trainer._timer import Timer as Timer
from colossalai.trainer._trainer import Trainer as Trainer
