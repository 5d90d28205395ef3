"""What stands for a tensor in the content of a checkpoint: on its way there (`Held`), and from it (`Stored`).

The content of a model or an optimizer is a nested value with tensors in it. Taken apart, exchanged between
ranks and put together again, it has one of these in the place of each tensor.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from colossalai.checkpoint_io.resharding._box import Box, whole_box


@dataclass(frozen=True, eq=False)
class Entry:
    """A tensor of which the whole has a shape and a dtype.

    Attributes:
        shape: The shape of the whole.
        dtype: Its dtype.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the whole."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class Piece:
    """A part of a tensor in the memory of this rank.

    Attributes:
        box: Which part it is.
        tensor: A view of the memory, in the shape of the box.
    """

    box: Box
    tensor: torch.Tensor


@dataclass(frozen=True, eq=False)
class Held(Entry):
    """What this rank holds of a tensor.

    Attributes:
        pieces: The parts; none if it holds nothing of it.
        may_differ: Whether ranks that hold the same part may have other values there (buffers: the statistics
            of a batch norm). Then the first one's count.
    """

    pieces: tuple[Piece, ...]
    may_differ: bool = False


@dataclass(frozen=True, eq=False)
class Described(Entry):
    """What some rank holds of a tensor, without the values.

    Attributes:
        boxes: The parts.
        may_differ: See `Held`.
    """

    boxes: tuple[Box, ...]
    may_differ: bool

    def to_json(self) -> list[Any]:
        """Return it as JSON holds it."""
        boxes = [[box.offsets, box.sizes] for box in self.boxes]
        return [self.shape, str(self.dtype).removeprefix("torch."), boxes, self.may_differ]

    @staticmethod
    def from_json(row: list[Any]) -> "Described":
        """Return what `to_json` has written."""
        shape, dtype, boxes, may_differ = row
        found = getattr(torch, dtype)
        if not isinstance(found, torch.dtype):
            raise ValueError(f"there is no dtype {dtype!r}")
        parts = tuple(Box(tuple(offsets), tuple(sizes)) for offsets, sizes in boxes)
        return Described(tuple(shape), found, parts, may_differ)


@dataclass(frozen=True, eq=False)
class Spread(Entry):
    """What all ranks together hold of a tensor.

    Attributes:
        ranks_of: For each part, the ranks that hold it with the values that are to be saved.
        pieces: The parts that are on this rank.
    """

    ranks_of: Mapping[Box, tuple[int, ...]]
    pieces: Mapping[Box, torch.Tensor]


class Stored(Entry, ABC):
    """A tensor in a checkpoint, of which any part can be read."""

    @abstractmethod
    def read(self, box: Box, out: torch.Tensor) -> None:
        """Copy a part of it into a tensor of the part's shape, whatever its dtype and strides.

        Raises:
            OSError: It cannot be read.
        """

    def whole(self) -> torch.Tensor:
        """Return all of it, in memory of its own."""
        tensor = torch.empty(self.shape, dtype=self.dtype)
        self.read(whole_box(self.shape), tensor)
        return tensor

    def is_same_as(self, other: "Stored") -> bool:
        """Return whether two have the same values."""
        if self is other:
            return True
        return self.shape == other.shape and torch.equal(self.whole(), other.whole())


@dataclass(frozen=True, eq=False)
class Mapped(Stored):
    """A tensor that is a view of a file.

    Attributes:
        tensor: The view.
    """

    tensor: torch.Tensor

    def read(self, box: Box, out: torch.Tensor) -> None:
        """See the base class."""
        out.copy_(box.of(self.tensor))

    def whole(self) -> torch.Tensor:
        """See the base class."""
        return self.tensor.clone()

    def is_same_as(self, other: Stored) -> bool:
        """See the base class."""
        is_one = isinstance(other, Mapped) and self.tensor.data_ptr() == other.tensor.data_ptr()
        return is_one or super().is_same_as(other)


def mapped(tensor: torch.Tensor) -> Mapped:
    """Return a view of a file as an entry."""
    return Mapped(tuple(tensor.shape), tensor.dtype, tensor)


def all_mapped(tensors: Mapping[str, torch.Tensor]) -> dict[str, Mapped]:
    """Return views of a file as entries; names of one view, which are tied, get one entry."""
    found: dict[str, Mapped] = {}
    known: dict[tuple[object, ...], Mapped] = {}
    for name, tensor in tensors.items():
        if tensor.layout is not torch.strided or tensor.numel() == 0:
            found[name] = mapped(tensor)
            continue
        place = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        found[name] = known.setdefault(place, mapped(tensor))
    return found
