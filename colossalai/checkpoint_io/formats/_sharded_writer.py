"""Every rank writes its own boxes of the tensors; what several ranks hold is written by one of them.

The ranks know of each other what they hold (see `_parts`), so each finds out alone who writes what.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from colossalai.checkpoint_io._collective import (
    COLLECTIVE,
    gather,
    global_rank,
    num_ranks,
    on_every_rank,
    on_writer,
)
from colossalai.checkpoint_io._load_report import listed
from colossalai.checkpoint_io._state import Kind, Store, names_by_tensor
from colossalai.checkpoint_io._streaming import (
    DEFAULT_BUFFER_MB,
    block_boxes,
    block_size,
    bytes_of,
    stored_blocks,
)
from colossalai.checkpoint_io.formats._safetensors import Listing, header_of
from colossalai.checkpoint_io.formats._sharded_index import (
    INDEX,
    Chunk,
    ChunkedTensor,
    ChunkIndex,
    chunk_name,
    file_of_rank,
    index_as_text,
    is_of_a_rank,
    read_chunk_index,
)
from colossalai.checkpoint_io.formats._whole_writer import total_bytes
from colossalai.checkpoint_io.resharding import Box, Entry, Spread, Stored, is_tiled
from colossalai.checkpoint_io.storage import WRITTEN, Checksum, FileEntry, shared_folder
from colossalai.cluster import PlainCodec
from colossalai.monitor import still_moving

_BLOCK = WRITTEN  # most bytes that are summed and written at once


@dataclass(frozen=True, eq=False)
class Part:
    """A part of a tensor that one rank writes.

    Attributes:
        name: The name of the tensor.
        box: Which part.
        of: The tensor.
        tensor: Its values, in memory or in another checkpoint; None on the other ranks.
    """

    name: str
    box: Box
    of: Entry
    tensor: torch.Tensor | Stored | None

    @property
    def nbytes(self) -> int:
        """Bytes of the part."""
        return self.box.numel * self.of.dtype.itemsize


@dataclass(frozen=True)
class Written:
    """What a rank has written of a folder.

    Attributes:
        entry: Size and checksum of its file; None if it has written none.
        begins: Where each of its parts begins in the file.
    """

    entry: FileEntry | None
    begins: tuple[int, ...]


WRITTEN_CODEC = PlainCodec(Written, FileEntry)
"""Tells other ranks what a rank has written."""


def share_out(store: Store, num_ranks: int) -> list[list[Part]]:
    """Return for every rank the parts that it writes: about the same number of bytes each, where that can be.

    Raises:
        ValueError: A part of a tensor is on no rank, or lies in several parts.
    """
    shares: list[list[Part]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for name in names_by_tensor(store.tensors):
        tensor: Spread = store.tensors[name]
        if not is_tiled(tensor.shape, list(tensor.ranks_of)):
            parts = listed(f"{box} on {list(ranks)}" for box, ranks in tensor.ranks_of.items())
            raise ValueError(
                f"the ranks do not hold all of {name!r}, of shape {tensor.shape}, once: there is {parts}"
            )
        for box, ranks in tensor.ranks_of.items():
            rank = min(ranks, key=lambda rank: loads[rank])
            part = Part(name, box, tensor, tensor.pieces.get(box))
            shares[rank].append(part)
            loads[rank] += part.nbytes
    # The widest first: so every part begins at a multiple of its width.
    return [sorted(parts, key=lambda part: -part.of.dtype.itemsize) for parts in shares]


def write_parts(path: Path, parts: Sequence[Part], *, buffer_size: float = DEFAULT_BUFFER_MB) -> Written:
    """Write a rank's parts into its file, and see them on disk.

    Takes at most a block of memory beside the parts themselves.

    Args:
        path: The file.
        parts: What to write.
        buffer_size: The memory that may be used, in MB.

    Raises:
        ValueError: A tensor is not dense, or the buffer too small.
        OSError: The file cannot be written.
    """
    sparse = [
        part.name
        for part in parts
        if isinstance(part.tensor, torch.Tensor) and part.tensor.layout != torch.strided
    ]
    if sparse:
        raise ValueError(f"{sparse[0]} is not strided: only dense tensors can be saved in chunks")
    if not parts:
        return Written(None, ())
    block_bytes = min(_BLOCK, block_size(buffer_size))
    header, begins = _header(parts)
    checksum = Checksum()
    checksum.update(header)
    with path.open("wb", buffering=0) as file:
        _write_all(file.fileno(), header)
        for part, begin in zip(parts, begins, strict=True):
            assert part.tensor is not None, "a rank writes what it holds"
            for block in _blocks(part.tensor, begin, most=block_bytes):
                checksum.update(block)
                _write_all(file.fileno(), block)
        os.fsync(file.fileno())
    size = begins[-1] + parts[-1].nbytes
    return Written(FileEntry(size, checksum.value), tuple(begins))


def index_of(store: Store, shares: Sequence[Sequence[Part]], written: Sequence[Written]) -> ChunkIndex:
    """Return the index of a folder that all ranks have written to."""
    chunks: dict[str, list[Chunk]] = {}
    files: dict[str, FileEntry] = {}
    for rank, (parts, result) in enumerate(zip(shares, written, strict=True)):
        name = file_of_rank(rank, len(shares))
        if result.entry is not None:
            files[name] = result.entry
        for part, begin in zip(parts, result.begins, strict=True):
            chunks.setdefault(part.name, []).append(Chunk(part.box, name, begin))
    tensors, same_as = {}, {}
    for first, names in names_by_tensor(store.tensors).items():
        tensor = store.tensors[first]
        tensors[first] = ChunkedTensor(tensor.shape, tensor.dtype, tuple(chunks.get(first, ())))
        same_as.update(dict.fromkeys(names[1:], first))
    return ChunkIndex(tensors, same_as, store.tree, files)


def _header(parts: Sequence[Part]) -> tuple[bytes, list[int]]:
    """Return the header of a safetensors file, and where each part begins in the file."""
    listings = [
        Listing(chunk_name(part.name, part.box, part.of.shape), part.of.dtype, part.box.sizes)
        for part in parts
    ]
    return header_of(listings, [part.nbytes for part in parts], {"format": "pt"})


def _blocks(tensor: torch.Tensor | Stored, begin: int, *, most: int) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in row-major order, not more than `most` at a time.

    Those that lie in a row in memory end at multiples of `most` in the file, where they begin at `begin`.
    """
    if isinstance(tensor, Stored):
        yield from map(bytes_of, stored_blocks(tensor, size=most))
        return
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        content = bytes_of(tensor)
        while content:
            size = most - begin % most
            yield content[:size]
            content, begin = content[size:], begin + len(content[:size])
        return
    for box in block_boxes(tensor.shape, most=max(1, most // tensor.dtype.itemsize)):
        yield bytes_of(box.of(tensor).cpu().contiguous())


def _write_all(descriptor: int, content: bytes | memoryview) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
        still_moving()


def save_slices(path: str | Path, store: Store, kind: Kind) -> None:
    """Write a store in chunks, as the sub-folder of a folder that its kind has a name for; collective.

    Args:
        path: The folder, on a file system that all ranks see.
        store: What the ranks hold.
        kind: What it is.

    Raises:
        ValueError: The sub-folder is there and holds something else, or something cannot be saved.
        OSError: It cannot be written; on all ranks. What was there before is still there.
    """
    target = Path(path) / kind.part
    on_writer(lambda: _refuse_other(target))
    shares = on_every_rank(lambda: share_out(store, num_ranks()))
    own_parts, name = shares[global_rank()], file_of_rank(global_rank(), num_ranks())
    with shared_folder(
        target, num_bytes=total_bytes(store), agreement=COLLECTIVE, keep=_is_of_others
    ) as folder:
        written = gather(on_every_rank(lambda: write_parts(folder / name, own_parts)), WRITTEN_CODEC)
        on_writer(lambda: _write_index(folder, store, shares, written))


def _is_of_others(name: str) -> bool:
    return name != INDEX and not is_of_a_rank(name)


def is_of_slices(folder: Path) -> bool:
    """Return whether a folder is one that `save_slices` has written."""
    return (folder / INDEX).is_file()


def _refuse_other(target: Path) -> None:
    if target.is_dir() and any(target.iterdir()) and not is_of_slices(target):
        raise ValueError(f"{target} is there and is not a checkpoint in slices, which would replace it")


def _write_index(folder: Path, store: Store, shares: list[list[Part]], written: list[Written]) -> None:
    (folder / INDEX).write_text(index_as_text(index_of(store, shares, written)), encoding="utf-8")
    read_chunk_index(folder)  # as a reader would: files there and as large as they should be
