"""Merged files, each with some of the tensors or of their shards, and differences of two checkpoints."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from colossalai.checkpoint_io.resharding import FlatStateDict, StoredShard, StoredStateDict, StoredTensor
from colossalai.checkpoint_io.tools._open import Opened
from colossalai.tensor import Box, block_boxes, is_tiled

_BLOCK = 4 << 20  # elements, of which there are some copies


@dataclass(frozen=True)
class Difference:
    """Difference of two checkpoints under a name.

    Attributes:
        part: "model" or "optimizer".
        name: The name of the tensor.
        largest: The largest absolute difference; NaN where one has a NaN and the other has not; None if
            there is nothing to compare.
        note: Other differences than values: "only in the first", shapes, dtypes.
    """

    part: str
    name: str
    largest: float | None
    note: str = ""

    def exceeds(self, tolerance: float) -> bool:
        """Return whether it is a difference: the values by more than `tolerance`, or anything else."""
        return bool(self.note) or self.largest is None or not self.largest <= tolerance


def differences(first: Opened, second: Opened) -> Iterator[Difference]:
    """Yield the comparison of two checkpoints for each name, whether it differs or not."""
    for part in dict.fromkeys((*first.states, *second.states)):
        states = [opened.states.get(part) for opened in (first, second)]
        ours, theirs = (state.tensors if state is not None else {} for state in states)
        for name in dict.fromkeys((*ours, *theirs)):
            if _is_tied_to(name, ours, theirs) or _is_tied_to(name, theirs, ours):
                continue
            if name not in theirs or name not in ours:
                yield Difference(part, name, None, f"only in the {'first' if name in ours else 'second'}")
                continue
            yield _difference(part, name, ours[name], theirs[name])


def largest_difference(first: StoredTensor, second: StoredTensor) -> float:
    """Return the largest absolute difference of two tensors of one shape."""
    largest = 0.0
    for box in block_boxes(first.shape, most=_BLOCK):
        ours, theirs = (torch.empty(box.sizes, dtype=tensor.dtype) for tensor in (first, second))
        first.read(box, ours)
        second.read(box, theirs)
        if ours.dtype == theirs.dtype and torch.equal(ours, theirs):
            continue
        block = _largest(ours, theirs)
        largest = block if math.isnan(block) else max(largest, block)
        if math.isnan(largest):
            break
    return largest


def same_values(first: StoredTensor, second: StoredTensor) -> bool:
    """Return whether two tensors are the same, dtype included."""
    if (first.shape, first.dtype) != (second.shape, second.dtype):
        return False
    return first is second or largest_difference(first, second) == 0


def _is_tied_to(name: str, having: Mapping[str, StoredTensor], lacking: Mapping[str, StoredTensor]) -> bool:
    """Return whether a name that one checkpoint lacks is a further name of a tensor that it has."""
    if name in lacking or name not in having:
        return False
    return any(having.get(other) is having[name] for other in lacking)


def _largest(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    if not any(tensor.is_floating_point() or tensor.is_complex() for tensor in (ours, theirs)):
        return float((ours.long() - theirs.long()).abs().max().item())
    wide = torch.complex128 if ours.is_complex() or theirs.is_complex() else torch.float64
    ours, theirs = ours.to(wide), theirs.to(wide)
    both = (ours == theirs) | (ours.isnan() & theirs.isnan())
    return float((ours - theirs).abs().masked_fill_(both, 0).max().item())


def _difference(part: str, name: str, ours: StoredTensor, theirs: StoredTensor) -> Difference:
    if ours.shape != theirs.shape:
        return Difference(part, name, None, f"shape {tuple(ours.shape)} and {tuple(theirs.shape)}")
    note = "" if ours.dtype == theirs.dtype else f"{ours.dtype} and {theirs.dtype}".replace("torch.", "")
    return Difference(part, name, largest_difference(ours, theirs), note)


_RANGE = r"(\d+):(\d+)"
_SHARD = re.compile(rf"(.+)\[({_RANGE}(?:, {_RANGE})*)\]")  # as `shard_name` writes it


@dataclass(frozen=True, eq=False)
class _WholeShard(StoredShard):
    """A shard that is stored in a file like a whole tensor."""

    box: Box
    stored: StoredTensor

    def read(self, box: Box, out: torch.Tensor) -> None:
        """See the base class."""
        self.stored.read(box, out)


def merge_states(states: Mapping[str, StoredStateDict]) -> StoredStateDict:
    """Return one flat state dict with the tensors of several.

    Shards, which carry their box in their name as the files of our folders have it, become whole tensors.

    Args:
        states: The states by a description of their origin.

    Raises:
        ValueError: Two states hold different values under one name, or shards do not make a whole tensor.
    """
    merged: dict[str, StoredTensor] = {}
    homes: dict[str, str] = {}
    for source, state in states.items():
        for name, tensor in state.tensors.items():
            if name in merged and not same_values(merged[name], tensor):
                raise ValueError(
                    f"{name} is in {homes[name]}, {tuple(merged[name].shape)}, and in {source}, "
                    f"{tuple(tensor.shape)}, with other values. If they are slices of one tensor: such files "
                    f"lack the way it was cut; merge the checkpoint folder that they belong to"
                )
            merged.setdefault(name, tensor)
            homes.setdefault(name, source)
    return FlatStateDict(_joined(merged), None)


def _joined(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    shards: dict[str, list[_WholeShard]] = {}
    whole: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        match = _SHARD.fullmatch(name)
        if match is None:
            whole[name] = tensor
            continue
        ranges = [(int(begin), int(end)) for begin, end in re.findall(_RANGE, match.group(2))]
        box = Box(tuple(begin for begin, _ in ranges), tuple(end - begin for begin, end in ranges))
        shards.setdefault(match.group(1), []).append(_WholeShard(box, tensor))
    for name, parts in shards.items():
        boxes = [part.box for part in parts]
        ends = [[o + s for o, s in zip(box.offsets, box.sizes, strict=True)] for box in boxes]
        shape = tuple(map(max, zip(*ends, strict=True)))
        if name in whole or not is_tiled(shape, boxes):
            there = ", ".join(map(str, boxes))
            raise ValueError(
                f"the files hold {there} of {name}, which is not all of it, once: give all files"
            )
        whole[name] = StoredTensor(shape, parts[0].stored.dtype, tuple(parts))
    return whole
