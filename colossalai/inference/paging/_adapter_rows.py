"""Rows of a step by adapter: the tokens of requests that use each adapter.

The adapter numbers are part of a step, one for each chunk; 0 is the model itself. Code that adds to the
output of a layer reads the rows from the current paged call, so no state remains between two steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class AdapterRows:
    """The rows of a matrix by adapter.

    Attributes:
        groups: For each adapter with rows: its number, from 1 on, and its rows.
        num_rows: Number of all rows, including those without an adapter.
    """

    groups: Sequence[tuple[int, Tensor]]
    num_rows: int

    @classmethod
    def of(cls, numbers: np.ndarray, device: torch.device) -> "AdapterRows | None":
        """Group rows by adapter; None if no row has one.

        Args:
            numbers: (rows,) number of each row's adapter, 0 for none.
            device: Device of the model.
        """
        present = np.unique(numbers[numbers > 0]).tolist()
        if not present:
            return None
        groups = [
            (number, torch.from_numpy(np.flatnonzero(numbers == number)).to(device)) for number in present
        ]
        return cls(groups, len(numbers))
