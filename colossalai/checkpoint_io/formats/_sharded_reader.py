"""Tensors that lie in chunks: any box of them is read from whatever chunks it overlaps."""

import math
import mmap
from dataclasses import dataclass
from pathlib import Path

import torch

from colossalai.checkpoint_io._state import Store
from colossalai.checkpoint_io._streaming import DEFAULT_BUFFER_MB, block_boxes, block_size, flat_bytes
from colossalai.checkpoint_io.formats._sharded_index import Chunk, ChunkedTensor, ChunkIndex, read_chunk_index
from colossalai.checkpoint_io.resharding import Box, Stored
from colossalai.checkpoint_io.storage import file_blocks

_BLOCK = 8 << 20  # most bytes that are read at once
_WORD = torch.int64


@dataclass(frozen=True, eq=False)
class Chunked(Stored):
    """A tensor in chunks.

    Attributes:
        folder: Where the files are.
        chunks: The parts.
        block: The most bytes that are read at once.
    """

    folder: Path
    chunks: tuple[Chunk, ...]
    block: int

    def read(self, box: Box, out: torch.Tensor) -> None:
        """See the base class."""
        for chunk in self.chunks:
            common = box.overlap(chunk.box)
            if common is not None:
                target = common.moved(box.offsets, sign=-1).of(out)
                self._read_from(chunk, common.moved(chunk.box.offsets, sign=-1), target)

    def _read_from(self, chunk: Chunk, box: Box, out: torch.Tensor) -> None:
        """Copy a box, counted from the start of a chunk, into a tensor."""
        path = self.folder / chunk.file
        row = math.prod(chunk.box.sizes[1:]) * self.dtype.itemsize
        if box.sizes[1:] != chunk.box.sizes[1:]:
            _copy_mapped(path, chunk.begin, _empty(chunk.box.sizes, self.dtype), box, out)
            return
        begin = chunk.begin + (box.offsets[0] * row if box.offsets else 0)
        if out.device.type == "cpu" and out.dtype == self.dtype and out.is_contiguous():
            _read_exactly(path, begin, out, most=self.block)
            return
        for place in block_boxes(out.shape, most=max(1, self.block // self.dtype.itemsize)):
            block = torch.empty(place.sizes, dtype=self.dtype)
            _read_exactly(path, begin, block, most=self.block)
            place.of(out).copy_(block)
            begin += block.nbytes


def read_chunks(folder: Path) -> Store:
    """Return what lies in a folder; the values are not read, and not compared with the checksums.

    Raises:
        ValueError: The folder is damaged or incomplete.
        OSError: It cannot be read.
    """
    return chunk_store(read_chunk_index(folder), folder)


def chunk_store(index: ChunkIndex, folder: Path, *, buffer_size: float = DEFAULT_BUFFER_MB) -> Store:
    """Return what an index says that lies in a folder.

    Args:
        index: The index.
        folder: The folder.
        buffer_size: The memory, in MB, that reading a tensor may take beside where it goes.
    """
    block = min(_BLOCK, block_size(buffer_size))
    tensors: dict[str, Stored] = {
        name: _as_stored(tensor, folder, block) for name, tensor in index.tensors.items()
    }
    tensors |= {name: tensors[first] for name, first in index.same_as.items()}
    return Store(tensors, index.tree)


def _as_stored(tensor: ChunkedTensor, folder: Path, block: int) -> Chunked:
    return Chunked(tensor.shape, tensor.dtype, folder, tensor.chunks, block)


def _empty(sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(sizes, dtype=dtype, device="meta")


def _copy_mapped(path: Path, begin: int, chunk: torch.Tensor, box: Box, out: torch.Tensor) -> None:
    """Copy a box whose rows are not whole: only the pages with something of it are read.

    Args:
        path: The file.
        begin: Where the chunk begins in it.
        chunk: A tensor with the shape and the dtype of the chunk, without values.
        box: The box within the chunk.
        out: Where it goes.
    """
    start = begin // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    length = begin - start + chunk.nbytes
    # A private mapping: torch takes no memory that it could not write to.
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), length, offset=start, access=mmap.ACCESS_COPY) as view,
    ):
        content = torch.frombuffer(view, dtype=torch.uint8, offset=begin - start)
        values = _as_dtype(content, chunk.dtype).view(chunk.shape)
        out.copy_(box.of(values))
        del content, values  # the mapping can be closed only when nothing looks into it


def _as_dtype(content: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return bytes as another dtype, copied where they are not aligned to it."""
    if content.data_ptr() % dtype.itemsize:
        content = content.clone()
    return content.view(dtype)


def _read_exactly(path: Path, begin: int, out: torch.Tensor, *, most: int) -> None:
    """Fill a contiguous tensor in host memory with the bytes of a file, up to `most` at once."""
    rest = flat_bytes(out)
    # torch copies wide numbers faster than bytes.
    is_even = not any(number % _WORD.itemsize for number in (begin, len(rest), most, rest.data_ptr()))
    unit = _WORD if is_even else torch.uint8
    for block in file_blocks(path, begin, begin + len(rest), most=most):
        # The source gets no name: its memory is gone when the next block is asked for.
        rest[: len(block)].view(unit).copy_(torch.frombuffer(block, dtype=unit))
        rest = rest[len(block) :]
