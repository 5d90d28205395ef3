"""Reader of checkpoints of any form: a file or a folder becomes a flat state dict.

The format is seen from the content. Everything is read memory-mapped. Before a tensor is given out, the files
are read once from end to end and compared with their checksums; the ranks share that work.
"""

import json
from pathlib import Path
from typing import Any

import torch

from colossalai.checkpoint_io._collective import global_rank, num_ranks, on_every_rank
from colossalai.checkpoint_io._hugging_face_index import find_weights, read_index
from colossalai.checkpoint_io._state import TREE_KEY, Kind
from colossalai.checkpoint_io.formats._sharded_folder import read_sharded_index, refuse_lost_index
from colossalai.checkpoint_io.formats._single import (
    Format,
    detect_format,
    read_safetensors,
    read_torch,
    verify,
)
from colossalai.checkpoint_io.resharding import FlatStateDict, StoredStateDict, StoredTensor, stored_views
from colossalai.checkpoint_io.storage import INDEX, damage_named, listed, verify_files


def load_state(
    path: str | Path, kind: Kind, *, variant: str | None = None, allow_pickle: bool = False
) -> StoredStateDict:
    """Read a checkpoint; collective: an error on one rank is raised on all.

    Args:
        path: A file of torch or safetensors, an index file, a folder that holds one of these, a sharded
            folder, or a training state.
        kind: Its kind.
        variant: The word of the weights in a folder.
        allow_pickle: Run the code that a torch file can contain, if it cannot be restored without.

    Raises:
        ValueError: The checkpoint is damaged, incomplete, or not of `kind`; the message names the file.
        OSError: The checkpoint cannot be read.
    """
    return on_every_rank(
        lambda: read_state(Path(path), kind, is_verified=False, variant=variant, allow_pickle=allow_pickle)
    )


def read_state(
    path: Path,
    kind: Kind,
    *,
    is_verified: bool,
    variant: str | None = None,
    allow_pickle: bool = False,
) -> StoredStateDict:
    """Read a checkpoint on this rank; unless `is_verified`, compare its part of the files with checksums.

    Raises:
        ValueError: The checkpoint is damaged, incomplete, or not of `kind`; the message names the file.
        OSError: The checkpoint cannot be read.
    """
    if path.is_dir() and not (path / INDEX).is_file() and (path / kind.part).is_dir():
        path = path / kind.part  # `path` is a training state
    with damage_named(path):
        state = _read(path, kind, is_verified=is_verified, variant=variant, allow_pickle=allow_pickle)
        kind.join(state)  # checks the tensors that the tree names
        return state


def _read(
    path: Path, kind: Kind, *, is_verified: bool, variant: str | None, allow_pickle: bool
) -> StoredStateDict:
    if (path / INDEX).is_file():
        sharded = read_sharded_index(path)
        if not is_verified:
            verify_files(path, sharded.files, listed_in=INDEX, part=global_rank(), num_parts=num_ranks())
        return sharded.state()
    if path.is_dir():
        refuse_lost_index(path)
        path = find_weights(path, kind.stems, variant=variant)
    if not path.name.endswith(".json"):
        _verify_part([path], is_verified=is_verified)
        return _read_file(path, kind, allow_pickle=allow_pickle)
    index = read_index(path)
    if kind.needs_tree and index.metadata.get(TREE_KEY) is None:
        raise ValueError(
            f"{path} has no {TREE_KEY!r} in its metadata, where values other than tensors are stored"
        )
    _verify_part([path.parent / name for name in index.files], is_verified=is_verified)
    tensors: dict[str, StoredTensor] = {}
    for name in index.files:
        values = _read_shard(path.parent / name, allow_pickle=allow_pickle)
        shard = stored_views(values)
        lost = [key for key, home in index.weight_map.items() if home == name and key not in shard]
        if lost:
            raise ValueError(f"{path} lists {listed(lost)} in {name}, which lacks them")
        tensors |= shard
    return FlatStateDict(tensors, index.metadata.get(TREE_KEY))


def state_of(content: object, kind: Kind) -> StoredStateDict:
    """Return the content of a torch file, whose tensors are views of it, as a flat state dict.

    Raises:
        ValueError: `content` is not of that kind.
    """
    state = kind.split(content)
    return FlatStateDict(stored_views(state.tensors), state.tree)


def _verify_part(files: list[Path], *, is_verified: bool) -> None:
    for file in [] if is_verified else files[global_rank() :: num_ranks()]:
        verify(file)


def _read_file(path: Path, kind: Kind, *, allow_pickle: bool) -> StoredStateDict:
    if detect_format(path) is not Format.SAFETENSORS:
        content = read_torch(path, allow_pickle=allow_pickle)
        try:
            return state_of(content, kind)
        except ValueError as error:  # it is no damage that a file is of something else
            raise ValueError(f"{path}: {error}") from error
    tensors, header = read_safetensors(path)
    return FlatStateDict(stored_views(tensors), json.loads(header.get(TREE_KEY, "null")))


def _read_shard(path: Path, *, allow_pickle: bool) -> dict[str, torch.Tensor]:
    if detect_format(path) is Format.SAFETENSORS:
        return read_safetensors(path)[0]
    content: Any = read_torch(path, allow_pickle=allow_pickle)
    if not isinstance(content, dict) or not all(isinstance(item, torch.Tensor) for item in content.values()):
        raise ValueError(f"{path} is not a shard: it holds more than tensors by name")
    return content
