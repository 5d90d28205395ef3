"""Columns of all tables on each rank, in one cached bag; data parallelism for the dense layers."""

from base import *  # noqa: F403 - the values that all configs share

TABLES = "columns"
PLUGIN = "ddp"
ROWS_OPTIMIZER = "SparseAdam"  # row-wise Adagrad needs whole rows
ROWS_LEARNING_RATE = 0.01
