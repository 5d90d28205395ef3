"""Boxes: offsets and sizes in each dimension of a global tensor, as in shard metadata.

Whatever cuts a tensor (mesh axes, a pipeline, FSDP, ZeRO), a rank holds boxes of it. Dimensions that are cut
give one box. A flat range of a row-major tensor is not one, but it is a few:

    a range of rows from the middle of one to the middle of another
        = the end of the first row, the whole rows between, the beginning of the last,

and the first and the last are ranges of a tensor of one dimension less: at most 2n - 1 boxes in n dimensions.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch


@dataclass(frozen=True)
class Box:
    """A range in each dimension of a tensor.

    Attributes:
        offsets: Begin in each dimension.
        sizes: Extent in each dimension.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements; 1 for the box of a tensor without dimensions."""
        return math.prod(self.sizes)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a view of the part of a tensor in the box."""
        for dim, (offset, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            tensor = tensor.narrow(dim, offset, size)
        return tensor

    def overlap(self, other: "Box") -> "Box | None":
        """Return the intersection of two boxes, None if it is empty."""
        offsets, sizes = [], []
        for begin, size, other_begin, other_size in zip(
            self.offsets, self.sizes, other.offsets, other.sizes, strict=True
        ):
            first = max(begin, other_begin)
            length = min(begin + size, other_begin + other_size) - first
            if length <= 0:
                return None
            offsets.append(first)
            sizes.append(length)
        return Box(tuple(offsets), tuple(sizes))

    def moved(self, offsets: Sequence[int], *, sign: int = 1) -> "Box":
        """Return the box shifted by `sign * offsets`."""
        moved = (here + sign * by for here, by in zip(self.offsets, offsets, strict=True))
        return Box(tuple(moved), self.sizes)

    def permuted(self, dims: Sequence[int]) -> "Box":
        """Return the box in the tensor after a permutation of its dimensions."""
        return Box(tuple(self.offsets[dim] for dim in dims), tuple(self.sizes[dim] for dim in dims))

    def __str__(self) -> str:
        ranges = (f"{begin}:{begin + size}" for begin, size in zip(self.offsets, self.sizes, strict=True))
        return f"[{', '.join(ranges)}]"


def whole_box(shape: Sequence[int]) -> Box:
    """Return the box of a full tensor."""
    return Box((0,) * len(shape), tuple(shape))


def is_tiled(shape: Sequence[int], boxes: Sequence[Box]) -> bool:
    """Return whether the boxes tile a tensor: each element is in exactly one box, and no box exceeds it.

    The first dimension is split at every begin and end of a box; each segment must be tiled by the remaining
    dimensions of its boxes.
    """
    if 0 in shape:
        return all(box.numel == 0 for box in boxes)
    if any(len(box.offsets) != len(shape) or len(box.sizes) != len(shape) for box in boxes):
        return False
    return _is_tiled(tuple(shape), tuple((box.offsets, box.sizes) for box in boxes if box.numel > 0))


@lru_cache(maxsize=4096)  # a run saves the same boxes again and again, while training waits
def _is_tiled(shape: tuple[int, ...], boxes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]) -> bool:
    if not shape:
        return len(boxes) == 1
    begins: dict[int, list[int]] = {}
    ends: dict[int, list[int]] = {}
    for number, (offsets, sizes) in enumerate(boxes):
        if sizes[0] < 1:
            return False
        begins.setdefault(offsets[0], []).append(number)
        ends.setdefault(offsets[0] + sizes[0], []).append(number)
    cuts = sorted(begins.keys() | ends.keys())
    if not cuts or cuts[0] != 0 or cuts[-1] != shape[0]:
        return False
    present: dict[int, None] = {}
    for cut in cuts[:-1]:
        for number in ends.get(cut, ()):
            del present[number]
        present.update(dict.fromkeys(begins.get(cut, ())))
        if not _is_tiled(shape[1:], tuple((boxes[n][0][1:], boxes[n][1][1:]) for n in present)):
            return False
    return True


def block_boxes(shape: Sequence[int], *, most: int) -> Iterator[Box]:
    """Yield boxes of up to `most` elements that cover a tensor in row-major order."""
    shape, numel = tuple(shape), math.prod(shape)
    if numel <= most:
        if numel > 0:
            yield whole_box(shape)
        return
    rows = most * shape[0] // numel
    if rows == 0:
        for row in range(shape[0]):
            for box in block_boxes(shape[1:], most=most):
                yield Box((row, *box.offsets), (1, *box.sizes))
        return
    for first in range(0, shape[0], rows):
        yield Box((first, *(0 for _ in shape[1:])), (min(rows, shape[0] - first), *shape[1:]))


def flat_boxes(shape: Sequence[int], begin: int, end: int) -> list[Box]:
    """Return the boxes of a range of the elements of a row-major tensor, in order.

    Args:
        shape: Shape of the tensor.
        begin: Index of the first element.
        end: Index after the last element.
    """
    return [box for box in _flat_boxes(tuple(shape), begin, end) if box.numel > 0]


def _flat_boxes(shape: tuple[int, ...], begin: int, end: int) -> Iterator[Box]:
    if begin >= end:
        return
    if len(shape) < 2:
        yield Box((begin,), (end - begin,)) if shape else Box((), ())
        return
    row = math.prod(shape[1:])
    first, last = begin // row, (end - 1) // row
    if first == last:
        yield from _in_row(first, shape, begin - first * row, end - first * row)
        return
    whole_from, whole_to = first, last + 1
    if begin % row:
        yield from _in_row(first, shape, begin % row, row)
        whole_from += 1
    if end % row:
        whole_to -= 1
    if whole_to > whole_from:
        yield Box((whole_from, *(0 for _ in shape[1:])), (whole_to - whole_from, *shape[1:]))
    if end % row:
        yield from _in_row(last, shape, 0, end % row)


def _in_row(row: int, shape: tuple[int, ...], begin: int, end: int) -> Iterator[Box]:
    for box in _flat_boxes(shape[1:], begin, end):
        yield Box((row, *box.offsets), (1, *box.sizes))
