"""Sharded folders: shards of tensors in a file for each rank, and the index of their offsets.

    tensors.json                          the index
    00000-of-00002.safetensors  ...       the file of rank 0 of 2: shards, one after the other

A shard is a box of a global tensor, row-major. The files are in safetensors' format, so that other programs
can look into them; a shard that is a whole tensor has its name there, any other the name and the box. (In the
index the shards of a tensor are under "chunks", as torch's distributed checkpoints call them.)

For a save, every rank has the descriptions of all ranks (see `_save_plan`), so each determines alone the
writer of every box: a box that several ranks hold is written by one of them.
"""

import itertools
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from colossalai.checkpoint_io._collective import COLLECTIVE, global_rank, num_ranks, on_every_rank, on_writer
from colossalai.checkpoint_io._state import Kind
from colossalai.checkpoint_io.formats._safetensors import header_of
from colossalai.checkpoint_io.resharding import (
    FileShard,
    FlatStateDict,
    ShardedStateDict,
    StoredTensor,
    TensorMetadata,
)
from colossalai.checkpoint_io.storage import (
    FORM_OF_FILES,
    INDEX,
    MOST_READ,
    WRITTEN,
    Checksum,
    Count,
    FileEntry,
    Form,
    Json,
    aligned_blocks,
    bytes_of,
    damage_named,
    file_entries,
    json_checksum,
    listed,
    read_checked_json,
    refuse_links_out,
    refuse_strays,
    write_shared_folder,
)
from colossalai.cluster import DTYPES
from colossalai.monitor import still_moving
from colossalai.tensor import Box, block_boxes, is_tiled

_FORMAT = 1
_FORM: Form = {
    "files": FORM_OF_FILES,
    "same_as": {str: str},
    # Each shard as file, offset of its first byte there, offsets and sizes of its box.
    "tensors": {
        str: {"shape": [Count()], "dtype": str, "chunks": [(str, Count(), [Count()], [Count()])]},
    },
}
_FILE_OF_RANK = re.compile(r"\d{5,}-of-\d{5,}\.safetensors")


@dataclass(frozen=True)
class ShardedIndex:
    """Index of a sharded folder.

    Attributes:
        tensors: By name; their shards are `FileShard`s.
        same_as: Further names of tensors, each with the name under which it is in `tensors`.
        tree: The plain values (see `resharding/_tree`).
        files: Size and checksum of each file.
    """

    tensors: Mapping[str, StoredTensor]
    same_as: Mapping[str, str]
    tree: Json
    files: Mapping[str, FileEntry]

    def state(self) -> FlatStateDict[StoredTensor]:
        """Return the state dict that the folder holds; tied names get one and the same tensor."""
        tied = {name: self.tensors[first] for name, first in self.same_as.items()}
        return FlatStateDict({**self.tensors, **tied}, self.tree)


def shard_name(name: str, box: Box, shape: tuple[int, ...]) -> str:
    """Return the name of a shard in its file."""
    return name if box.sizes == shape else f"{name}{box}"


def file_of_rank(rank: int, num_ranks: int) -> str:
    """Return the name of the file that a rank writes."""
    return f"{rank:05d}-of-{num_ranks:05d}.safetensors"


def is_of_a_rank(name: str) -> bool:
    """Return whether a file has a name that `file_of_rank` gives."""
    return _FILE_OF_RANK.fullmatch(name) is not None


def refuse_lost_index(folder: Path) -> None:
    """Refuse a folder without an index that holds files which some rank wrote.

    Raises:
        ValueError: `folder` holds files of ranks.
    """
    names = sorted(entry.name for entry in folder.iterdir() if is_of_a_rank(entry.name))
    if names:
        raise ValueError(f"{folder / INDEX} is missing, the index of {listed(names)}")


def write_sharded_index(folder: Path, index: ShardedIndex) -> None:
    """Write the index of a folder whose files are written, and read it as a reader will.

    Raises:
        ValueError: A file has another size than in the index, or a tensor is not complete.
        OSError: The index cannot be written.
    """
    tensors = {}
    for name, tensor in index.tensors.items():
        rows: list[Json] = []
        for shard in tensor.shards:
            assert isinstance(shard, FileShard), "what is written lies in files"
            rows.append([shard.path.name, shard.begin, list(shard.box.offsets), list(shard.box.sizes)])
        dtype = str(tensor.dtype).removeprefix("torch.")
        tensors[name] = {"shape": list(tensor.shape), "dtype": dtype, "chunks": rows}
    files = {name: asdict(entry) for name, entry in index.files.items()}
    body = {"files": files, "same_as": dict(index.same_as), "tree": index.tree, "tensors": tensors}
    content = json.dumps({"format": _FORMAT, "crc32": json_checksum(body), "index": body})
    (folder / INDEX).write_text(content, encoding="utf-8")
    read_sharded_index(folder)


def read_sharded_index(folder: Path, *, most: int = MOST_READ) -> ShardedIndex:
    """Read the index of a folder; the files that it names must have the listed sizes.

    The values are not read, and not compared with the checksums.

    Args:
        folder: The folder.
        most: The most bytes that reading a tensor reads at once.

    Raises:
        ValueError: The index is damaged or of a later format, a file is missing or of another size, or a
            tensor is not all there.
        OSError: The index cannot be read.
    """
    path = folder / INDEX
    # Every field is there and of its kind, and no number is negative.
    body: dict[str, Any] = read_checked_json(path, "index", version=_FORMAT, form=_FORM)
    refuse_strays(body["files"], path)
    refuse_links_out(body["files"], folder)
    files = file_entries(body["files"])
    with damage_named(path):
        tensors = _tensors_of(body, files, folder, most)
    for name, entry in files.items():
        file = folder / name
        if not file.is_file():
            raise ValueError(f"{file} is missing; {INDEX} lists it")
        if file.stat().st_size != entry.size:
            raise ValueError(f"{file} has {file.stat().st_size} bytes, {INDEX} says {entry.size}")
    return ShardedIndex(tensors, body["same_as"], body.get("tree"), files)


def _tensors_of(
    body: dict[str, Any], files: Mapping[str, FileEntry], folder: Path, most: int
) -> dict[str, StoredTensor]:
    """Return the tensors of an index.

    Raises:
        ValueError: A dtype is unknown, or an element of a tensor is in no shard, in several, or beyond the
            end of its file.
        KeyError: A shard is in a file that the index does not list.
    """
    tensors, boxes, lost = {}, {}, set()
    for name, entry in body["tensors"].items():
        dtype = DTYPES.get(entry["dtype"])
        if dtype is None:
            raise ValueError(f"{name} has the dtype {entry['dtype']!r}")
        shards = []
        for file, begin, offsets, sizes in entry["chunks"]:
            if begin + math.prod(sizes) * dtype.itemsize > files[file].size:
                lost.add(name)
            shards.append(FileShard(Box(tuple(offsets), tuple(sizes)), dtype, folder / file, begin, most))
        tensors[name] = StoredTensor(tuple(entry["shape"]), dtype, tuple(shards))
        boxes[name] = [shard.box for shard in shards]
    lost |= {name for name, first in body["same_as"].items() if first not in tensors}
    lost |= {name for name, tensor in tensors.items() if not is_tiled(tensor.shape, boxes[name])}
    if lost:
        raise ValueError(f"it does not have all of {listed(sorted(lost))}, once")
    return tensors


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
    """A rank's file of a folder; plain, so that ranks can exchange it.

    Attributes:
        size: Bytes of its file; 0 if it has written none.
        checksum: The checksum of the file.
        begins: The offset of each of its shards in the file.
    """

    size: int
    checksum: int
    begins: tuple[int, ...]


def share_out(state: ShardedStateDict, num_ranks: int) -> list[list[WriteItem]]:
    """Return the shards that each rank writes: about the same number of bytes each, if possible.

    Raises:
        ValueError: A box of a tensor is on no rank, or is in several boxes.
    """
    shares: list[list[WriteItem]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    names = list(state.names_by_tensor)
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


def write_items(path: Path, items: Sequence[WriteItem], *, most: int = WRITTEN) -> WriteResult:
    """Write a rank's shards to its file, and sync it to disk.

    Needs at most a block of memory in addition to the shards.

    Args:
        path: The file.
        items: The shards.
        most: The most bytes that are summed and written at once; at most `WRITTEN`.

    Raises:
        ValueError: A tensor is not dense.
        OSError: The file cannot be written.
    """
    for item in items:
        if isinstance(item.data, torch.Tensor) and item.data.layout != torch.strided:
            raise ValueError(f"{item.name} is not strided: only dense tensors can be saved in chunks")
    if not items:
        return WriteResult(0, 0, ())
    most = min(WRITTEN, most)
    listings = [
        (shard_name(item.name, item.box, item.of.shape), item.of.dtype, item.box.sizes) for item in items
    ]
    sizes = [item.nbytes for item in items]
    header = header_of(listings, sizes, {"format": "pt"})
    *begins, end = itertools.accumulate(sizes, initial=len(header))
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
    checksum, unreported = Checksum(), 0
    with path.open("wb", buffering=0) as file:
        for block in itertools.chain.from_iterable(streams):
            checksum.update(block)
            unreported += len(block)
            while block:
                block = block[os.write(file.fileno(), block) :]
            if unreported >= most:  # the wait of a background save begins anew
                still_moving()
                unreported = 0
        os.fsync(file.fileno())  # here the rank waits for its disk
    return WriteResult(end, checksum.value, tuple(begins))


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
    for first, names in state.names_by_tensor.items():
        tensor = state.tensors[first]
        tensors[first] = StoredTensor(tensor.shape, tensor.dtype, tuple(shards.get(first, ())))
        same_as.update(dict.fromkeys(names[1:], first))
    return ShardedIndex(tensors, same_as, state.tree, files)


def _copied_blocks(tensor: torch.Tensor, *, most: int) -> Iterator[torch.Tensor]:
    """Yield copies in host memory of the row-major blocks of a tensor on a device, or not contiguous."""
    for box in block_boxes(tensor.shape, most=max(1, most // tensor.dtype.itemsize)):
        yield box.of(tensor).cpu().contiguous()


def save_sharded(path: str | Path, state: ShardedStateDict, kind: Kind) -> None:
    """Write a sharded folder, as the sub-folder of a folder that its kind has a name for; collective.

    Args:
        path: The folder, on a file system that all ranks see.
        state: The state of the ranks.
        kind: Its kind.

    Raises:
        ValueError: The sub-folder exists and is not a sharded folder, or a tensor is sparse, or not held as a
            whole by the ranks.
        OSError: The folder cannot be written; on all ranks. An earlier folder is kept.
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
