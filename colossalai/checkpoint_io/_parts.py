"""What all ranks hold together, where each holds another part of the model (a pipeline).

A checkpoint is of the whole. So before it is written, the ranks tell each other what they hold: names, shapes
and dtypes, no values. What stands elsewhere is in the content of every rank as a tensor on the device "meta",
and the lowest rank that holds it sends the values when the writer asks.

Where all ranks have the same names (no pipeline) that is one exchange of a short text.
"""

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map_only

from colossalai.checkpoint_io._agreement import global_rank, num_ranks
from colossalai.checkpoint_io._tensors import holder_of, set_holder, whole_shape

_PREFIX = "checkpoint_prefix"
_TIED_NAMES = "checkpoint_tied_names"

Content = dict[str, Any]
Merge = Callable[[Sequence[Content]], Content]


def with_other_ranks(content: Content, names: Iterable[str], merge: Merge) -> Content:
    """Return the content of all ranks together; collective.

    Args:
        content: What this rank holds: nested dicts and lists with tensors in them.
        names: The names in it, by which it is seen whether all ranks hold the same.
        merge: Makes one content out of those of all ranks, in their order. Where two have the same, the
            first one's is to be taken.
    """
    if not hold_different_names(names):
        return content
    here = global_rank()
    contents: list[Content] = [{} for _ in range(num_ranks())]
    dist.all_gather_object(contents, _described(content))
    for rank, other in enumerate(contents):
        tree_map_only(torch.Tensor, partial(set_holder, rank=rank), other)
    merged = merge(contents)
    # Own values take the places of their descriptions, also of those that a lower rank gave.
    own = merge([content if rank == here else {} for rank in range(num_ranks())])
    return _with_own(merged, own)


def hold_different_names(names: Iterable[str]) -> bool:
    """Return whether the ranks hold parts with different names; collective."""
    if num_ranks() == 1:
        return False
    digests: list[str] = [""] * num_ranks()
    dist.all_gather_object(digests, hashlib.sha256("\n".join(names).encode()).hexdigest())
    return len(set(digests)) > 1


def names_elsewhere(names: Collection[str]) -> frozenset[str]:
    """Return the names that other ranks hold and this one does not; collective."""
    if not hold_different_names(names):
        return frozenset()
    held: list[list[str]] = [[] for _ in range(num_ranks())]
    dist.all_gather_object(held, list(names))
    return frozenset(name for other in held for name in other) - set(names)


def merge_by_name(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the entries of all parts; of several with one name the first."""
    merged: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            merged.setdefault(name, value)
    return merged


def set_prefix(module: nn.Module, prefix: str) -> None:
    """Let names in checkpoints start with a text, where other ranks use the same names for other things."""
    setattr(module, _PREFIX, prefix)


def prefix_of(module: nn.Module) -> str:
    """Return the text that `set_prefix` has set."""
    prefix: str = getattr(module, _PREFIX, "")
    return prefix


def set_tied_names(param: nn.Parameter, names: Sequence[str]) -> None:
    """Let a parameter know its names in the whole model, on whatever ranks; the first counts."""
    setattr(param, _TIED_NAMES, tuple(names))


def tied_names(tensor: Any) -> tuple[str, ...]:
    """Return the names that `set_tied_names` has set."""
    return getattr(tensor, _TIED_NAMES, ())


def _described(content: Content) -> Content:
    """Return the content with tensors without values; what is one tensor stays one."""
    described: dict[int, torch.Tensor] = {}

    def describe(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in described:
            described[id(tensor)] = torch.empty(whole_shape(tensor), dtype=tensor.dtype, device="meta")
        return described[id(tensor)]

    return tree_map_only(torch.Tensor, describe, content)


def _with_own(merged: Any, own: Any) -> Any:
    """Return the merged content with this rank's tensors in the places of their descriptions."""
    if isinstance(merged, torch.Tensor):
        if isinstance(own, torch.Tensor):
            return set_holder(own, holder_of(merged))
        return merged
    if isinstance(merged, dict):
        mine = own if isinstance(own, dict) else {}
        return {key: _with_own(value, mine.get(key)) for key, value in merged.items()}
    if isinstance(merged, list | tuple):
        fits = isinstance(own, list | tuple) and len(own) == len(merged)
        others = own if fits else [None] * len(merged)
        return type(merged)(_with_own(value, other) for value, other in zip(merged, others, strict=True))
    return merged
