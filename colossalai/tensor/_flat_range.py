"""Flat range of a tensor: the local shard if flat memory is sharded, not dimensions (ZeRO).

The optimizer states of a parameter can be sharded in this way. During a save or a load, an attribute of the
parameter has the range of its elements, in row-major order, of this rank's states. The values can be sharded
too (stage 3): then the parameter has no memory, and an attribute returns the range and its memory.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from colossalai.tensor._attributes import FLAT_VALUES, RANGE_OF_STATES


@dataclass(frozen=True)
class FlatRange:
    """A range of the elements of a tensor in row-major order.

    Attributes:
        shape: Shape of the tensor.
        begin: Index of the first element.
        end: Index after the last element; equal to `begin` for an empty range.
        local_shape: Local shape of the range: flat, or the shape of the tensor if the range is all of it.
        device: Device of the range on this rank.
    """

    shape: tuple[int, ...]
    begin: int
    end: int
    local_shape: tuple[int, ...]
    device: torch.device

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.end - self.begin


def set_range_of_states(param: torch.Tensor, part: FlatRange | None) -> None:
    """Set the range of a parameter's optimizer states on this rank; None for the full parameter."""
    if part is not None:
        setattr(param, RANGE_OF_STATES, part)
    elif hasattr(param, RANGE_OF_STATES):
        delattr(param, RANGE_OF_STATES)


def range_of_states(param: torch.Tensor) -> FlatRange | None:
    """Return the range that `set_range_of_states` has set."""
    return getattr(param, RANGE_OF_STATES, None)


@dataclass(frozen=True)
class FlatValues:
    """Local values of a parameter.

    Attributes:
        part: Range of the values.
        tensor: The values, with shape `part.local_shape`. Their memory can change between calls.
        note_written: Function that all ranks with values must call, in the same order, after values were
            overwritten. Parameters with equal functions need one call.
    """

    part: FlatRange
    tensor: torch.Tensor
    note_written: Callable[[], None]


def set_flat_values(param: torch.Tensor, find: Callable[[], FlatValues]) -> None:
    """Set the function that returns the local values of a parameter without memory."""
    setattr(param, FLAT_VALUES, find)


def flat_values(param: torch.Tensor) -> FlatValues | None:
    """Return the local values of a parameter; None for a tensor with its own memory.

    Raises:
        RuntimeError: The values have been written, and the ranks have not exchanged them yet.
    """
    find: Callable[[], FlatValues] | None = getattr(param, FLAT_VALUES, None)
    return None if find is None else find()
