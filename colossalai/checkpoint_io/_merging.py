"""Several files, each with some of the tensors, or with chunks of them, taken as one checkpoint."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from colossalai.checkpoint_io._boxes import Box, is_tiled
from colossalai.checkpoint_io._comparing import same_values
from colossalai.checkpoint_io._entries import Stored
from colossalai.checkpoint_io._store import Store

_RANGE = r"(\d+):(\d+)"
_CHUNK = re.compile(rf"(.+)\[({_RANGE}(?:, {_RANGE})*)\]")  # as `chunk_name` writes it


@dataclass(frozen=True, eq=False)
class _Joined(Stored):
    """A tensor of which the parts are in several files."""

    chunks: tuple[tuple[Box, Stored], ...]

    def read(self, box: Box, out: torch.Tensor) -> None:
        """See the base class."""
        for chunk, stored in self.chunks:
            common = box.overlap(chunk)
            if common is not None:
                target = common.moved(box.offsets, sign=-1).of(out)
                stored.read(common.moved(chunk.offsets, sign=-1), target)


def merge_stores(stores: Mapping[str, Store]) -> Store:
    """Return one store with the tensors of several.

    Chunks, which carry their place in their name as the files of our folders have it, become whole tensors.

    Args:
        stores: By a text that says where each comes from.

    Raises:
        ValueError: Two hold different values under one name, or chunks do not make a whole tensor.
    """
    merged: dict[str, Any] = {}
    homes: dict[str, str] = {}
    for source, store in stores.items():
        for name, tensor in store.tensors.items():
            if name in merged and not same_values(merged[name], tensor):
                raise ValueError(
                    f"{name} is in {homes[name]}, {tuple(merged[name].shape)}, and in {source}, "
                    f"{tuple(tensor.shape)}, with other values. If they are slices of one tensor: such files "
                    f"do not say how it was cut; merge the checkpoint folder that they belong to"
                )
            merged.setdefault(name, tensor)
            homes.setdefault(name, source)
    return Store(_joined(merged), None)


def _joined(tensors: Mapping[str, Stored]) -> dict[str, Any]:
    chunks: dict[str, list[tuple[Box, Stored]]] = {}
    whole: dict[str, Any] = {}
    for name, tensor in tensors.items():
        match = _CHUNK.fullmatch(name)
        if match is None:
            whole[name] = tensor
            continue
        ranges = [(int(begin), int(end)) for begin, end in re.findall(_RANGE, match.group(2))]
        box = Box(tuple(begin for begin, _ in ranges), tuple(end - begin for begin, end in ranges))
        chunks.setdefault(match.group(1), []).append((box, tensor))
    for name, parts in chunks.items():
        ends = [[o + s for o, s in zip(box.offsets, box.sizes, strict=True)] for box, _ in parts]
        shape = tuple(map(max, zip(*ends, strict=True)))
        if name in whole or not is_tiled(shape, [box for box, _ in parts]):
            there = ", ".join(str(box) for box, _ in parts)
            raise ValueError(
                f"the files hold {there} of {name}, which is not all of it, once: give all files"
            )
        whole[name] = _Joined(shape, parts[0][1].dtype, tuple(parts))
    return whole
