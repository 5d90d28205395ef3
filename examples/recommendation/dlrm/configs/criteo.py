"""Sizes for a file of Criteo: train.py --config configs/criteo.py --data train.txt."""

from base import *  # noqa: F403 - the values that all configs share

TABLE_SIZES = (100_000,) * 26  # categories are hashed into so many rows
NUM_DENSE = 13
EMBEDDING_DIM = 16
BOTTOM_SIZES = (512, 256, 64)
TOP_SIZES = (512, 256)
LEAST_CACHED_ROWS = 8_000
BATCH_SIZE = 2048

TABLES = "tables"
PLUGIN = "zero"
ROWS_OPTIMIZER = "RowWiseAdagrad"
ROWS_LEARNING_RATE = 0.1
