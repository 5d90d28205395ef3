"""A model or an optimizer alone, in a folder to which every rank writes what it holds."""

from pathlib import Path

from colossalai.checkpoint_io._agreement import (
    COLLECTIVE,
    gather,
    global_rank,
    num_ranks,
    on_every_rank,
    on_writer,
)
from colossalai.checkpoint_io._chunk_index import (
    INDEX,
    file_of_rank,
    index_as_text,
    is_of_a_rank,
    read_chunk_index,
)
from colossalai.checkpoint_io._chunk_writing import (
    WRITTEN_CODEC,
    Part,
    Written,
    index_of,
    share_out,
    write_parts,
)
from colossalai.checkpoint_io._staging import shared_folder
from colossalai.checkpoint_io._store import Kind, Store
from colossalai.checkpoint_io._store_writing import total_bytes


def save_slices(path: str | Path, store: Store, kind: Kind) -> None:
    """Write a store in chunks, as the sub-folder of a folder that its kind has a name for; collective.

    Args:
        path: The folder, on a file system that all ranks see.
        store: What the ranks hold.
        kind: What it is.

    Raises:
        ValueError: The sub-folder is there and holds something else, or something cannot be saved.
        OSError: It cannot be written; on all ranks. What was there before is still there.
    """
    target = Path(path) / kind.part
    on_writer(lambda: _refuse_other(target))
    shares = on_every_rank(lambda: share_out(store, num_ranks()))
    own_parts, name = shares[global_rank()], file_of_rank(global_rank(), num_ranks())
    with shared_folder(
        target, num_bytes=total_bytes(store), agreement=COLLECTIVE, keep=_is_of_others
    ) as folder:
        written = gather(on_every_rank(lambda: write_parts(folder / name, own_parts)), WRITTEN_CODEC)
        on_writer(lambda: _write_index(folder, store, shares, written))


def _is_of_others(name: str) -> bool:
    return name != INDEX and not is_of_a_rank(name)


def is_of_slices(folder: Path) -> bool:
    """Return whether a folder is one that `save_slices` has written."""
    return (folder / INDEX).is_file()


def _refuse_other(target: Path) -> None:
    if target.is_dir() and any(target.iterdir()) and not is_of_slices(target):
        raise ValueError(f"{target} is there and is not a checkpoint in slices, which would replace it")


def _write_index(folder: Path, store: Store, shares: list[list[Part]], written: list[Written]) -> None:
    (folder / INDEX).write_text(index_as_text(index_of(store, shares, written)), encoding="utf-8")
    read_chunk_index(folder)  # as a reader would: files there and as large as they should be
