"""A pipeline of two stages, each of which two processes share; beyond four processes, data parallelism."""

from base import *  # noqa: F403 - the values that all three share

BATCH_SIZE = 64
NUM_MICRO_BATCHES = 2

parallel = {
    "pipeline": {"size": 2, "partition": "balanced", "schedule": "1f1b"},
    "tensor": {"size": 2, "mode": "1d"},
}
