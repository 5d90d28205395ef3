"""A flat range of a tensor: what a rank has of it where flat memory is cut, and dimensions are not (ZeRO).

The states that an optimizer keeps for a parameter may be cut so. While they are looked at (to be saved, or
loaded), the parameter says which range of its elements, in row-major order, this rank's states are of. The
values may be cut, too (stage 3): then the parameter, which has no memory itself, says where the range lies.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from colossalai.tensor._attributes import FLAT_VALUES, RANGE_OF_STATES


@dataclass(frozen=True)
class FlatRange:
    """A range of the elements of a tensor, one after the other in row-major order.

    Attributes:
        shape: The shape of the tensor.
        begin: The first element.
        end: The one after the last; with `begin` if there is none.
        local_shape: The shape in which this rank holds the range: flat, or for all of the tensor its own.
        device: Where this rank holds it.
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
    """Let a parameter know which range of it the states on this rank are of; None: of all of it."""
    if part is not None:
        setattr(param, RANGE_OF_STATES, part)
    elif hasattr(param, RANGE_OF_STATES):
        delattr(param, RANGE_OF_STATES)


def range_of_states(param: torch.Tensor) -> FlatRange | None:
    """Return what `set_range_of_states` has set."""
    return getattr(param, RANGE_OF_STATES, None)


@dataclass(frozen=True)
class FlatValues:
    """The values of a parameter that a rank holds, where they lie.

    Attributes:
        part: Which range of it they are.
        tensor: The values, in `part.local_shape`. To be asked for anew each time: they may move.
        note_written: To be called, after values were overwritten, by all ranks that hold some of them, in the
            same order; parameters that are noted together have equal ones, and one call is enough.
    """

    part: FlatRange
    tensor: torch.Tensor
    note_written: Callable[[], None]


def set_flat_values(param: torch.Tensor, find: Callable[[], FlatValues]) -> None:
    """Let a parameter without memory of its own know how to find the values that this rank holds."""
    setattr(param, FLAT_VALUES, find)


def flat_values(param: torch.Tensor) -> FlatValues | None:
    """Return the values that this rank holds; None for a tensor that has its memory itself.

    Raises:
        RuntimeError: The values have been written elsewhere, and the ranks have not exchanged them yet.
    """
    find: Callable[[], FlatValues] | None = getattr(param, FLAT_VALUES, None)
    return None if find is None else find()
