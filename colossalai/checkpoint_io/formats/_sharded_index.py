"""The index of a folder in which tensors lie in chunks: which box of which tensor is where in which file.

    tensors.json                          the index
    00000-of-00002.safetensors  ...       what rank 0 of 2 has written: chunks, one after the other

A chunk is a box of a global tensor, row-major. The files are in safetensors' format, so that other programs
can look into them; a chunk that is a whole tensor has its name there, any other the name and the box.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from colossalai.checkpoint_io._load_report import listed
from colossalai.checkpoint_io.resharding import Box, Json, is_tiled, whole_box
from colossalai.checkpoint_io.storage import (
    FileEntry,
    count_of,
    counts_of,
    damage_named,
    field_of,
    file_entries,
    json_checksum,
    of_kind,
    read_json,
    refuse_links_out,
    refuse_strays,
    texts_of,
)

INDEX = "tensors.json"
_FORMAT = 1
_FILE_OF_RANK = re.compile(r"\d{5,}-of-\d{5,}\.safetensors")


@dataclass(frozen=True)
class Chunk:
    """A part of a tensor in a file.

    Attributes:
        box: Which part.
        file: The name of the file.
        begin: Where it begins there, in bytes.
    """

    box: Box
    file: str
    begin: int


@dataclass(frozen=True)
class ChunkedTensor:
    """Where a tensor lies.

    Attributes:
        shape: Its shape.
        dtype: Its dtype.
        chunks: Its parts; together they are all of it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class ChunkIndex:
    """What lies in a folder.

    Attributes:
        tensors: By name.
        same_as: Further names of tensors, each with the name under which it is in `tensors`.
        tree: The plain values beside the tensors (see `_tree`).
        files: What each file must be.
    """

    tensors: Mapping[str, ChunkedTensor]
    same_as: Mapping[str, str]
    tree: Json
    files: Mapping[str, FileEntry]


def chunk_name(name: str, box: Box, shape: tuple[int, ...]) -> str:
    """Return what a chunk is called in its file."""
    return name if box == whole_box(shape) else f"{name}{box}"


def file_of_rank(rank: int, num_ranks: int) -> str:
    """Return the name of the file that a rank writes."""
    return f"{rank:05d}-of-{num_ranks:05d}.safetensors"


def is_of_a_rank(name: str) -> bool:
    """Return whether a file has a name that `file_of_rank` gives."""
    return _FILE_OF_RANK.fullmatch(name) is not None


def refuse_lost_index(folder: Path) -> None:
    """Raise if a folder without an index holds files that some rank wrote.

    Raises:
        ValueError: It is so.
    """
    names = sorted(entry.name for entry in folder.iterdir() if is_of_a_rank(entry.name))
    if names:
        raise ValueError(f"{folder / INDEX} is missing, which tells what {listed(names)} hold")


def index_as_text(index: ChunkIndex) -> str:
    """Return the content of the index file."""
    tensors = {
        name: {
            "shape": list(tensor.shape),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "chunks": [[c.file, c.begin, list(c.box.offsets), list(c.box.sizes)] for c in tensor.chunks],
        }
        for name, tensor in index.tensors.items()
    }
    files = {name: asdict(entry) for name, entry in index.files.items()}
    body = {"files": files, "same_as": dict(index.same_as), "tree": index.tree, "tensors": tensors}
    return json.dumps({"format": _FORMAT, "crc32": json_checksum(body), "index": body})


def read_chunk_index(folder: Path) -> ChunkIndex:
    """Read the index of a folder; the files that it names must have the size that it says.

    Raises:
        ValueError: It is damaged or of a later format, a file is missing or of another size, or a tensor is
            not all there.
        OSError: It cannot be read.
    """
    path = folder / INDEX
    content = read_json(path)
    with damage_named(path):
        number, body = field_of(content, "format", int), field_of(content, "index", dict)
        if number != _FORMAT:
            raise ValueError(f"{path} is of format {number}; this version reads format {_FORMAT}")
        if json_checksum(body) != field_of(content, "crc32", int):
            raise ValueError("its checksum does not match its content")
        index = _parsed(body)
        lost = _lost(index)
        if lost:
            raise ValueError(f"it does not have all of {listed(lost)}, once")
    _check_files(index, folder)
    return index


def _parsed(content: dict[str, Any]) -> ChunkIndex:
    tensors = {}
    for name, entry in field_of(content, "tensors", dict).items():
        dtype = _dtypes().get(field_of(entry, "dtype", str))
        if dtype is None:
            raise ValueError(f"{name} has the dtype {entry['dtype']!r}")
        chunks = tuple(
            Chunk(
                Box(counts_of(offsets, name), counts_of(sizes, name)),
                of_kind(file, str, name),
                count_of(begin, name),
            )
            for file, begin, offsets, sizes in field_of(entry, "chunks", list)
        )
        tensors[name] = ChunkedTensor(counts_of(field_of(entry, "shape", list), name), dtype, chunks)
    return ChunkIndex(
        tensors=tensors,
        same_as=texts_of(field_of(content, "same_as", dict), "same_as"),
        tree=content.get("tree"),
        files=file_entries(field_of(content, "files", dict)),
    )


@cache
def _dtypes() -> dict[str, torch.dtype]:
    return {name: dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)}


def _check_files(index: ChunkIndex, folder: Path) -> None:
    refuse_strays(index.files, folder / INDEX)
    refuse_links_out(index.files, folder)
    for name, entry in index.files.items():
        path = folder / name
        if not path.is_file():
            raise ValueError(f"{path} is missing; {INDEX} lists it")
        if path.stat().st_size != entry.size:
            raise ValueError(f"{path} has {path.stat().st_size} bytes, {INDEX} says {entry.size}")


def _lost(index: ChunkIndex) -> list[str]:
    """Return the names of the tensors that are not all there."""
    lost = [name for name, tensor in index.tensors.items() if not _is_complete(tensor, index.files)]
    return lost + [name for name, first in index.same_as.items() if first not in index.tensors]


def _is_complete(tensor: ChunkedTensor, files: Mapping[str, FileEntry]) -> bool:
    """Return whether each element of a tensor lies in one chunk, and the chunks within their files."""
    for chunk in tensor.chunks:
        end = chunk.begin + chunk.box.numel * tensor.dtype.itemsize
        if chunk.begin < 0 or end > files[chunk.file].size:
            return False
    return is_tiled(tensor.shape, [chunk.box for chunk in tensor.chunks])
