"""Data parallelism: every process holds the whole model and a part of the batch."""

from base import *  # noqa: F403 - the values that all three share

BATCH_SIZE = 32  # images in a batch of one data-parallel rank
