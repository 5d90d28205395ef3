"""Whole tables on the ranks, each behind a cache of its own; Gemini for the dense layers."""

from base import *  # noqa: F403 - the values that all configs share

TABLES = "split_cache"
PLUGIN = "gemini"
ROWS_OPTIMIZER = "SparseAdam"
ROWS_LEARNING_RATE = 0.01
