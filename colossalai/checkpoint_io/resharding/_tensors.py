"""Tensor metadata: a global tensor as ranks hold it (`ShardedTensor`), stored (`StoredTensor`), state dicts.

The state dict of a model or an optimizer is a nested value with tensors in it. While it is saved or loaded,
one of these stands in the place of each tensor: which boxes of the whole there are, and where their elements
lie, in the memory of ranks or in files.
"""

import math
import mmap
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Generic, NamedTuple, TypeAlias, TypeVar

import torch

from colossalai.checkpoint_io.storage import MOST_READ, Json, read_into
from colossalai.tensor import Box, block_boxes, whole_box


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
        ranks_of: For each box, the ranks that hold it with the values to save; empty until the ranks have
            exchanged their descriptions.
    """

    shards: Mapping[Box, torch.Tensor]
    may_differ: bool = False
    ranks_of: Mapping[Box, tuple[int, ...]] = field(default_factory=dict)


class FileRange(NamedTuple):
    """A range of a file that is read straight into a tensor.

    Attributes:
        path: The file.
        begin: The offset of the first byte.
        most: The most bytes that are read at once.
    """

    path: Path
    begin: int
    most: int


class StoredShard(ABC):
    """A box of a stored tensor."""

    box: Box

    @abstractmethod
    def read(self, box: Box, out: torch.Tensor) -> None:
        """Copy a part of the shard.

        Args:
            box: The part, counted from the beginning of the shard.
            out: The destination: a tensor of the part's shape, with any dtype and strides.

        Raises:
            OSError: The file cannot be read.
        """

    def file_range(self, box: Box, out: torch.Tensor) -> FileRange | None:
        """Return the range of a file with a part of the shard, if `out` can take its bytes as they are."""
        return None

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
        """Copy a box of it into a tensor of the box's shape, with any dtype and strides.

        Raises:
            OSError: A file cannot be read.
        """
        read_boxes([(self, box, out)])

    def parts(self, box: Box, out: torch.Tensor) -> Iterator[tuple[StoredShard, Box, torch.Tensor]]:
        """Yield the shards with some of a box, the part of each, and the view of `out` for it."""
        for shard in self.shards:
            if shard.box == box:  # loaded as it was saved: nothing to cut
                yield shard, Box((0,) * len(box.sizes), box.sizes), out
                continue
            common = box.overlap(shard.box)
            if common is not None:
                target = common.moved(box.offsets, sign=-1).of(out)
                yield shard, common.moved(shard.box.offsets, sign=-1), target

    def whole(self) -> torch.Tensor:
        """Return all of it, in memory of its own."""
        return wholes([self])[0]

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
        """Return all of it as a view of memory or of a mapped file; None if it has to be read."""
        return self.shards[0].view() if len(self.shards) == 1 else None


def read_boxes(reads: Iterable[tuple[StoredTensor, Box, torch.Tensor]]) -> None:
    """Copy boxes of stored tensors into tensors of their shapes, with any dtypes and strides.

    First the ranges of all of them are found, then each file is opened once and read from its beginning on.

    Raises:
        OSError: A file cannot be read.
    """
    ranges: dict[tuple[Path, int], list[tuple[int, torch.Tensor]]] = {}
    for stored, box, out in reads:
        for shard, part, target in stored.parts(box, out):
            found = shard.file_range(part, target)
            if found is None:
                shard.read(part, target)
            else:
                ranges.setdefault((found.path, found.most), []).append((found.begin, target))
    for (path, most), of_file in ranges.items():
        read_into(path, of_file, most=most)


def wholes(tensors: Sequence[StoredTensor]) -> list[torch.Tensor]:
    """Return stored tensors whole, in memory of their own."""
    views = [tensor.view() for tensor in tensors]
    found = [
        torch.empty(tensor.shape, dtype=tensor.dtype) if view is None else view.clone()
        for tensor, view in zip(tensors, views, strict=True)
    ]
    read_boxes(
        (tensor, Box((0,) * len(tensor.shape), tensor.shape), out)
        for tensor, view, out in zip(tensors, views, found, strict=True)
        if view is None
    )
    return found


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
    most: int = MOST_READ

    def read(self, box: Box, out: torch.Tensor) -> None:
        """See the base class."""
        begin = self._begin_of(box)
        if begin is None:
            self._copy_mapped(box, out)
            return
        for place in block_boxes(out.shape, most=max(1, self.most // self.dtype.itemsize)):
            block = torch.empty(place.sizes, dtype=self.dtype)
            read_into(self.path, [(begin, block)], most=self.most)
            place.of(out).copy_(block)
            begin += block.nbytes

    def file_range(self, box: Box, out: torch.Tensor) -> FileRange | None:
        """See the base class."""
        begin = self._begin_of(box)
        if begin is None or out.device.type != "cpu" or out.dtype != self.dtype or not out.is_contiguous():
            return None
        return FileRange(self.path, begin, self.most)

    def _begin_of(self, box: Box) -> int | None:
        """Return the offset in the file of whole rows, which follow one another; None for parts of rows."""
        if box.sizes[1:] != self.box.sizes[1:]:
            return None
        row = math.prod(box.sizes[1:]) * self.dtype.itemsize
        return self.begin + (box.offsets[0] * row if box.offsets else 0)

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


TensorT = TypeVar("TensorT", bound=torch.Tensor | TensorMetadata, covariant=True)


@dataclass(frozen=True)
class FlatStateDict(Generic[TensorT]):
    """The content of a checkpoint.

    Attributes:
        tensors: By name: `ShardedTensor`s when they are to be saved, `StoredTensor`s when they were. Tied
            names have one and the same.
        tree: The plain values, as `pack` makes them.
    """

    tensors: Mapping[str, TensorT]
    tree: Json

    @cached_property
    def names_by_tensor(self) -> dict[str, list[str]]:
        """Names of each tensor (a tied one has several), under the first of them."""
        return names_by_tensor(self.tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of all full tensors, tied ones counted once."""
        return sum({id(tensor): tensor.nbytes for tensor in self.tensors.values()}.values())


ShardedStateDict: TypeAlias = FlatStateDict[ShardedTensor]
StoredStateDict: TypeAlias = FlatStateDict[StoredTensor]


def names_by_tensor(tensors: Mapping[str, object]) -> dict[str, list[str]]:
    """Return the names of each tensor (a tied one has several), under the first of them."""
    names: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    return {group[0]: group for group in names.values()}
