"""Tensor metadata: a global tensor as ranks hold it (`ShardedTensor`), and stored (`StoredTensor`).

The state dict of a model or an optimizer is a nested value with tensors in it. While it is saved or loaded,
one of these stands in the place of each tensor: which boxes of the whole there are, and where their elements
lie, in the memory of ranks or in files.
"""

import math
import mmap
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from colossalai.checkpoint_io.storage import DEFAULT_BUFFER_MB, file_blocks, flat_bytes, read_block_size
from colossalai.tensor import Box, block_boxes, whole_box

_WORD = torch.int64


@dataclass(frozen=True, eq=False)
class TensorMetadata:
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
class ShardedTensor(TensorMetadata):
    """A tensor in the memory of ranks.

    Attributes:
        shards: What this rank holds of it: views of its memory, each in the shape of its box.
        may_differ: Whether ranks that hold the same box may have other values there (buffers: the statistics
            of a batch norm). Then those of the first one are saved.
        ranks_of: For each box, the ranks that hold it with the values that are to be saved; empty until the
            ranks have told each other.
    """

    shards: Mapping[Box, torch.Tensor]
    may_differ: bool = False
    ranks_of: Mapping[Box, tuple[int, ...]] = field(default_factory=dict)


class StoredShard(ABC):
    """A box of a stored tensor."""

    box: Box

    @abstractmethod
    def read(self, box: Box, out: torch.Tensor) -> None:
        """Copy a part of the shard.

        Args:
            box: The part, counted from the beginning of the shard.
            out: Where it goes: a tensor of the part's shape, whatever its dtype and strides.

        Raises:
            OSError: The file cannot be read.
        """

    def view(self) -> torch.Tensor | None:
        """Return the values, if they are mapped into memory."""
        return None


@dataclass(frozen=True, eq=False)
class StoredTensor(TensorMetadata):
    """A tensor in a checkpoint, of which any box can be read.

    Attributes:
        shards: Where its elements lie: boxes that are all of it.
    """

    shards: tuple[StoredShard, ...]

    def read(self, box: Box, out: torch.Tensor) -> None:
        """Copy a box of it into a tensor of the box's shape, whatever its dtype and strides.

        Raises:
            OSError: A file cannot be read.
        """
        for shard in self.shards:
            if shard.box == box:  # loaded as it was saved: nothing to cut
                shard.read(Box((0,) * len(box.sizes), box.sizes), out)
                continue
            common = box.overlap(shard.box)
            if common is not None:
                target = common.moved(box.offsets, sign=-1).of(out)
                shard.read(common.moved(shard.box.offsets, sign=-1), target)

    def whole(self) -> torch.Tensor:
        """Return all of it, in memory of its own."""
        view = self.view()
        if view is not None:
            return view.clone()
        tensor = torch.empty(self.shape, dtype=self.dtype)
        self.read(Box((0,) * len(self.shape), self.shape), tensor)
        return tensor

    def part(self, box: Box) -> "StoredTensor":
        """Return a box of it as a stored tensor by itself; nothing is read."""
        return StoredTensor(box.sizes, self.dtype, (PartShard(whole_box(box.sizes), self, box),))

    def blocks(self, *, size: int) -> Iterator[torch.Tensor]:
        """Yield it in row-major blocks of up to `size` bytes, contiguous and in host memory."""
        for box in block_boxes(self.shape, most=max(1, size // self.dtype.itemsize)):
            block = torch.empty(box.sizes, dtype=self.dtype)
            self.read(box, block)
            yield block

    def is_same_as(self, other: "StoredTensor") -> bool:
        """Return whether two have the same values."""
        if self is other:
            return True
        view, other_view = self.view(), other.view()
        if view is not None and other_view is not None and view.data_ptr() == other_view.data_ptr():
            return True
        return self.shape == other.shape and torch.equal(self.whole(), other.whole())

    def view(self) -> torch.Tensor | None:
        """Return all of it where it lies in memory, or is mapped into it; None where it has to be read."""
        return self.shards[0].view() if len(self.shards) == 1 else None


@dataclass(frozen=True, eq=False)
class PartShard(StoredShard):
    """A shard that is a box of another stored tensor.

    Attributes:
        box: Which part of its tensor it is: all of it.
        whole: The other tensor.
        place: The box in it.
    """

    box: Box
    whole: StoredTensor
    place: Box

    def read(self, box: Box, out: torch.Tensor) -> None:
        """See the base class."""
        self.whole.read(box.moved(self.place.offsets), out)


@dataclass(frozen=True, eq=False)
class ViewShard(StoredShard):
    """A shard that is a view of a mapped file.

    Attributes:
        box: Which part of the tensor it is.
        tensor: The view.
    """

    box: Box
    tensor: torch.Tensor

    def read(self, box: Box, out: torch.Tensor) -> None:
        """See the base class."""
        out.copy_(box.of(self.tensor))

    def view(self) -> torch.Tensor | None:
        """See the base class."""
        return self.tensor


@dataclass(frozen=True, eq=False)
class FileShard(StoredShard):
    """A shard whose elements lie in a file, row-major.

    Attributes:
        box: Which part of the tensor it is.
        dtype: The dtype of the tensor.
        path: The file.
        begin: Its offset in the file, in bytes.
        most: The most bytes that are read at once.
    """

    box: Box
    dtype: torch.dtype
    path: Path
    begin: int
    most: int = read_block_size(DEFAULT_BUFFER_MB)

    def read(self, box: Box, out: torch.Tensor) -> None:
        """See the base class."""
        if box.sizes[1:] != self.box.sizes[1:]:
            self._copy_mapped(box, out)
            return
        # Whole rows: they lie in the file one after the other.
        row = math.prod(box.sizes[1:]) * self.dtype.itemsize
        begin = self.begin + (box.offsets[0] * row if box.offsets else 0)
        if out.device.type == "cpu" and out.dtype == self.dtype and out.is_contiguous():
            self._fill(begin, out)
            return
        for place in block_boxes(out.shape, most=max(1, self.most // self.dtype.itemsize)):
            block = torch.empty(place.sizes, dtype=self.dtype)
            self._fill(begin, block)
            place.of(out).copy_(block)
            begin += block.nbytes

    def _fill(self, begin: int, out: torch.Tensor) -> None:
        """Fill a contiguous tensor in host memory with the bytes of the file from `begin` on."""
        rest = flat_bytes(out)
        # torch copies wide numbers faster than bytes.
        is_odd = (begin | len(rest) | self.most | rest.data_ptr()) % _WORD.itemsize
        unit = torch.uint8 if is_odd else _WORD
        for block in file_blocks(self.path, begin, begin + len(rest), most=self.most):
            # The source gets no name: its memory is unmapped when the next block is asked for.
            rest[: len(block)].view(unit).copy_(torch.frombuffer(block, dtype=unit))
            rest = rest[len(block) :]

    def _copy_mapped(self, box: Box, out: torch.Tensor) -> None:
        """Copy a box whose rows are not whole: only the pages with something of it are read."""
        start = self.begin // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        length = self.begin - start + self.box.numel * self.dtype.itemsize
        # A private mapping: torch takes no memory that it could not write to.
        with (
            self.path.open("rb") as file,
            mmap.mmap(file.fileno(), length, offset=start, access=mmap.ACCESS_COPY) as mapping,
        ):
            content = torch.frombuffer(mapping, dtype=torch.uint8, offset=self.begin - start)
            if content.data_ptr() % self.dtype.itemsize:
                content = content.clone()  # not aligned to the dtype: no view can be made of it
            values = content.view(self.dtype).view(self.box.sizes)
            out.copy_(box.of(values))
            del content, values  # the mapping can be closed only when nothing looks into it


def stored_view(tensor: torch.Tensor) -> StoredTensor:
    """Return a view of a mapped file as a stored tensor."""
    shape = tuple(tensor.shape)
    return StoredTensor(shape, tensor.dtype, (ViewShard(whole_box(shape), tensor),))


def stored_views(tensors: Mapping[str, torch.Tensor]) -> dict[str, StoredTensor]:
    """Return views of mapped files as stored tensors; names of one view, which are tied, get the same."""
    found: dict[str, StoredTensor] = {}
    known: dict[tuple[object, ...], StoredTensor] = {}
    for name, tensor in tensors.items():
        if tensor.layout is not torch.strided or tensor.numel() == 0:
            found[name] = stored_view(tensor)
            continue
        place = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        found[name] = known.setdefault(place, stored_view(tensor))
    return found
