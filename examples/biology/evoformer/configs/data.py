"""Data parallelism: each rank has families of its own, and a part of the optimizer's states."""

from base import *  # noqa: F403 - the values that all configs share

DAP_SIZE = 1
ZERO_STAGE = 1
