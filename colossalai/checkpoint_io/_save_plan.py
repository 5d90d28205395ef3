"""A training state on its way to disk: what is to be written, and which rank writes what of it.

To make one takes collectives; to write one takes none but the agreement of the ranks, so it can be written in
the background.
"""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from colossalai._version import __version__
from colossalai.checkpoint_io._collective import COLLECTIVE, Agreement, global_rank
from colossalai.checkpoint_io._retention import make_way, next_serial, prune
from colossalai.checkpoint_io._state import Store
from colossalai.checkpoint_io._streaming import DEFAULT_BUFFER_MB
from colossalai.checkpoint_io.formats import (
    INDEX,
    WRITTEN_CODEC,
    Part,
    Written,
    file_of_rank,
    index_as_text,
    index_of,
    read_chunk_index,
    total_bytes,
    write_parts,
    write_torch,
)
from colossalai.checkpoint_io.resharding import with_own_memory
from colossalai.checkpoint_io.storage import (
    FileEntry,
    HostCopies,
    Manifest,
    clear_os_errors,
    shared_folder,
    write_manifest,
)


@dataclass(frozen=True, kw_only=True)
class Draft:
    """What is to be written.

    Attributes:
        path: Where.
        step: The step it is of.
        keep_last: How many training states stay in the folder.
        stores: The large parts, by the name of their folder.
        shares: What each rank writes of them.
        small_files: Plain values by the name of the file.
        config: The options of the run, as JSON.
        buffer_size: The memory, in MB, that writing may take on a rank.
    """

    path: Path
    step: int
    keep_last: int
    stores: Mapping[str, Store]
    shares: Mapping[str, Sequence[Sequence[Part]]]
    small_files: Mapping[str, Any]
    config: Any
    buffer_size: float = DEFAULT_BUFFER_MB

    @property
    def num_ranks(self) -> int:
        """Number of ranks that write it."""
        return len(next(iter(self.shares.values())))


def in_host_memory(draft: Draft, copies: HostCopies) -> Draft:
    """Return a draft with copies of what this rank writes, so that training can go on."""
    rank = global_rank()
    copies.begin()

    def copied(folder: str, part: Part) -> Part:
        assert isinstance(part.tensor, torch.Tensor), "a rank writes what it holds"
        return replace(part, tensor=copies.copy_of(part.tensor, (folder, part.name, part.box)))

    shares = {
        name: [
            [copied(name, part) for part in parts] if owner == rank else parts
            for owner, parts in enumerate(of)
        ]
        for name, of in draft.shares.items()
    }
    small_files = {name: with_own_memory(content) for name, content in draft.small_files.items()}
    return replace(draft, shares=shares, small_files=small_files)


def write_draft(draft: Draft, agreement: Agreement) -> None:
    """Write a training state and remove older ones; every rank takes part.

    Raises:
        OSError: It cannot be written; on all ranks.
    """
    num_bytes = sum(total_bytes(store) for store in draft.stores.values())
    with shared_folder(draft.path, num_bytes=num_bytes, agreement=agreement) as target:
        agreement.on_writer(lambda: _make_folders(target, draft))
        # Here, and not only around the folder: it is this error that the other ranks are told.
        clear = clear_os_errors(draft.path.resolve(), num_bytes)
        written = agreement.on_every_rank(lambda: clear(_write_own)(target, draft, rank=agreement.rank))
        of_all_ranks = agreement.gather(written, WRITTEN_CODEC)
        agreement.on_writer(lambda: clear(_finish)(target, draft, of_all_ranks))
    prune(draft.path.parent, agreement, keep_last=draft.keep_last)


def write_draft_alone(draft: Draft) -> None:
    """Write in one process what all ranks would write; older training states stay as they are.

    Raises:
        ValueError: There is something at its place that is no training state.
        OSError: It cannot be written.
    """
    make_way(draft.path)
    num_bytes = sum(total_bytes(store) for store in draft.stores.values())
    with shared_folder(draft.path, num_bytes=num_bytes, agreement=COLLECTIVE) as target:
        clear = clear_os_errors(draft.path.resolve(), num_bytes)
        clear(_make_folders)(target, draft)
        written = [clear(_write_own)(target, draft, rank=rank) for rank in range(draft.num_ranks)]
        clear(_finish)(target, draft, written)


def _make_folders(target: Path, draft: Draft) -> None:
    for name in {*draft.stores, *(str(Path(file).parent) for file in draft.small_files)}:
        (target / name).mkdir(exist_ok=True)


def _write_own(target: Path, draft: Draft, *, rank: int) -> dict[str, Written]:
    return {
        name: write_parts(
            target / name / file_of_rank(rank, draft.num_ranks), shares[rank], buffer_size=draft.buffer_size
        )
        for name, shares in draft.shares.items()
    }


def _finish(target: Path, draft: Draft, written: Sequence[Mapping[str, Written]]) -> None:
    """Write what there is once, when all ranks have written: indices, small files, and the manifest last."""
    files: dict[str, FileEntry] = {}
    for name, store in draft.stores.items():
        index = index_of(store, draft.shares[name], [of_rank[name] for of_rank in written])
        (target / name / INDEX).write_text(index_as_text(index), encoding="utf-8")
        read_chunk_index(target / name)  # as a reader would: files there and as large as they should be
        files |= {f"{name}/{file}": entry for file, entry in index.files.items()}
    for name, content in draft.small_files.items():
        write_torch(target / name, content)
    manifest = Manifest(
        serial=next_serial(draft.path.parent),
        step=draft.step,
        num_ranks=draft.num_ranks,
        versions=_versions(),
        config=draft.config,
        files=files,
    )
    write_manifest(target, manifest)


def _versions() -> dict[str, str]:
    return {"colossalai": __version__, "torch": torch.__version__, "python": platform.python_version()}
