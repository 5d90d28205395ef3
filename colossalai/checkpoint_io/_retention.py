"""Retention of training states: the newest complete one of a folder, and the removal of older ones.

Order is the order of saving, kept as a serial number in each manifest. Steps would not do: a run that goes
back to an earlier step saves smaller ones, and clocks of different machines disagree.

[Note: removed folders]
Only folders made by a save are removed: a real folder, in this folder, of our name, with an intact manifest
and all the files that it lists. Other entries with such a name (a link, a file, a folder of another origin, a
damaged state, which can be the rest of a run) are kept, do not count, and are named in a warning. Hidden
folders are removed only if they have the name of a writer's own and contain nothing but our parts.

This happens after a save. If its disk is full it happens before, too. Then the last good state may be any of
them, so the newest whose files match their checksums is found, and only older ones go.
"""

import os
import re
import secrets
import shutil
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from colossalai.checkpoint_io._collective import Agreement
from colossalai.checkpoint_io.formats import ShardedIndex, read_sharded_index
from colossalai.checkpoint_io.storage import (
    INDEX,
    MANIFEST,
    MODEL_FOLDER,
    MOST_READ,
    OPTIMIZER_FOLDER,
    RANDOM_FOLDER,
    SMALL_FILE,
    FileEntry,
    Manifest,
    first_misfit,
    listed,
    random_file,
    read_manifest,
    verify_files,
)
from colossalai.logging import get_dist_logger
from colossalai.monitor import still_moving

_OURS = re.compile(r"step-\d{8,}")
_LEFTOVER = re.compile(r"\.step-\d{8,}\.(new|old)-[0-9a-f]+")
_ENTRIES = {MANIFEST, SMALL_FILE, RANDOM_FOLDER, MODEL_FOLDER, OPTIMIZER_FOLDER}
_HOW = "`colossalai checkpoint verify {}` tells what is wrong"


@dataclass(frozen=True)
class CheckedState:
    """A training state of which the manifest, the files and the indices fit each other.

    Attributes:
        path: Its path.
        manifest: Its manifest.
        indices: Those of its sharded folders, by the name of the folder.
    """

    path: Path
    manifest: Manifest
    indices: dict[str, ShardedIndex]


@dataclass(frozen=True)
class StateFolder:
    """Content of a folder of training states.

    Attributes:
        states: Folders with an intact manifest, the newest first. Hidden folders are last: one is complete if
            its writer was killed just before the rename, but its writer can also be about to rename it.
        damaged: Other entries with the name of a training state, or a manifest; with the reason.
    """

    states: tuple[tuple[Path, Manifest], ...]
    damaged: dict[Path, str]


def step_folder(step: int) -> str:
    """Return the name of the training state of a step."""
    return f"step-{step:08d}"


def look_at(folder: Path) -> StateFolder:
    """Return the content of a folder; only the manifests of the states are read.

    Raises:
        OSError: The folder cannot be read.
    """
    states: list[tuple[Path, Manifest]] = []
    damaged: dict[Path, str] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        try:
            if (path / MANIFEST).is_file():
                states.append((path, read_manifest(path)))
            elif _OURS.fullmatch(path.name):
                damaged[path] = f"{path / MANIFEST} is missing" if path.is_dir() else f"{path} is no folder"
        except (ValueError, OSError) as error:
            if _OURS.fullmatch(path.name) or _has_tensors(path):
                damaged[path] = str(error)
    states.sort(key=lambda item: (not item[0].name.startswith("."), item[1].serial), reverse=True)
    return StateFolder(tuple(states), damaged)


def next_serial(found: StateFolder) -> int:
    """Return a serial number above those of all training states in a folder."""
    return 1 + max([manifest.serial for _, manifest in found.states], default=0)


def with_newest(found: StateFolder, path: Path, manifest: Manifest) -> StateFolder:
    """Return the content of a folder after a training state has been saved in it."""
    others = (state for state in found.states if state[0] != path)
    damaged = {other: problem for other, problem in found.damaged.items() if other != path}
    return StateFolder(((path, manifest), *others), damaged)


def candidates(folder: Path) -> list[str]:
    """Return the names of training states that can be complete, the newest first; warn of damaged ones.

    Raises:
        OSError: The folder cannot be read.
    """
    found = look_at(folder)
    for path, problem in found.damaged.items():
        _warn_of(path, problem)
    return [path.name for path, _ in found.states]


def newest_complete(
    folder: Path,
    names: list[str],
    agreement: Agreement,
    *,
    rank: int,
    num_ranks: int,
    most: int = MOST_READ,
) -> CheckedState | None:
    """Return the first training state whose files all match its manifest, or None; collective.

    Every rank reads its part of the files.

    Args:
        folder: The folder of training states.
        names: The names in it that `candidates` returned on the writer.
        agreement: Exchange of the ranks; one for each candidate.
        rank: The rank of this process.
        num_ranks: Number of ranks.
        most: The most bytes that are read at once.
    """
    for name in names:
        path, state, misfit = folder / name, None, None
        try:
            state = check_state(path, part=rank, num_parts=num_ranks, most=most)
        except (ValueError, OSError) as error:
            misfit = str(error)
        # A state has to be valid on all ranks: one that a rank cannot read is used by none.
        first = next(filter(None, agreement.gather(misfit)), None)
        if first is None:
            return state
        _warn_of(path, first)
    return None


def check_state(
    path: Path, *, part: int = 0, num_parts: int = 1, is_verified: bool = False, most: int = MOST_READ
) -> CheckedState:
    """Read the manifest of a training state and compare it with its files.

    Args:
        path: The training state.
        part: Index of this reader among those that share the checksums.
        num_parts: Number of readers.
        is_verified: Whether to leave the checksums out.
        most: The most bytes that are read at once.

    Raises:
        ValueError: The manifest or an index is damaged, a file is missing or differs, or one is read for
            which the manifest does not vouch.
        OSError: A file cannot be read.
    """
    manifest = read_manifest(path)
    if not is_verified:
        verify_files(path, manifest.files, listed_in=MANIFEST, part=part, num_parts=num_parts, most=most)
    named: dict[str, FileEntry | None] = {
        random_file(rank, manifest.num_ranks): None
        for rank in range(min(manifest.num_ranks, 1 + len(manifest.files)))
    }
    folders = [folder for folder in (MODEL_FOLDER, OPTIMIZER_FOLDER) if (path / folder).exists()]
    indices = {folder: read_sharded_index(path / folder, most=most) for folder in folders}
    for folder, index in indices.items():
        named[f"{folder}/{INDEX}"] = None
        named |= {f"{folder}/{name}": entry for name, entry in index.files.items()}
    strange = [
        name
        for name, entry in named.items()
        if name not in manifest.files or entry not in (None, manifest.files[name])
    ]
    if strange:
        raise ValueError(f"{path / MANIFEST} does not list {listed(strange)} as it should")
    return CheckedState(path, manifest, indices)


def refuse_lost(folder: Path) -> None:
    """Raise if there is a training state that is not complete, or several are: they should not be missed.

    Args:
        folder: The path to resume from, in which none was found.

    Raises:
        ValueError: `folder` is a file or an incomplete training state, or holds only incomplete ones.
        FileNotFoundError: `folder` has the name of a training state, and is not there.
    """
    if not folder.exists():
        if _OURS.fullmatch(folder.name):
            raise FileNotFoundError(2, "there is no such training state", str(folder))
        return
    if not folder.is_dir():
        raise ValueError(f"{folder} is a file: give a folder of training states, or one of them")
    if _OURS.fullmatch(folder.name) or is_like_a_state(folder):
        raise ValueError(
            f"{folder / MANIFEST} is missing, without which this is no complete training state: give the "
            f"folder that it is in, to go on from another one"
        )
    ours = sorted(entry.name for entry in folder.iterdir() if _OURS.fullmatch(entry.name))
    if ours:
        raise ValueError(
            f"{folder} holds {listed(ours)}, of which none is a complete training state (the warnings say "
            f"why): move them away to begin anew"
        )


def make_way(path: Path) -> None:
    """See that a training state can be saved at a path; a damaged one there is moved aside.

    Raises:
        ValueError: `path` is a link, or holds files that are not a training state.
        OSError: `path` cannot be read or moved.
    """
    if path.is_symlink():
        raise ValueError(
            f"{path} is a link, and what it leads to would be replaced: remove it, or save somewhere else"
        )
    if not path.exists():
        return
    if not path.is_dir() or not _is_ours_or_empty(path):
        raise ValueError(
            f"{path} is there and is no training state, which would replace it: move it, or save somewhere "
            f"else"
        )
    if any(path.iterdir()) and (problem := _quick_misfit(path)) is not None:
        aside = path.with_name(f"{path.name}.damaged-{secrets.token_hex(4)}")
        path.rename(aside)
        get_dist_logger().warning(f"{path} is damaged and now called {aside.name}: {problem}")


def retire(folder: Path, found: StateFolder, *, keep_last: int, good: Path | None = None) -> list[str]:
    """Hide all but the newest training states; on the writer, before any rank removes a file.

    See [Note: removed folders].

    Args:
        folder: The folder of training states.
        found: Its content.
        keep_last: Number of the newest states to keep.
        good: A state to keep, with all newer ones.

    Returns:
        The hidden names, and those of the folders that killed writers left.
    """
    retired = []
    for path in _surplus(folder, found, keep_last=keep_last, good=good):
        is_hidden = path.name.startswith(".")
        aside = path if is_hidden else path.rename(path.with_name(f".{path.name}.old-{secrets.token_hex(4)}"))
        (aside / MANIFEST).unlink(missing_ok=True)
        retired.append(aside.name)
    return retired


def remove_retired(folder: Path, names: list[str], agreement: Agreement, *, num_ranks: int) -> None:
    """Remove folders of hidden names; every rank takes part, as removing large files takes time."""
    if not names:  # on all ranks: they have the names from the writer
        return
    retired = [folder / name for name in names]
    # The outcome of all ranks: the writer removes the folders when they are empty.
    agreement.on_every_rank(partial(_remove_files, retired, part=agreement.rank, num_parts=num_ranks))
    agreement.on_writer(partial(_remove_folders, retired))


def make_room(
    folder: Path, agreement: Agreement, *, keep_last: int, rank: int, num_ranks: int, most: int
) -> bool:
    """Remove older states before a save instead of after it, if the disk has no room.

    Every rank takes part. The newest complete state, its checksums compared, and all newer ones stay.

    Returns:
        Whether anything was removed, on every rank.
    """
    if not agreement.from_writer(lambda: bool(_surplus(folder, look_at(folder), keep_last=keep_last))):
        return False
    found = agreement.from_writer(partial(candidates, folder))
    newest = newest_complete(folder, found, agreement, rank=rank, num_ranks=num_ranks, most=most)
    if newest is None:
        return False
    names = agreement.from_writer(
        lambda: retire(folder, look_at(folder), keep_last=keep_last, good=newest.path)
    )
    remove_retired(folder, names, agreement, num_ranks=num_ranks)
    if names and rank == 0:
        get_dist_logger().info(
            f"the disk of {folder} is full: removed {len(names)} folders that keep_last={keep_last} does not "
            f"keep"
        )
    return bool(names)


def _warn_of(path: Path, problem: str) -> None:
    get_dist_logger().warning(f"passing over {path}: {problem}; {_HOW.format(path)}", ranks=[0])


def _quick_misfit(path: Path) -> str | None:
    """Return the problem of a state, judged by its manifest and the sizes of its files; None without one."""
    try:
        return first_misfit(path, read_manifest(path))
    except (ValueError, OSError) as error:
        return str(error)


def _is_ours_or_empty(path: Path) -> bool:
    """Return whether a folder contains only parts of a training state, damaged or not."""
    return {entry.name for entry in path.iterdir()} <= _ENTRIES or _quick_misfit(path) is None


def is_like_a_state(path: Path) -> bool:
    """Return whether a folder has the manifest or the other parts of a training state, intact or not."""
    parts = (path / SMALL_FILE, path / MODEL_FOLDER / INDEX)
    return os.path.isfile(path / MANIFEST) or all(map(os.path.isfile, parts))


def _has_tensors(path: Path) -> bool:
    return os.path.isfile(path / MODEL_FOLDER / INDEX)  # other programs write a manifest.json, too


def _surplus(folder: Path, found: StateFolder, *, keep_last: int, good: Path | None = None) -> list[Path]:
    """Return the folders to remove: older training states, and leftovers of killed writers."""
    complete, damaged = [], dict(found.damaged)
    for path, manifest in found.states:
        if not _OURS.fullmatch(path.name):
            continue
        problem = f"{path} is a link" if path.is_symlink() else first_misfit(path, manifest)
        if problem is None:
            complete.append(path)
        else:
            damaged[path] = problem
    for path, problem in damaged.items():
        if _OURS.fullmatch(path.name):
            get_dist_logger().log_once(
                f"{path} stays and does not count in keep_last, as it is no complete training state of ours: "
                f"{problem}; {_HOW.format(path)}"
            )
    if good is not None:
        keep_last = max(keep_last, complete.index(good) + 1 if good in complete else len(complete))
    return [*(path for path in _leftovers(folder) if path != good), *complete[keep_last:]]


def _leftovers(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir() if folder.is_dir() else ():
        is_one = _LEFTOVER.fullmatch(path.name) and path.is_dir() and not path.is_symlink()
        if is_one and {entry.name for entry in path.iterdir()} <= _ENTRIES:
            yield path


def _remove_files(folders: list[Path], *, part: int, num_parts: int) -> None:
    """Remove this rank's part of the files; a link is removed itself, not its target."""
    for path in [path for folder in folders for path in folder.rglob("*")]:
        # By name and not by position: other ranks are removing their files, and each lists the remaining
        # ones.
        is_own = zlib.crc32(path.name.encode(errors="surrogateescape")) % num_parts == part
        if is_own and (path.is_symlink() or not path.is_dir()):
            path.unlink(missing_ok=True)
            still_moving()


def _remove_folders(folders: list[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder)
