"""A folder of shards and its index, in the layout of Hugging Face's libraries.

    pytorch_model-00001-of-00003.bin  ...  pytorch_model.bin.index.json       torch's format
    model-00001-of-00003.safetensors  ...  model.safetensors.index.json       safetensors

The index is JSON: `weight_map` tells which file holds which name, `metadata.total_size` the bytes of all
tensors. An optimizer's state lies in the same layout under names of its own, so that both fit in one folder.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from colossalai.checkpoint_io._names import listed

_MB = 1024 * 1024


@dataclass(frozen=True)
class Stems:
    """The beginnings of the file names of one kind of checkpoint."""

    torch: str
    safetensors: str

    def index_name(self, *, use_safetensors: bool) -> str:
        """Return the name of the index file."""
        return (
            f"{self.safetensors}.safetensors.index.json"
            if use_safetensors
            else f"{self.torch}.bin.index.json"
        )

    def shard_name(self, number: int, count: int, *, use_safetensors: bool) -> str:
        """Return the name of shard `number` (from 1) of `count`."""
        stem, suffix = (self.safetensors, "safetensors") if use_safetensors else (self.torch, "bin")
        return f"{stem}-{number:05d}-of-{count:05d}.{suffix}"

    def owns(self, name: str) -> bool:
        """Return whether a file belongs to a checkpoint of this kind, in either format."""
        forms = ((self.torch, "bin"), (self.safetensors, "safetensors"))
        return any(
            re.fullmatch(rf"{stem}(-\d+-of-\d+)?\.{suffix}(\.index\.json)?", name) for stem, suffix in forms
        )


@dataclass(frozen=True)
class Index:
    """The content of an index file: which file holds which name, and the rest."""

    weight_map: dict[str, str]
    metadata: dict[str, Any]

    @property
    def files(self) -> list[str]:
        """The names of the shards, each once, in order."""
        return list(dict.fromkeys(self.weight_map.values()))


def plan_shards(sizes: Mapping[str, int], *, size_per_shard: float) -> list[list[str]]:
    """Put names in shards, in order, each as full as it can be.

    Args:
        sizes: The bytes of each tensor.
        size_per_shard: The most a shard holds, in MB of 1024 * 1024 bytes; a larger tensor is a shard by
            itself.

    Returns:
        The names of each shard; one empty shard if there are no tensors.
    """
    if not size_per_shard > 0:
        raise ValueError(f"size_per_shard={size_per_shard} MB is not a size: give a number above 0")
    shards: list[list[str]] = [[]]
    room = size_per_shard * _MB
    for name, size in sizes.items():
        if size > room and shards[-1]:
            shards.append([])
            room = size_per_shard * _MB
        shards[-1].append(name)
        room -= size
    return shards


def find_weights(folder: Path, stems: Stems) -> Path:
    """Return the only file of a folder or its index: the first of the names that `from_pretrained` looks for.

    Raises:
        ValueError: The folder holds no checkpoint of this kind.
    """
    names = [
        f"{stems.safetensors}.safetensors",
        stems.index_name(use_safetensors=True),
        f"{stems.torch}.bin",
        stems.index_name(use_safetensors=False),
    ]
    for name in names:
        if (folder / name).is_file():
            return folder / name
    present = sorted(entry.name for entry in folder.iterdir())
    raise ValueError(f"{folder} holds none of {', '.join(names)}; there is {listed(present)}")


def read_index(path: Path) -> Index:
    """Read an index file.

    Raises:
        ValueError: It is damaged, names a file outside its folder, or a file that is not there.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        index = Index(dict(content["weight_map"]), dict(content.get("metadata") or {}))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged or is not an index of shards: {error!r}") from error
    strays = [name for name in index.files if not isinstance(name, str) or Path(name).name != name]
    if strays:
        raise ValueError(f"{path} names files outside its folder: {listed(map(str, strays))}")
    missing = [name for name in index.files if not (path.parent / name).is_file()]
    if missing:
        raise ValueError(f"{path} names files that are not there: {listed(missing)}")
    return index


def index_text(index: Index) -> str:
    """Return the content of an index file."""
    return json.dumps({"metadata": index.metadata, "weight_map": index.weight_map}, indent=2)
