"""Logging with ranks: one line, one write, and `ranks=[...]` to select the logging ranks."""

from colossalai.logging._logger import DistributedLogger as DistributedLogger
from colossalai.logging._logger import disable_existing_loggers as disable_existing_loggers
from colossalai.logging._logger import get_dist_logger as get_dist_logger
