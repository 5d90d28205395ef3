"""Index and file names of a folder of shards, in the layout of Hugging Face's libraries.

    pytorch_model-00001-of-00003.bin  ...  pytorch_model.bin.index.json       torch's format
    model-00001-of-00003.safetensors  ...  model.safetensors.index.json       safetensors

The index is JSON: `weight_map` maps names to files, `metadata.total_size` is the bytes of all tensors. An
optimizer's state has the same layout under names of its own, so that both fit in one folder. Weights of a
variant ("fp16") are stored next to others: model.fp16.safetensors, model.fp16-00001-of-00003.safetensors
and model.safetensors.index.fp16.json.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from colossalai.checkpoint_io.storage import (
    Json,
    damage_named,
    differs_by_one,
    json_checksum,
    listed,
    of_kind,
    read_json,
    refuse_other_form,
    refuse_strays,
)

_MB = 1024 * 1024
_CHECKSUM = "crc32"  # under it the metadata has the checksum of all the rest


@dataclass(frozen=True)
class Stems:
    """The beginnings of the file names of one kind of checkpoint."""

    torch: str
    safetensors: str

    def file_name(self, *, use_safetensors: bool, variant: str | None = None) -> str:
        """Return the name of a single file."""
        stem, suffix = (self.safetensors, "safetensors") if use_safetensors else (self.torch, "bin")
        return f"{stem}{_infix(variant)}.{suffix}"

    def index_name(self, *, use_safetensors: bool, variant: str | None = None) -> str:
        """Return the name of the index file; a variant comes before its last word."""
        file = self.file_name(use_safetensors=use_safetensors)
        return f"{file}.index{_infix(variant)}.json"

    def shard_name(
        self, number: int, count: int, *, use_safetensors: bool, variant: str | None = None
    ) -> str:
        """Return the name of shard `number` (from 1) of `count`."""
        stem, dot, suffix = self.file_name(use_safetensors=use_safetensors, variant=variant).rpartition(".")
        return f"{stem}-{number:05d}-of-{count:05d}{dot}{suffix}"

    def owns(self, name: str, *, variant: str | None = None) -> bool:
        """Return whether a file belongs to a checkpoint of this kind and variant, in either format."""
        infix = re.escape(_infix(variant))
        return any(
            re.fullmatch(rf"{stem}({infix}(-\d+-of-\d+)?\.{suffix}|\.{suffix}\.index{infix}\.json)", name)
            for stem, suffix in ((self.torch, "bin"), (self.safetensors, "safetensors"))
        )

    def variants_in(self, folder: Path) -> list[str]:
        """Return the variants of which there are weights in a folder."""
        forms = [
            form
            for stem, suffix in ((self.torch, "bin"), (self.safetensors, "safetensors"))
            for form in (rf"{stem}\.(.+)(?<!-of-\d{{5}})\.{suffix}", rf"{stem}\.{suffix}\.index\.(.+)\.json")
        ]
        names = [entry.name for entry in folder.iterdir()]
        found = (re.fullmatch(form, name) for form in forms for name in names)
        return sorted({match.group(1) for match in found if match})


def _infix(variant: str | None) -> str:
    return "" if variant is None else f".{variant}"


@dataclass(frozen=True)
class HuggingFaceIndex:
    """The content of an index file: which file holds which name, and the rest."""

    weight_map: dict[str, str]
    metadata: dict[str, Json]

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

    Raises:
        ValueError: `size_per_shard` is not above 0.
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


def find_weights(folder: Path, stems: Stems, *, variant: str | None = None) -> Path:
    """Return the only file of a folder or its index: the first of the names that `from_pretrained` looks for.

    Raises:
        ValueError: `folder` holds no checkpoint of this kind.
        OSError: `folder` cannot be read.
    """
    names = [
        name
        for use_safetensors in (True, False)
        for name in (
            stems.file_name(use_safetensors=use_safetensors, variant=variant),
            stems.index_name(use_safetensors=use_safetensors, variant=variant),
        )
    ]
    for name in names:
        if (folder / name).is_file():
            return folder / name
    variants = stems.variants_in(folder)
    if variants:
        raise ValueError(f"{folder} holds none of {', '.join(names)}, but the variants {listed(variants)}")
    present = sorted(entry.name for entry in folder.iterdir())
    raise ValueError(f"{folder} holds none of {', '.join(names)}; there is {listed(present)}")


def read_index(path: Path) -> HuggingFaceIndex:
    """Read an index file.

    Raises:
        ValueError: The index is damaged, names a file outside its folder, or a file that is not there.
        OSError: The index cannot be read.
    """
    content = read_json(path)
    with damage_named(path):
        if not isinstance(content, dict) or not isinstance(content.get("weight_map"), dict):
            raise ValueError("it is not an index of shards, which has a weight_map")
        refuse_other_form(content["weight_map"], {str: str}, "weight_map")
        metadata = of_kind(content.get("metadata") or {}, dict, "metadata")
        weight_map = content["weight_map"]
        if _CHECKSUM in metadata:
            if not _is_of_rest(_CHECKSUM, metadata, weight_map):
                raise ValueError("its checksum does not match its content")
        # Other programs write none; ours exists also if its name, or the name of the metadata, is damaged.
        elif any(
            _is_of_rest(name, part, weight_map)
            for part in content.values()
            if part is not weight_map and isinstance(part, dict)
            for name in part
            if differs_by_one(name, _CHECKSUM)
        ):
            raise ValueError(f"the name of its checksum is not {_CHECKSUM!r} in 'metadata'")
        others = {name: value for name, value in metadata.items() if name != _CHECKSUM}
        index = HuggingFaceIndex(weight_map, others)
    refuse_strays(index.files, path)
    missing = [name for name in index.files if not (path.parent / name).is_file()]
    if missing:
        raise ValueError(f"{path} names files that are not there: {listed(missing)}")
    return index


def _is_of_rest(name: str, metadata: Mapping[str, Json], weight_map: Mapping[str, str]) -> bool:
    """Return whether an entry of the metadata is the checksum of the index without it."""
    rest = {key: value for key, value in metadata.items() if key != name}
    return metadata[name] == json_checksum([weight_map, rest])


def index_text(index: HuggingFaceIndex) -> str:
    """Return the content of an index file."""
    checksum = json_checksum([index.weight_map, index.metadata])
    metadata = {**index.metadata, _CHECKSUM: checksum}
    return json.dumps({"metadata": metadata, "weight_map": index.weight_map}, indent=2)
