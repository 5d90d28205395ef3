"""Index of a sharded folder: which shard of which tensor lies at what offset of which file.

    tensors.json                          the index
    00000-of-00002.safetensors  ...       what rank 0 of 2 has written: shards, one after the other

A shard is a box of a global tensor, row-major. The files are in safetensors' format, so that other programs
can look into them; a shard that is a whole tensor has its name there, any other the name and the box. (In the
index the shards of a tensor stand under "chunks", as torch's distributed checkpoints call them.)
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from colossalai.checkpoint_io._state import FlatStateDict
from colossalai.checkpoint_io.resharding import FileShard, StoredTensor
from colossalai.checkpoint_io.storage import (
    DEFAULT_BUFFER_MB,
    FORM_OF_FILES,
    INDEX,
    Count,
    FileEntry,
    Form,
    Json,
    damage_named,
    file_entries,
    json_checksum,
    listed,
    read_block_size,
    read_checked_json,
    refuse_links_out,
    refuse_strays,
)
from colossalai.cluster import dtype_named
from colossalai.tensor import Box, is_tiled

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
    """What lies in a sharded folder.

    Attributes:
        tensors: By name; their shards are `FileShard`s.
        same_as: Further names of tensors, each with the name under which it is in `tensors`.
        tree: The plain values beside the tensors (see `resharding/_tree`).
        files: What each file must be.
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
    """Return what a shard is called in its file."""
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
        raise ValueError(f"{folder / INDEX} is missing, which tells what {listed(names)} hold")


def write_sharded_index(folder: Path, index: ShardedIndex) -> None:
    """Write the index of a folder whose files are written, and read it as a reader will.

    Raises:
        ValueError: A file has another size than the index says, or a tensor is not all there.
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


def read_sharded_index(folder: Path, *, buffer_size: float = DEFAULT_BUFFER_MB) -> ShardedIndex:
    """Read the index of a folder; the files that it names must have the size that it says.

    The values are not read, and not compared with the checksums.

    Args:
        folder: The folder.
        buffer_size: The memory, in MB, that reading a tensor may take beside where it goes.

    Raises:
        ValueError: The index is damaged or of a later format, a file is missing or of another size, or a
            tensor is not all there.
        OSError: The index cannot be read.
    """
    path, most = folder / INDEX, read_block_size(buffer_size)
    # Every field is there and of its kind, and no number is negative.
    body: dict[str, Any] = read_checked_json(path, "index", version=_FORMAT, form=_FORM)
    refuse_strays(body["files"], path)
    refuse_links_out(body["files"], folder)
    with damage_named(path):
        files = file_entries(body["files"])
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
        ValueError: A dtype is unknown, or an element of a tensor lies in no shard, in several, or beyond the
            end of its file.
        KeyError: A shard lies in a file that the index does not list.
    """
    tensors, boxes, lost = {}, {}, set()
    dtypes = {name: dtype_named(name) for name in {entry["dtype"] for entry in body["tensors"].values()}}
    for name, entry in body["tensors"].items():
        dtype = dtypes[entry["dtype"]]
        if dtype is None:
            raise ValueError(f"{name} has the dtype {entry['dtype']!r}")
        shards = []
        for file, begin, offsets, sizes in entry["chunks"]:
            if begin + math.prod(sizes) * dtype.itemsize > files[file].size:
                lost.add(name)
            shards.append(FileShard(Box(tuple(offsets), tuple(sizes)), dtype, folder / file, begin, most))
        tensors[name] = StoredTensor(tuple(entry["shape"]), dtype, tuple(shards))
        boxes[name] = [shard.box for shard in shards]
    lost |= {name for name, tensor in tensors.items() if not is_tiled(tensor.shape, boxes[name])}
    lost |= {name for name, first in body["same_as"].items() if first not in tensors}
    if lost:
        raise ValueError(f"it does not have all of {listed(sorted(lost))}, once")
    return tensors
