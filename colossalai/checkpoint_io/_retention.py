"""A folder of training states: which is the newest complete one, and which go.

Order is the order of saving, kept as a serial number in each manifest. Steps would not do: a run that goes
back to an earlier step saves smaller ones, and clocks of different machines disagree.

[Note: what is removed]
Only what a save of ours has made: a real folder, in this folder, of our name, with an intact manifest, and
all the files that it lists. What has the name and is not that (a link, a file, a folder of somebody else, a
damaged state, which may be what is left of a run) stays, is not counted, and is named in a warning. Of hidden
folders only those go that have the name of a writer's own and nothing but our parts in them.
"""

import os
import re
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from colossalai.checkpoint_io._collective import Agreement
from colossalai.checkpoint_io._load_report import listed
from colossalai.checkpoint_io._streaming import DEFAULT_BUFFER_MB
from colossalai.checkpoint_io.formats import INDEX, read_chunk_index
from colossalai.checkpoint_io.storage import (
    MANIFEST,
    FileEntry,
    Manifest,
    first_misfit,
    read_manifest,
    verify_files,
)
from colossalai.logging import get_dist_logger
from colossalai.monitor import still_moving

_OURS = re.compile(r"step-\d{8,}")
_LEFTOVER = re.compile(r"\.step-\d{8,}\.(new|old)-[0-9a-f]+")
_ENTRIES = {MANIFEST, "parts.pt", "random", "model", "optimizer"}
_HOW = "`colossalai checkpoint verify {}` tells what is wrong"


@dataclass(frozen=True)
class Shelf:
    """What is in a folder of training states.

    Attributes:
        states: What has an intact manifest, the newest first. Hidden folders come last: one is complete if
            its writer was killed just before it renamed it, but it may be that its writer is about to do so.
        damaged: What has the name of a training state, or a manifest, and is none; and why.
    """

    states: tuple[tuple[Path, Manifest], ...]
    damaged: dict[Path, str]


def step_folder(step: int) -> str:
    """Return the name of the training state of a step."""
    return f"step-{step:08d}"


def look_at(folder: Path) -> Shelf:
    """Return what is in a folder; of the states only the manifests are read.

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
    return Shelf(tuple(states), damaged)


def next_serial(folder: Path) -> int:
    """Return a serial number above those of all training states in a folder."""
    return 1 + max((manifest.serial for _, manifest in look_at(folder).states), default=0)


def newest_complete(
    folder: Path, agreement: Agreement, *, num_ranks: int, buffer_size: float = DEFAULT_BUFFER_MB
) -> Path | None:
    """Return the newest training state in a folder whose files are all as its manifest says, or None.

    Every rank takes part, and reads its part of the files.

    Raises:
        OSError: The folder cannot be read.
    """
    check = partial(_misfit, num_parts=num_ranks, buffer_size=buffer_size)
    candidates = agreement.gather(agreement.on_writer(lambda: _candidates(folder)))[0]
    for name in candidates or []:
        path = folder / name
        misfits = agreement.gather(check(path, part=agreement.rank))
        first = next(filter(None, misfits), None)
        if first is None:
            return path
        _warn_of(path, first)
    return None


def refuse_lost(folder: Path) -> None:
    """Raise if there is a training state that is not complete, or several are: they should not be missed.

    Args:
        folder: What a run is to go on from, in which none was found.

    Raises:
        ValueError: The path is such a state, or a file, or only such states are in it.
        FileNotFoundError: It has the name of a training state, and is not there.
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


def refuse_unlisted(path: Path, manifest: Manifest) -> None:
    """Raise unless a manifest vouches for every file that is read of a training state.

    Raises:
        ValueError: The indices or the number of ranks name a file that it does not list as they do.
        OSError: An index cannot be read.
    """
    named: dict[str, FileEntry | None] = {
        f"random/{rank:05d}-of-{manifest.num_ranks:05d}.pt": None
        for rank in range(min(manifest.num_ranks, 1 + len(manifest.files)))
    }
    for part in ("model", "optimizer"):
        if (path / part).exists():
            named[f"{part}/{INDEX}"] = None
            named |= {f"{part}/{name}": entry for name, entry in read_chunk_index(path / part).files.items()}
    strange = [
        name
        for name, entry in named.items()
        if name not in manifest.files or entry not in (None, manifest.files[name])
    ]
    if strange:
        raise ValueError(f"{path / MANIFEST} does not list {listed(strange)} as it should")


def make_way(path: Path) -> None:
    """See that a training state can be saved at a path; a damaged one there is moved aside.

    Raises:
        ValueError: There is something that is not ours.
        OSError: It cannot be read or moved.
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


def prune(folder: Path, agreement: Agreement, *, keep_last: int) -> None:
    """Remove all but the newest training states, and what killed writers left; see [Note: what is removed].

    Every rank takes part: to remove large files takes time.
    """
    found = agreement.on_writer(lambda: [path.name for path in _retire(folder, keep_last=keep_last)])
    found_by_rank = agreement.gather(found)
    retired = [folder / name for name in found_by_rank[0] or []]
    agreement.on_every_rank(lambda: _remove_files(retired, part=agreement.rank, num_parts=len(found_by_rank)))
    agreement.on_writer(lambda: _remove_folders(retired))


def _candidates(folder: Path) -> list[str]:
    """Return the names of what may be complete, the newest first, and warn of what is not."""
    shelf = look_at(folder)
    for path, problem in shelf.damaged.items():
        _warn_of(path, problem)
    return [path.name for path, _ in shelf.states]


def _warn_of(path: Path, problem: str) -> None:
    get_dist_logger().warning(f"passing over {path}: {problem}; {_HOW.format(path)}", ranks=[0])


def _misfit(path: Path, *, part: int, num_parts: int, buffer_size: float) -> str | None:
    try:
        manifest = read_manifest(path)
        verify_files(path, manifest, part=part, num_parts=num_parts, buffer_size=buffer_size)
        if part == 0:
            refuse_unlisted(path, manifest)
    except (ValueError, OSError) as error:
        return str(error)
    return None


def _quick_misfit(path: Path) -> str | None:
    """Return what is wrong with a state, as far as its manifest and the sizes of its files tell."""
    try:
        return first_misfit(path, read_manifest(path))
    except (ValueError, OSError) as error:
        return str(error)


def _is_ours_or_empty(path: Path) -> bool:
    """Return whether there is nothing in a folder but what a training state consists of, damaged or not."""
    return {entry.name for entry in path.iterdir()} <= _ENTRIES or _quick_misfit(path) is None


def is_like_a_state(path: Path) -> bool:
    """Return whether a folder has the manifest or the other parts of a training state, intact or not."""
    parts = (path / "parts.pt", path / "model" / INDEX)
    return os.path.isfile(path / MANIFEST) or all(map(os.path.isfile, parts))


def _has_tensors(path: Path) -> bool:
    return os.path.isfile(path / "model" / INDEX)  # other programs write a manifest.json, too


def _retire(folder: Path, *, keep_last: int) -> list[Path]:
    """Return the folders that are to go, under names by which nobody takes them for training states."""
    shelf = look_at(folder)
    complete, damaged = [], dict(shelf.damaged)
    for path, manifest in shelf.states:
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
    retired = list(_leftovers(folder))
    for path in complete[keep_last:]:
        aside = path.with_name(f".{path.name}.old-{secrets.token_hex(4)}")
        path.rename(aside)
        (aside / MANIFEST).unlink(missing_ok=True)
        retired.append(aside)
    return retired


def _leftovers(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        is_one = _LEFTOVER.fullmatch(path.name) and path.is_dir() and not path.is_symlink()
        if is_one and {entry.name for entry in path.iterdir()} <= _ENTRIES:
            (path / MANIFEST).unlink(missing_ok=True)
            yield path


def _remove_files(folders: list[Path], *, part: int, num_parts: int) -> None:
    """Remove this rank's part of the files; a link is removed itself, whatever it leads to."""
    files = [
        path
        for folder in folders
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or not path.is_dir()
    ]
    for file in files[part::num_parts]:
        file.unlink(missing_ok=True)
        still_moving()


def _remove_folders(folders: list[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder)
