"""Whole tables on the ranks, those of a rank behind one cache; ZeRO for the dense layers."""

from base import *  # noqa: F403 - the values that all configs share

TABLES = "tables"
PLUGIN = "zero"
ROWS_OPTIMIZER = "RowWiseAdagrad"
ROWS_LEARNING_RATE = 0.3
