"""Save plan: the state of all ranks together, which rank writes which shards of it, and its execution.

A checkpoint contains whole tensors. So before it is written, the ranks exchange names, shapes, dtypes and
boxes of their tensors, without values. Then every rank has the content of the checkpoint, and the owners of
each part. Making a plan takes collectives; writing one takes none but the agreement of the ranks, so it can
be written in the background.

[Note: one short exchange]
If all ranks hold the same (plain data parallelism), digests of 64 letters are equal, and nothing else is
sent. Only if digests differ do the ranks send the descriptions themselves. All states of a save share the
exchange, which also contains the small values of each rank.
"""

import hashlib
import json
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch

from colossalai._version import __version__
from colossalai.checkpoint_io._collective import (
    COLLECTIVE,
    Agreement,
    FullDiskError,
    gather,
    results,
)
from colossalai.checkpoint_io._retention import (
    StateFolder,
    look_at,
    make_room,
    make_way,
    next_serial,
    remove_retired,
    retire,
    with_newest,
)
from colossalai.checkpoint_io.formats import (
    WriteItem,
    WriteResult,
    file_of_rank,
    index_of,
    write_items,
    write_sharded_index,
    write_torch,
)
from colossalai.checkpoint_io.resharding import (
    FlatStateDict,
    ShardedStateDict,
    ShardedTensor,
    TensorMetadata,
    with_local_shards,
    with_own_memory,
)
from colossalai.checkpoint_io.storage import (
    MOST_READ,
    FileEntry,
    HostCopies,
    Json,
    Manifest,
    write_manifest,
    write_shared_folder,
)
from colossalai.cluster import DTYPES
from colossalai.tensor import Box

Content: TypeAlias = dict[str, Any]
"""Nested dicts and lists with metadata in place of tensors."""


@dataclass(frozen=True)
class LocalState:
    """State of a model or an optimizer on this rank.

    Attributes:
        content: Returns nested dicts and lists with tensors, or their local shards.
        merge: Makes one content out of those of all ranks, in their order. Of entries that several ranks
            have, the first rank's are taken.
        flatten: Takes a content apart; a tensor has the same name on all ranks.
        join: The inverse of `flatten`.
    """

    content: Callable[[], Content]
    merge: Callable[[Sequence[Mapping[str, Any]]], Content]
    flatten: Callable[[Content], ShardedStateDict]
    join: Callable[[ShardedStateDict], Mapping[str, Any]]


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
        contents = with_local_shards([state.content() for state in states])
        own.extend(state.flatten(content) for state, content in zip(states, contents, strict=True))
        texts.extend(map(_described, own))
        return [hashlib.sha256(text.encode()).hexdigest() for text in texts], value

    digests, found = zip(*results(describe), strict=True)  # the one exchange, of plain values
    differing = [number for number, same in enumerate(zip(*digests, strict=True)) if len(set(same)) > 1]
    # All ranks have compared the same digests, so all of them send descriptions or none does.
    described = gather([texts[number] for number in differing]) if differing else []
    whole = [_held_by_all(state, len(found)) for state in own]
    for place, number in enumerate(differing):
        of_ranks = [_state_dict_of(of_rank[place], rank) for rank, of_rank in enumerate(described)]
        whole[number] = _merged(states[number], own[number], of_ranks)
    return whole, list(found)


def _merged(
    state: LocalState, own: ShardedStateDict, of_ranks: Sequence[ShardedStateDict]
) -> ShardedStateDict:
    """Return the state dict of ranks that hold different tensors, or different shards."""
    tables = [of_rank.tensors for of_rank in of_ranks]
    _refuse_disagreement(tables)  # every rank compares the same, so all of them raise or none
    merged = state.flatten(state.merge([state.join(of_rank) for of_rank in of_ranks]))
    found: dict[int, ShardedTensor] = {}
    for name, tensor in merged.tensors.items():
        if id(tensor) not in found:
            shards = own.tensors[name].shards if name in own.tensors else {}
            held_by = _ranks_of([table[name] for table in tables if name in table])
            found[id(tensor)] = replace(tensor, shards=shards, ranks_of=held_by)
    return FlatStateDict({name: found[id(tensor)] for name, tensor in merged.tensors.items()}, merged.tree)


def _held_by_all(own: ShardedStateDict, num_ranks: int) -> ShardedStateDict:
    """Return the state dict of ranks that hold the same, each all of it."""
    found: dict[int, ShardedTensor] = {}
    for tensor in own.tensors.values():
        # Values that may differ are taken from the first rank; tied names keep one tensor.
        ranks = (0,) if tensor.may_differ else tuple(range(num_ranks))
        found[id(tensor)] = replace(tensor, ranks_of=dict.fromkeys(tensor.shards, ranks))
    return FlatStateDict({name: found[id(tensor)] for name, tensor in own.tensors.items()}, own.tree)


def _described(state: ShardedStateDict) -> str:
    """Return a state dict as JSON: its tree, the row of each tensor, and the rows; no values."""
    numbers: dict[int, int] = {}
    rows: list[Any] = []
    names: dict[str, int] = {}
    for name, tensor in state.tensors.items():
        if id(tensor) not in numbers:
            numbers[id(tensor)] = len(rows)
            dtype = str(tensor.dtype).removeprefix("torch.")
            boxes = [[box.offsets, box.sizes] for box in tensor.shards]
            rows.append([tensor.shape, dtype, boxes, tensor.may_differ])
        names[name] = numbers[id(tensor)]
    return json.dumps([state.tree, names, rows], separators=(",", ":"))


def _state_dict_of(text: str, rank: int) -> ShardedStateDict:
    """Return the state dict described by a rank; its tensors have that rank's boxes."""
    tree, names, rows = json.loads(text)
    tensors = []
    for shape, dtype, boxes, may_differ in rows:
        held = {Box(tuple(offsets), tuple(sizes)): (rank,) for offsets, sizes in boxes}
        tensors.append(ShardedTensor(tuple(shape), DTYPES[dtype], {}, may_differ, held))
    return FlatStateDict({name: tensors[number] for name, number in names.items()}, tree)


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


@dataclass(frozen=True, kw_only=True)
class SavePlan:
    """Content and distribution of a training state to write.

    Attributes:
        path: Its path.
        step: Its step.
        keep_last: Number of training states to keep in the folder.
        states: The flat state dicts, by the name of their folder.
        shares: The items of them that each rank writes.
        small_files: Plain values by the name of the file.
        config: The options of the run, as JSON.
        rank: The rank of this process.
        most: The most bytes that a rank writes at once.
    """

    path: Path
    step: int
    keep_last: int
    states: Mapping[str, FlatStateDict[TensorMetadata]]
    shares: Mapping[str, Sequence[Sequence[WriteItem]]]
    small_files: Mapping[str, object]
    config: Json
    rank: int
    most: int

    @property
    def num_ranks(self) -> int:
        """Number of ranks that write it."""
        return len(next(iter(self.shares.values())))

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum([state.nbytes for state in self.states.values()])


def in_host_memory(plan: SavePlan, copies: HostCopies) -> SavePlan:
    """Return a plan with copies of this rank's tensors, so that training can continue.

    The copies are `copies`' own: their memory is used again by the next save, when this one has been written.
    """
    copies.begin()

    def copied(folder: str, item: WriteItem) -> WriteItem:
        assert isinstance(item.data, torch.Tensor), "a rank writes what it holds"
        return replace(item, data=copies.copy_of(item.data, (folder, item.name, item.box)))

    shares = {
        name: [
            [copied(name, item) for item in items] if owner == plan.rank else items
            for owner, items in enumerate(of)
        ]
        for name, of in plan.shares.items()
    }
    small_files = {name: with_own_memory(content) for name, content in plan.small_files.items()}
    return replace(plan, shares=shares, small_files=small_files)


def write_training_state(plan: SavePlan, agreement: Agreement) -> None:
    """Write a training state and remove older ones; every rank takes part.

    Older ones beyond `plan.keep_last` are removed afterwards, or before if the disk is full.

    Raises:
        OSError: The training state cannot be written; on all ranks.
    """

    def write() -> list[str]:
        names: list[str] = write_shared_folder(
            plan.path,
            num_bytes=plan.num_bytes,
            agreement=agreement,
            write=lambda target: _write_own(target, plan, rank=plan.rank),
            finish=partial(_finish, plan=plan),
            after=partial(retire, folder, keep_last=plan.keep_last),
        )
        return names

    folder = plan.path.parent
    try:
        retired = write()
    except FullDiskError:  # on all ranks, or on none
        if not make_room(
            folder,
            agreement,
            keep_last=plan.keep_last,
            rank=plan.rank,
            num_ranks=plan.num_ranks,
            most=min(MOST_READ, plan.most),
        ):
            raise
        retired = write()
    remove_retired(folder, retired, agreement, num_ranks=plan.num_ranks)


def write_training_state_alone(plan: SavePlan) -> None:
    """Write the items of all ranks in one process; older training states are kept.

    Raises:
        ValueError: The path of the plan holds files that are not a training state.
        OSError: The training state cannot be written.
    """
    make_way(plan.path)
    write_shared_folder(
        plan.path,
        num_bytes=plan.num_bytes,
        agreement=COLLECTIVE,
        write=lambda target: [_write_own(target, plan, rank=rank) for rank in range(plan.num_ranks)],
        finish=lambda target, told: _finish(target, told[0], plan=plan),
    )


def _write_own(target: Path, plan: SavePlan, *, rank: int) -> dict[str, WriteResult]:
    """Write the files of a rank's shards, in folders that the first one to come makes."""
    written = {}
    for name, shares in plan.shares.items():
        (target / name).mkdir(exist_ok=True)
        path = target / name / file_of_rank(rank, len(shares))
        written[name] = write_items(path, shares[rank], most=plan.most)
    return written


def _finish(target: Path, told: Sequence[Mapping[str, Sequence[Any]]], *, plan: SavePlan) -> StateFolder:
    """Write the common files, when all ranks have written: indices, small files, and the manifest last.

    Args:
        target: The folder.
        told: Results of each rank: `WriteResult`s by the folders of the state dicts.
        plan: The plan.

    Returns:
        The content of the folder of training states when `target` is in place. One writer has the folder
        (its lock), so it is read once per save.
    """
    files: dict[str, FileEntry] = {}
    for name, state in plan.states.items():
        results = [WriteResult(*of_rank[name]) for of_rank in told]
        index = index_of(state, plan.shares[name], results, target / name)
        write_sharded_index(target / name, index)
        files |= {f"{name}/{file}": entry for file, entry in index.files.items()}
    for name, content in plan.small_files.items():
        (target / name).parent.mkdir(exist_ok=True)
        write_torch(target / name, content)
    found = look_at(plan.path.parent)
    manifest = Manifest(
        serial=next_serial(found),
        step=plan.step,
        num_ranks=plan.num_ranks,
        versions={"colossalai": __version__, "torch": torch.__version__, "python": platform.python_version()},
        config=plan.config,
        files=files,
    )
    return with_newest(found, plan.path, write_manifest(target, manifest))
