"""Rows of a step by adapter: which of its tokens belong to answers that asked for one.

The numbers of adapters travel with a step, one for each chunk; 0 is the model itself. What adds something to
the output of a layer asks the call that it is in for them, so that nothing is kept between two steps.
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
        groups: For each adapter that has some: its number, from 1 on, and the rows.
        num_rows: All rows, those without an adapter included.
    """

    groups: Sequence[tuple[int, Tensor]]
    num_rows: int

    @classmethod
    def of(cls, numbers: np.ndarray, device: torch.device) -> "AdapterRows | None":
        """Return the rows by adapter; None where no row has one.

        Args:
            numbers: (rows,) the number of each one's adapter, 0 for none.
            device: Where the model is.
        """
        present = np.unique(numbers[numbers > 0]).tolist()
        if not present:
            return None
        groups = [
            (number, torch.from_numpy(np.flatnonzero(numbers == number)).to(device)) for number in present
        ]
        return cls(groups, len(numbers))
