"""Save plan of a training state: what is to be written, and which rank writes what of it.

To make one takes collectives; to write one takes none but the agreement of the ranks, so it can be written in
the background.
"""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from colossalai._version import __version__
from colossalai.checkpoint_io._collective import COLLECTIVE, Agreement, FullDiskError, global_rank
from colossalai.checkpoint_io._retention import make_room, make_way, next_serial, remove_retired, retire
from colossalai.checkpoint_io._state import FlatStateDict
from colossalai.checkpoint_io.formats import (
    WriteItem,
    WriteResult,
    file_of_rank,
    index_of,
    write_items,
    write_sharded_index,
    write_torch,
)
from colossalai.checkpoint_io.resharding import TensorMetadata, with_own_memory
from colossalai.checkpoint_io.storage import (
    DEFAULT_BUFFER_MB,
    FileEntry,
    HostCopies,
    Json,
    Manifest,
    write_manifest,
    write_shared_folder,
)


@dataclass(frozen=True, kw_only=True)
class SavePlan:
    """What is to be written.

    Attributes:
        path: Where.
        step: The step it is of.
        keep_last: How many training states stay in the folder.
        states: The flat state dicts, by the name of their folder.
        shares: What each rank writes of them.
        small_files: Plain values by the name of the file.
        config: The options of the run, as JSON.
        buffer_size: The memory, in MB, that writing may take on a rank.
    """

    path: Path
    step: int
    keep_last: int
    states: Mapping[str, FlatStateDict[TensorMetadata]]
    shares: Mapping[str, Sequence[Sequence[WriteItem]]]
    small_files: Mapping[str, object]
    config: Json
    buffer_size: float = DEFAULT_BUFFER_MB

    @property
    def num_ranks(self) -> int:
        """Number of ranks that write it."""
        return len(next(iter(self.shares.values())))

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(state.nbytes for state in self.states.values())


def in_host_memory(plan: SavePlan, copies: HostCopies) -> SavePlan:
    """Return a plan with copies of what this rank writes, so that training can go on.

    The copies are `copies`' own: their memory is used again by the next save, when this one has been written.
    """
    rank = global_rank()
    copies.begin()

    def copied(folder: str, item: WriteItem) -> WriteItem:
        assert isinstance(item.data, torch.Tensor), "a rank writes what it holds"
        return replace(item, data=copies.copy_of(item.data, (folder, item.name, item.box)))

    shares = {
        name: [
            [copied(name, item) for item in items] if owner == rank else items
            for owner, items in enumerate(of)
        ]
        for name, of in plan.shares.items()
    }
    small_files = {name: with_own_memory(content) for name, content in plan.small_files.items()}
    return replace(plan, shares=shares, small_files=small_files)


def write_training_state(plan: SavePlan, agreement: Agreement) -> None:
    """Write a training state and remove older ones; every rank takes part.

    Older ones that `plan.keep_last` does not keep are removed afterwards, or before if the disk is full.

    Raises:
        OSError: The training state cannot be written; on all ranks.
    """

    def write() -> list[str]:
        names: list[str] = write_shared_folder(
            plan.path,
            num_bytes=plan.num_bytes,
            agreement=agreement,
            write=lambda target: _write_own(target, plan, rank=agreement.rank),
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
            num_ranks=plan.num_ranks,
            buffer_size=plan.buffer_size,
        ):
            raise
        retired = write()
    remove_retired(folder, retired, agreement, num_ranks=plan.num_ranks)


def write_training_state_alone(plan: SavePlan) -> None:
    """Write in one process what all ranks would write; older training states stay as they are.

    Raises:
        ValueError: The path of the plan holds files that are no training state.
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
        path = target / name / file_of_rank(rank, plan.num_ranks)
        written[name] = write_items(path, shares[rank], buffer_size=plan.buffer_size)
    return written


def _finish(target: Path, told: Sequence[Mapping[str, Sequence[Any]]], *, plan: SavePlan) -> None:
    """Write what there is once, when all ranks have written: indices, small files, and the manifest last.

    Args:
        target: The folder.
        told: What each rank has told of its files: `WriteResult`s by the folders of the state dicts.
        plan: What is written.
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
    manifest = Manifest(
        serial=next_serial(plan.path.parent),
        step=plan.step,
        num_ranks=plan.num_ranks,
        versions={"colossalai": __version__, "torch": torch.__version__, "python": platform.python_version()},
        config=plan.config,
        files=files,
    )
    write_manifest(target, manifest)
