"""Save plan of a sharded folder: which rank writes which shards, and the files of each rank.

The ranks know of each other what they hold (see `_global_plan`), so each finds out alone who writes what:
what several ranks hold is written by one of them.
"""

import itertools
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from colossalai.checkpoint_io._collective import COLLECTIVE, global_rank, num_ranks, on_every_rank, on_writer
from colossalai.checkpoint_io._state import FlatStateDict, Kind, ShardedStateDict, names_by_tensor
from colossalai.checkpoint_io.formats._safetensors import header_of
from colossalai.checkpoint_io.formats._sharded_index import (
    ShardedIndex,
    file_of_rank,
    is_of_a_rank,
    shard_name,
    write_sharded_index,
)
from colossalai.checkpoint_io.resharding import FileShard, StoredTensor, TensorMetadata
from colossalai.checkpoint_io.storage import (
    DEFAULT_BUFFER_MB,
    INDEX,
    WRITTEN,
    Checksum,
    FileEntry,
    aligned_blocks,
    block_size,
    bytes_of,
    listed,
    write_shared_folder,
)
from colossalai.monitor import still_moving
from colossalai.tensor import Box, block_boxes, is_tiled

_BLOCK = WRITTEN  # most bytes that are summed and written at once


@dataclass(frozen=True, eq=False)
class WriteItem:
    """A shard that one rank writes.

    Attributes:
        name: The name of the tensor.
        box: Which box of it.
        of: The whole tensor.
        data: The values, in memory or in another checkpoint; None on the other ranks.
    """

    name: str
    box: Box
    of: TensorMetadata
    data: torch.Tensor | StoredTensor | None

    @property
    def nbytes(self) -> int:
        """Bytes of the shard."""
        return math.prod(self.box.sizes) * self.of.dtype.itemsize


class WriteResult(NamedTuple):
    """What a rank has written of a folder; plain, so that ranks can tell each other.

    Attributes:
        size: Bytes of its file; 0 if it has written none.
        checksum: The checksum of the file.
        begins: The offset of each of its shards in the file.
    """

    size: int
    checksum: int
    begins: tuple[int, ...]


def share_out(state: ShardedStateDict, num_ranks: int) -> list[list[WriteItem]]:
    """Return the shards that each rank writes: about the same number of bytes each, where that can be.

    Raises:
        ValueError: A box of a tensor is on no rank, or lies in several boxes.
    """
    shares: list[list[WriteItem]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    names = list(names_by_tensor(state.tensors))
    for name in names:
        tensor = state.tensors[name]
        if not is_tiled(tensor.shape, list(tensor.ranks_of)):
            boxes = listed(f"{box} on {list(ranks)}" for box, ranks in tensor.ranks_of.items())
            raise ValueError(
                f"the ranks do not hold all of {name!r}, of shape {tensor.shape}, once: there is {boxes}"
            )
    for name in names:
        tensor = state.tensors[name]
        for box, ranks in tensor.ranks_of.items():
            rank = min(ranks, key=loads.__getitem__)
            item = WriteItem(name, box, tensor, tensor.shards.get(box))
            shares[rank].append(item)
            loads[rank] += item.nbytes
    # The widest first: so every shard begins at a multiple of its width.
    return [sorted(items, key=lambda item: -item.of.dtype.itemsize) for items in shares]


def write_items(
    path: Path, items: Sequence[WriteItem], *, buffer_size: float = DEFAULT_BUFFER_MB
) -> WriteResult:
    """Write a rank's shards into its file, and see them on disk.

    Takes at most a block of memory beside the shards themselves.

    Args:
        path: The file.
        items: What to write.
        buffer_size: The memory that may be used, in MB.

    Raises:
        ValueError: A tensor is not dense, or `buffer_size` is too small.
        OSError: The file cannot be written.
    """
    for item in items:
        if isinstance(item.data, torch.Tensor) and item.data.layout != torch.strided:
            raise ValueError(f"{item.name} is not strided: only dense tensors can be saved in chunks")
    if not items:
        return WriteResult(0, 0, ())
    most = min(_BLOCK, block_size(buffer_size))
    listings = [
        (shard_name(item.name, item.box, item.of.shape), item.of.dtype, item.box.sizes) for item in items
    ]
    header, begins = header_of(listings, [item.nbytes for item in items], {"format": "pt"})
    streams: list[Iterable[memoryview]] = [[memoryview(header)]]  # which yield when they are written
    for item, begin in zip(items, begins, strict=True):
        data = item.data
        assert data is not None, "a rank writes what it holds"
        if isinstance(data, StoredTensor):
            streams.append(map(bytes_of, data.blocks(size=most)))
        elif data.device.type == "cpu" and data.is_contiguous():
            streams.append(aligned_blocks(data, begin, most=most))
        else:
            streams.append(map(bytes_of, _copied_blocks(data, most=most)))
    checksum = Checksum()
    with path.open("wb", buffering=0) as file:
        for block in itertools.chain.from_iterable(streams):
            checksum.update(block)
            while block:
                block = block[os.write(file.fileno(), block) :]
                still_moving()  # each block begins the wait of a background save anew
        os.fsync(file.fileno())  # here the rank waits for its disk
    return WriteResult(begins[-1] + items[-1].nbytes, checksum.value, tuple(begins))


def index_of(
    state: FlatStateDict[TensorMetadata],
    shares: Sequence[Sequence[WriteItem]],
    written: Sequence[WriteResult],
    folder: Path,
) -> ShardedIndex:
    """Return the index of a folder that all ranks have written to."""
    shards: dict[str, list[FileShard]] = {}
    files: dict[str, FileEntry] = {}
    for rank, (items, (size, checksum, begins)) in enumerate(zip(shares, written, strict=True)):
        name = file_of_rank(rank, len(shares))
        if items:
            files[name] = FileEntry(size, checksum)
        for item, begin in zip(items, begins, strict=True):
            shard = FileShard(item.box, item.of.dtype, folder / name, begin)
            shards.setdefault(item.name, []).append(shard)
    tensors, same_as = {}, {}
    for first, names in names_by_tensor(state.tensors).items():
        tensor = state.tensors[first]
        tensors[first] = StoredTensor(tensor.shape, tensor.dtype, tuple(shards.get(first, ())))
        same_as.update(dict.fromkeys(names[1:], first))
    return ShardedIndex(tensors, same_as, state.tree, files)


def _copied_blocks(tensor: torch.Tensor, *, most: int) -> Iterator[torch.Tensor]:
    """Yield copies in host memory of the row-major blocks of a tensor that lies elsewhere, or in no row."""
    for box in block_boxes(tensor.shape, most=max(1, most // tensor.dtype.itemsize)):
        yield box.of(tensor).cpu().contiguous()


def save_sharded(path: str | Path, state: ShardedStateDict, kind: Kind) -> None:
    """Write a sharded folder, as the sub-folder of a folder that its kind has a name for; collective.

    Args:
        path: The folder, on a file system that all ranks see.
        state: What the ranks hold.
        kind: What it is.

    Raises:
        ValueError: The sub-folder is there and is no sharded folder, or a tensor is sparse, or not held as a
            whole by the ranks.
        OSError: The folder cannot be written; on all ranks. What was there before is still there.
    """
    target = Path(path) / kind.part
    on_writer(partial(_refuse_other, target))
    shares = on_every_rank(partial(share_out, state, num_ranks()))
    own_items, name = shares[global_rank()], file_of_rank(global_rank(), num_ranks())
    write_shared_folder(
        target,
        num_bytes=state.nbytes,
        agreement=COLLECTIVE,
        write=lambda folder: write_items(folder / name, own_items),
        finish=lambda folder, told: write_sharded_index(
            folder, index_of(state, shares, [WriteResult(*each) for each in told], folder)
        ),
        keep=lambda name: name != INDEX and not is_of_a_rank(name),
    )


def _refuse_other(target: Path) -> None:
    if target.is_dir() and any(target.iterdir()) and not (target / INDEX).is_file():
        raise ValueError(f"{target} is there and is not a checkpoint in slices, which would replace it")
