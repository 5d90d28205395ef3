"""Dynamic axial parallelism: all ranks share each family, with a part of its activations on each."""

from base import *  # noqa: F403 - the values that all configs share

DAP_SIZE = "all"
ZERO_STAGE = 0
