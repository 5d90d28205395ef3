"""What all ranks hold together, where each holds other tensors, or other parts of them.

A checkpoint is of the whole. So before it is written, the ranks tell each other what they hold: names,
shapes, dtypes and boxes, no values. Then every rank knows the content of the checkpoint, and who has which
part of it.

Where all ranks hold the same, that is one exchange of a short text.
"""

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from colossalai.checkpoint_io._collective import num_ranks
from colossalai.checkpoint_io._state import Store
from colossalai.checkpoint_io.resharding import Box, Described, Entry, Held, Piece, Spread, held
from colossalai.cluster import PlainCodec, gather_bytes

_CODEC = PlainCodec(Described)
_PREFIX = "checkpoint_prefix"
_TIED_NAMES = "checkpoint_tied_names"

Content = dict[str, Any]
Merge = Callable[[Sequence[Content]], Content]
AsStore = Callable[[Content], Store]


def with_other_ranks(content: Content, *, merge: Merge, as_store: AsStore) -> Store:
    """Return the content of all ranks together as a store of `Spread` tensors; collective.

    Args:
        content: What this rank holds: nested dicts and lists with tensors, or what is `Held` of them.
        merge: Makes one content out of those of all ranks, in their order. Where two have the same, the
            first one's is to be taken.
        as_store: Takes a content apart; what stands for a tensor has the same name on all ranks.
    """
    content = _held_entries(content)
    own = as_store(content).tensors
    described = tree_map_only(Held, _Once(_describe), content)
    everywhere = _exchange(described)
    if everywhere is None:
        same = as_store(described).tensors
        return _replaced(
            as_store(content),
            {name: _ranks_of([entry] * num_ranks()) for name, entry in same.items()},
            own,
        )
    tables = [as_store(part).tensors for part in everywhere]
    merged = as_store(merge(everywhere))
    _refuse_disagreement(tables)
    ranks_of = {name: _ranks_of([table.get(name) for table in tables]) for name in merged.tensors}
    return _replaced(merged, ranks_of, own)


def names_elsewhere(names: Collection[str]) -> frozenset[str]:
    """Return the names that other ranks hold and this one does not; collective."""
    held_names = _exchange(list(names))
    if held_names is None:
        return frozenset()
    return frozenset(name for other in held_names for name in other) - set(names)


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


def _exchange(value: Any) -> list[Any] | None:
    """Return the values of all ranks, None if they are all the same; collective."""
    if num_ranks() == 1:
        return None
    told = _CODEC.encode(value)
    if len(set(gather_bytes(hashlib.sha256(told).digest()))) == 1:
        return None
    return [_CODEC.decode(data) for data in gather_bytes(told)]


class _Once:
    """Makes one thing for each object, however often it is asked.

    Args:
        make: Makes it.
    """

    def __init__(self, make: Callable[[Any], Any]) -> None:
        self._make = make
        self._made: dict[int, tuple[Any, Any]] = {}  # with the object: its id stays its own

    def __call__(self, key: Any) -> Any:
        if id(key) not in self._made:
            self._made[id(key)] = (key, self._make(key))
        return self._made[id(key)][1]


def _held_entries(content: Content) -> Content:
    """Return the content with what this rank holds of its tensors in their places; tied ones stay one."""
    return tree_map_only(torch.Tensor, _Once(held), content)


def _describe(entry: Held) -> Described:
    boxes = tuple(piece.box for piece in entry.pieces)
    return Described(entry.shape, entry.dtype, boxes, entry.may_differ)


def _ranks_of(entries: Sequence[Described | None]) -> dict[Box, tuple[int, ...]]:
    """Return for each part of a tensor the ranks whose values of it can be saved."""
    ranks: dict[Box, list[int]] = {}
    for rank, entry in enumerate(entries):
        if entry is None:
            continue
        for box in entry.boxes:
            having = ranks.setdefault(box, [])
            if not having or not entry.may_differ:
                having.append(rank)
    return {box: tuple(having) for box, having in ranks.items()}


def _refuse_disagreement(tables: Sequence[Mapping[str, Described]]) -> None:
    """Refuse tensors of one name that are of other shapes or dtypes on other ranks; the same on all ranks."""
    first: dict[str, tuple[int, Described]] = {}
    for rank, table in enumerate(tables):
        for name, entry in table.items():
            other_rank, other = first.setdefault(name, (rank, entry))
            if (entry.shape, entry.dtype) != (other.shape, other.dtype):
                raise ValueError(
                    f"{name} is {other.shape} {other.dtype} on rank {other_rank} and {entry.shape} "
                    f"{entry.dtype} on rank {rank}: parts of one tensor must agree, other tensors need other "
                    f"names"
                )


def _replaced(
    store: Store, ranks_of: Mapping[str, Mapping[Box, tuple[int, ...]]], own: Mapping[str, Held]
) -> Store:
    """Return a store with what all ranks hold of its tensors in their places; tied ones stay one."""
    names: dict[int, str] = {}
    spread: dict[str, Entry] = {}
    for name, entry in store.tensors.items():
        first = names.setdefault(id(entry), name)
        if first != name:
            spread[name] = spread[first]
            continue
        pieces: tuple[Piece, ...] = own[name].pieces if name in own else ()
        spread[name] = Spread(
            entry.shape, entry.dtype, ranks_of[name], {piece.box: piece.tensor for piece in pieces}
        )
    return Store(spread, store.tree)
