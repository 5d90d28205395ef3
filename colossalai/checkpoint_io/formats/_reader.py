"""A file or a folder becomes a store; the format is seen from the content.

Everything is read memory-mapped. Before a tensor is given out, the files are read once from end to end and
compared with their checksums; the ranks share that work.
"""

import json
from pathlib import Path
from typing import Any

import torch

from colossalai.checkpoint_io._collective import global_rank, num_ranks, on_every_rank
from colossalai.checkpoint_io._hugging_face_index import find_weights, read_index
from colossalai.checkpoint_io._load_report import listed
from colossalai.checkpoint_io._state import TREE_KEY, Kind, Store
from colossalai.checkpoint_io._streaming import DEFAULT_BUFFER_MB
from colossalai.checkpoint_io.formats._sharded_index import INDEX, read_chunk_index, refuse_lost_index
from colossalai.checkpoint_io.formats._sharded_reader import chunk_store
from colossalai.checkpoint_io.formats._single import (
    Format,
    detect_format,
    read_safetensors,
    read_torch,
    verify,
)
from colossalai.checkpoint_io.resharding import Mapped, all_mapped
from colossalai.checkpoint_io.storage import damage_named, share_of_files, verify_file


def load_store(
    path: str | Path, kind: Kind, *, variant: str | None = None, allow_pickle: bool = False
) -> Store:
    """Read a checkpoint; collective: an error on one rank is raised on all.

    Args:
        path: A file of torch or safetensors, an index file, a folder that holds one of these or tensors in
            chunks, or a training state.
        kind: What it is.
        variant: Which of the weights in a folder.
        allow_pickle: Run the code that a torch file may hold, if it cannot be restored without.

    Raises:
        ValueError: It is damaged, incomplete, or something else; the message names the file.
        OSError: It cannot be read.
    """
    return on_every_rank(
        lambda: read_store(Path(path), kind, is_verified=False, variant=variant, allow_pickle=allow_pickle)
    )


def read_store(
    path: Path,
    kind: Kind,
    *,
    is_verified: bool,
    variant: str | None = None,
    allow_pickle: bool = False,
    buffer_size: float = DEFAULT_BUFFER_MB,
) -> Store:
    """Read a checkpoint on this rank; unless `is_verified`, compare its part of the files with checksums.

    Chunks are read with up to `buffer_size` MB; files of other formats are mapped, and need none.
    """
    if path.is_dir() and not (path / INDEX).is_file() and (path / kind.part).is_dir():
        path = path / kind.part  # of a training state
    with damage_named(path):
        store = _read(
            path,
            kind,
            is_verified=is_verified,
            variant=variant,
            allow_pickle=allow_pickle,
            buffer_size=buffer_size,
        )
        kind.join(store)  # what the tree says of the tensors is there
        return store


def _read(
    path: Path, kind: Kind, *, is_verified: bool, variant: str | None, allow_pickle: bool, buffer_size: float
) -> Store:
    if (path / INDEX).is_file():
        return _read_chunk_folder(path, is_verified=is_verified, buffer_size=buffer_size)
    if path.is_dir():
        refuse_lost_index(path)
        path = find_weights(path, kind.stems, variant=variant)
    if not path.name.endswith(".json"):
        _verify_part([path], is_verified=is_verified)
        return _read_file(path, kind, allow_pickle=allow_pickle)
    index = read_index(path)
    if kind.needs_tree and index.metadata.get(TREE_KEY) is None:
        raise ValueError(
            f"{path} has no {TREE_KEY!r} in its metadata, where the values that are no tensors are"
        )
    _verify_part([path.parent / name for name in index.files], is_verified=is_verified)
    tensors: dict[str, Mapped] = {}
    for name in index.files:
        values = _read_shard(path.parent / name, allow_pickle=allow_pickle)
        shard = all_mapped(values)
        lost = [key for key, home in index.weight_map.items() if home == name and key not in shard]
        if lost:
            raise ValueError(f"{path} says that {name} holds {listed(lost)}, which it does not")
        tensors |= shard
    return Store(tensors, index.metadata.get(TREE_KEY))


def store_of(content: Any, kind: Kind) -> Store:
    """Return the content of a torch file, whose tensors are views of it, as a store.

    Raises:
        ValueError: It is not of that kind.
    """
    store = kind.split(content)
    return Store(dict(all_mapped(store.tensors)), store.tree)


def _verify_part(files: list[Path], *, is_verified: bool) -> None:
    for file in [] if is_verified else files[global_rank() :: num_ranks()]:
        verify(file)


def _read_chunk_folder(folder: Path, *, is_verified: bool, buffer_size: float) -> Store:
    index = read_chunk_index(folder)
    for name in [] if is_verified else share_of_files(index.files, global_rank(), num_ranks()):
        verify_file(folder / name, index.files[name], listed_in=INDEX, buffer_size=buffer_size)
    return chunk_store(index, folder, buffer_size=buffer_size)


def _read_file(path: Path, kind: Kind, *, allow_pickle: bool) -> Store:
    if detect_format(path) is not Format.SAFETENSORS:
        content = read_torch(path, allow_pickle=allow_pickle)
        try:
            return store_of(content, kind)
        except ValueError as error:  # it is no damage that a file is of something else
            raise ValueError(f"{path}: {error}") from error
    tensors, header = read_safetensors(path)
    return Store(dict(all_mapped(tensors)), json.loads(header.get(TREE_KEY, "null")))


def _read_shard(path: Path, *, allow_pickle: bool) -> dict[str, torch.Tensor]:
    if detect_format(path) is Format.SAFETENSORS:
        return read_safetensors(path)[0]
    content: Any = read_torch(path, allow_pickle=allow_pickle)
    if not isinstance(content, dict) or not all(isinstance(item, torch.Tensor) for item in content.values()):
        raise ValueError(f"{path} is not a shard: it holds more than tensors by name")
    return content
