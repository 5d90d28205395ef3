"""Host memory for copies of what is saved in the background.

It is kept from one save to the next: a copy into new memory takes three times as long, as the system has to
find and clear the pages.
"""

from collections.abc import Hashable

import torch


class HostCopies:
    """Copies of tensors in host memory; those of the save before give their memory to the next.

    Only one save at a time uses it: `begin` is called when the one before has ended.
    """

    def __init__(self) -> None:
        self._kept: dict[Hashable, torch.Tensor] = {}
        self._used: dict[Hashable, torch.Tensor] = {}

    def begin(self) -> None:
        """Start the copies of a save; memory that the one before did not use is given back."""
        self._kept, self._used = self._used, {}

    def copy_of(self, tensor: torch.Tensor, key: Hashable) -> torch.Tensor:
        """Return a contiguous copy.

        Args:
            tensor: What to copy, on any device.
            key: What it is, the same from save to save.
        """
        copy = self._kept.pop(key, None)
        if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
            copy = torch.empty(tensor.shape, dtype=tensor.dtype)
        copy.copy_(tensor)
        self._used[key] = copy
        return copy

    def clear(self) -> None:
        """Give all memory back."""
        self._kept, self._used = {}, {}
