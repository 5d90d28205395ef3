"""Global save plan: what all ranks hold together, where each holds other tensors, or other shards of them.

A checkpoint is of the whole. So before it is written, the ranks tell each other what they hold: names,
shapes, dtypes and boxes, no values. Then every rank knows the content of the checkpoint, and who has which
part of it.

[Note: one short exchange]
Where all ranks hold the same (plain data parallelism), digests of 64 letters are equal, and nothing else is
sent. Only where digests differ do the ranks send the descriptions themselves. All states of a save share the
exchange, and the small values of each rank travel with it.
"""

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar

import torch
from torch import nn

from colossalai.checkpoint_io._collective import gather, results
from colossalai.checkpoint_io._state import FlatStateDict, ShardedStateDict
from colossalai.checkpoint_io.resharding import ShardedTensor, pack, unpack, with_local_shards
from colossalai.checkpoint_io.storage import of_kind
from colossalai.tensor import CHECKPOINT_PREFIX, CHECKPOINT_TIED_NAMES, Box

T = TypeVar("T")
Content: TypeAlias = dict[str, Any]
"""Nested dicts and lists with what stands for tensors."""


@dataclass(frozen=True)
class LocalState:
    """State of a model or an optimizer on this rank.

    Attributes:
        content: Returns nested dicts and lists with tensors, or their local shards.
        merge: Makes one content out of those of all ranks, in their order. Of entries that several ranks
            have, the first rank's are taken.
        flatten: Takes a content apart; a tensor has the same name on all ranks.
    """

    content: Callable[[], Content]
    merge: Callable[[Sequence[Content]], Content]
    flatten: Callable[[Content], ShardedStateDict]


def gather_states(
    *states: LocalState, values: Callable[[], Any] = lambda: None
) -> tuple[list[ShardedStateDict], list[Any]]:
    """Return each state over all ranks as a flat state dict, and the values of all ranks; collective.

    See [Note: one short exchange].

    Args:
        *states: The states, as many on all ranks.
        values: Returns a plain value, which is sent along with the digests. It is called first.

    Raises:
        ValueError: `values` or the content of a state raises it on some rank, or tensors of one name have
            other shapes or dtypes on other ranks; on all ranks.
    """
    texts: list[str] = []
    own: list[ShardedStateDict] = []

    def describe() -> tuple[list[str], Any]:
        value = values()
        for state in states:
            content = with_local_shards(state.content())
            texts.append(_described(content))
            own.append(state.flatten(content))
        return [hashlib.sha256(text.encode()).hexdigest() for text in texts], value

    digests, found = zip(*results(describe), strict=True)  # the one exchange, of plain values
    differing = [number for number, same in enumerate(zip(*digests, strict=True)) if len(set(same)) > 1]
    # All ranks have compared the same digests, so all of them send descriptions or none does.
    described = gather([texts[number] for number in differing]) if differing else []
    whole = [_held_by_all(state, len(found)) for state in own]
    for place, number in enumerate(differing):
        contents = [_content_of(of_rank[place], rank) for rank, of_rank in enumerate(described)]
        whole[number] = _merged(states[number], own[number], contents)
    return whole, list(found)


def _merged(state: LocalState, own: ShardedStateDict, contents: Sequence[Content]) -> ShardedStateDict:
    """Return the state dict of ranks that hold different tensors, or different shards."""
    tables = [state.flatten(content).tensors for content in contents]
    _refuse_disagreement(tables)  # every rank compares the same, so all of them raise or none
    merged = state.flatten(state.merge(contents))
    found: dict[int, ShardedTensor] = {}
    for name, tensor in merged.tensors.items():
        if id(tensor) not in found:
            shards = own.tensors[name].shards if name in own.tensors else {}
            held_by = _ranks_of([table[name] for table in tables if name in table])
            found[id(tensor)] = replace(tensor, shards=shards, ranks_of=held_by)
    return FlatStateDict({name: found[id(tensor)] for name, tensor in merged.tensors.items()}, merged.tree)


def names_elsewhere(own_names: Callable[[], Sequence[Collection[str]]]) -> list[frozenset[str]]:
    """Return of each list the names that other ranks hold and this one does not; collective.

    See [Note: one short exchange].

    Args:
        own_names: Gives the lists of this rank, as many on all.

    Raises:
        ValueError: `own_names` raises it on some rank; on all ranks.
    """
    lists: list[list[str]] = []

    def digest() -> str:
        lists.extend(list(names) for names in own_names())
        return hashlib.sha256(json.dumps(lists).encode()).hexdigest()

    if len(set(results(digest))) == 1:
        return [frozenset() for _ in lists]
    everywhere = gather(lists)
    return [
        frozenset(name for lists_of_rank in everywhere for name in lists_of_rank[number]) - set(names)
        for number, names in enumerate(lists)
    ]


def merge_by_name(parts: Iterable[Mapping[str, T]]) -> dict[str, T]:
    """Return the entries of all parts; of several with one name the first."""
    merged: dict[str, T] = {}
    for part in parts:
        for name, value in part.items():
            merged.setdefault(name, value)
    return merged


def set_prefix(module: nn.Module, prefix: str) -> None:
    """Let names in checkpoints start with a text, where other ranks use the same names for other things."""
    setattr(module, CHECKPOINT_PREFIX, prefix)


def prefix_of(module: nn.Module) -> str:
    """Return the text that `set_prefix` has set."""
    prefix: str = getattr(module, CHECKPOINT_PREFIX, "")
    return prefix


def set_tied_names(param: nn.Parameter, names: Sequence[str]) -> None:
    """Let a parameter know its names in the whole model, on whatever ranks; the first counts."""
    setattr(param, CHECKPOINT_TIED_NAMES, tuple(names))


def tied_names(tensor: object) -> tuple[str, ...]:
    """Return the names that `set_tied_names` has set."""
    return getattr(tensor, CHECKPOINT_TIED_NAMES, ())


def _held_by_all(own: ShardedStateDict, num_ranks: int) -> ShardedStateDict:
    """Return the state dict of ranks that hold the same, each all of it."""
    found: dict[int, ShardedTensor] = {}
    for tensor in own.tensors.values():
        # Values that may differ are taken from the first rank; tied names keep one tensor.
        ranks = (0,) if tensor.may_differ else tuple(range(num_ranks))
        found[id(tensor)] = replace(tensor, ranks_of=dict.fromkeys(tensor.shards, ranks))
    return FlatStateDict({name: found[id(tensor)] for name, tensor in own.tensors.items()}, own.tree)


def _described(content: Content) -> str:
    """Return a content as JSON: its tree, the name of each tensor's row, and the rows; no values."""
    tree, tensors = pack(content)
    numbers: dict[int, int] = {}
    rows: list[Any] = []
    names: dict[str, int] = {}
    for name, tensor in tensors.items():
        assert isinstance(tensor, ShardedTensor), "local shards stand for all tensors"
        if id(tensor) not in numbers:
            numbers[id(tensor)] = len(rows)
            dtype = str(tensor.dtype).removeprefix("torch.")
            boxes = [[box.offsets, box.sizes] for box in tensor.shards]
            rows.append([tensor.shape, dtype, boxes, tensor.may_differ])
        names[name] = numbers[id(tensor)]
    return json.dumps([tree, names, rows], separators=(",", ":"))


def _content_of(text: str, rank: int) -> Content:
    """Return the content that a rank has described; its tensors say which boxes that rank holds."""
    tree, names, rows = json.loads(text)
    tensors = []
    for shape, dtype, boxes, may_differ in rows:
        held = {Box(tuple(offsets), tuple(sizes)): (rank,) for offsets, sizes in boxes}
        found = getattr(torch, dtype)
        if not isinstance(found, torch.dtype):
            raise ValueError(f"there is no dtype {dtype!r}")
        tensors.append(ShardedTensor(tuple(shape), found, {}, may_differ, held))
    content = unpack(tree, {name: tensors[number] for name, number in names.items()})
    return of_kind(content, dict, "content")


def _ranks_of(tensors: Sequence[ShardedTensor]) -> dict[Box, tuple[int, ...]]:
    """Return for each box the ranks whose values of it can be saved; tensors are in the order of ranks."""
    ranks: dict[Box, tuple[int, ...]] = {}
    for tensor in tensors:
        for box, holding in tensor.ranks_of.items():
            if box not in ranks or not tensor.may_differ:
                ranks[box] = ranks.get(box, ()) + holding
    return ranks


def _refuse_disagreement(tables: Sequence[Mapping[str, ShardedTensor]]) -> None:
    """Refuse tensors of one name that are of other shapes or dtypes on other ranks; the same on all ranks."""
    first: dict[str, tuple[int, ShardedTensor]] = {}
    for rank, table in enumerate(tables):
        for name, tensor in table.items():
            other_rank, other = first.setdefault(name, (rank, tensor))
            if (tensor.shape, tensor.dtype) != (other.shape, other.dtype):
                raise ValueError(
                    f"{name} is {other.shape} {other.dtype} on rank {other_rank} and {tensor.shape} "
                    f"{tensor.dtype} on rank {rank}: parts of one tensor must agree, other tensors need "
                    f"other names"
                )
