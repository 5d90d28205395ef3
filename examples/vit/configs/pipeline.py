"""A pipeline of two stages; beyond two processes, data parallelism over several pipelines."""

from base import *  # noqa: F403 - the values that all three share

BATCH_SIZE = 64
NUM_MICRO_BATCHES = 4

parallel = {"pipeline": {"size": 2, "partition": "balanced", "schedule": "1f1b"}}
