"""Two checkpoints compared, block by block."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from colossalai.checkpoint_io._blocks import block_boxes
from colossalai.checkpoint_io._entries import Stored
from colossalai.checkpoint_io._opened import Opened

_BLOCK = 4 << 20  # elements, of which there are some copies


@dataclass(frozen=True)
class Difference:
    """What two checkpoints have under a name.

    Attributes:
        part: "model" or "optimizer".
        name: The name of the tensor.
        largest: The largest absolute difference; NaN where one has a NaN and the other has not; None if
            there is nothing to compare.
        note: What is different beside the values, in words: "only in the first", shapes, dtypes.
    """

    part: str
    name: str
    largest: float | None
    note: str = ""

    def exceeds(self, tolerance: float) -> bool:
        """Return whether it is a difference: the values by more than `tolerance`, or anything else."""
        return bool(self.note) or self.largest is None or not self.largest <= tolerance


def differences(first: Opened, second: Opened) -> Iterator[Difference]:
    """Yield what two checkpoints have under each name, whether it differs or not."""
    for part in dict.fromkeys((*first.stores, *second.stores)):
        stores = [opened.stores.get(part) for opened in (first, second)]
        ours, theirs = (store.tensors if store is not None else {} for store in stores)
        for name in dict.fromkeys((*ours, *theirs)):
            if _is_tied_to(name, ours, theirs) or _is_tied_to(name, theirs, ours):
                continue
            if name not in theirs or name not in ours:
                yield Difference(part, name, None, f"only in the {'first' if name in ours else 'second'}")
                continue
            yield _difference(part, name, ours[name], theirs[name])


def largest_difference(first: Stored, second: Stored) -> float:
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


def same_values(first: Stored, second: Stored) -> bool:
    """Return whether two tensors are the same, dtype included."""
    if (first.shape, first.dtype) != (second.shape, second.dtype):
        return False
    return first is second or largest_difference(first, second) == 0


def _is_tied_to(name: str, having: Mapping[str, Stored], lacking: Mapping[str, Stored]) -> bool:
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


def _difference(part: str, name: str, ours: Stored, theirs: Stored) -> Difference:
    if ours.shape != theirs.shape:
        return Difference(part, name, None, f"shape {tuple(ours.shape)} and {tuple(theirs.shape)}")
    note = "" if ours.dtype == theirs.dtype else f"{ours.dtype} and {theirs.dtype}".replace("torch.", "")
    return Difference(part, name, largest_difference(ours, theirs), note)
