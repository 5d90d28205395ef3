"""A folder of training states: which is the newest complete one, and which go.

Order is the order of saving, kept as a serial number in each manifest. Steps would not do: a run that goes
back to an earlier step saves smaller ones, and clocks of different machines disagree.
"""

import re
import shutil
from functools import partial
from pathlib import Path

from colossalai.checkpoint_io._agreement import Agreement
from colossalai.checkpoint_io._blocks import DEFAULT_BUFFER_MB
from colossalai.checkpoint_io._manifest import MANIFEST, Manifest, read_manifest, verify_files
from colossalai.checkpoint_io._names import listed
from colossalai.logging import get_dist_logger

_OURS = re.compile(r"step-\d{8,}")
_LEFTOVER = re.compile(r"\.step-\d{8,}\.(new|old)-[0-9a-f]+")


def step_folder(step: int) -> str:
    """Return the name of the training state of a step."""
    return f"step-{step:08d}"


def next_serial(folder: Path) -> int:
    """Return a serial number above those of all training states in a folder."""
    return 1 + max((manifest.serial for _, manifest in _manifests(folder)), default=0)


def newest_complete(
    folder: Path, agreement: Agreement, *, num_ranks: int, buffer_size: float = DEFAULT_BUFFER_MB
) -> Path | None:
    """Return the newest training state in a folder whose files are all as its manifest says, or None.

    Every rank takes part, and reads its part of the files.

    Raises:
        OSError: The folder cannot be read.
    """
    check = partial(_misfit, num_parts=num_ranks, buffer_size=buffer_size)
    candidates = agreement.gather(agreement.on_writer(lambda: _manifests(folder)))[0]
    for path, manifest in candidates or []:
        misfits = agreement.gather(check(path, manifest, part=agreement.rank))
        first = next(filter(None, misfits), None)
        if first is None:
            return path
        get_dist_logger().warning(f"passing over the training state {path}: {first}", ranks=[0])
    return None


def refuse_lost(folder: Path) -> None:
    """Raise if there are training states in a folder, none of which is complete: they should not be missed.

    Raises:
        ValueError: It is so.
    """
    ours = sorted(entry.name for entry in folder.iterdir() if _OURS.fullmatch(entry.name))
    if ours:
        raise ValueError(
            f"{folder} holds {listed(ours)}, of which none is a complete training state (the warnings say "
            f"why): move them away to begin anew"
        )


def _misfit(path: Path, manifest: Manifest, *, part: int, num_parts: int, buffer_size: float) -> str | None:
    try:
        verify_files(path, manifest, part=part, num_parts=num_parts, buffer_size=buffer_size)
    except (ValueError, OSError) as error:
        return str(error)
    return None


def prune(folder: Path, agreement: Agreement, *, keep_last: int) -> None:
    """Remove all but the newest training states, and what killed writers left.

    Every rank takes part: to remove large files takes time.
    """
    found = agreement.on_writer(lambda: _retire(folder, keep_last=keep_last))
    found_by_rank = agreement.gather(found)
    retired = found_by_rank[0] or []
    agreement.on_every_rank(lambda: _remove_files(retired, part=agreement.rank, num_parts=len(found_by_rank)))
    agreement.on_writer(lambda: _remove_folders(retired))


def _retire(folder: Path, *, keep_last: int) -> list[Path]:
    """Return the folders that are to go; from now on nobody takes one for a training state."""
    ours = [path for path, _ in _manifests(folder) if _OURS.fullmatch(path.name)]
    kept = {path.name for path in ours[:keep_last]}
    retired = []
    for entry in folder.iterdir():
        is_old = _OURS.fullmatch(entry.name) and entry.name not in kept
        if is_old or _LEFTOVER.fullmatch(entry.name):
            (entry / MANIFEST).unlink(missing_ok=True)
            retired.append(entry)
    return retired


def _remove_files(folders: list[Path], *, part: int, num_parts: int) -> None:
    files = [path for folder in folders for path in sorted(folder.rglob("*")) if path.is_file()]
    for file in files[part::num_parts]:
        file.unlink(missing_ok=True)


def _remove_folders(folders: list[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder)


def _manifests(folder: Path) -> list[tuple[Path, Manifest]]:
    """Return what has an intact manifest, the newest first.

    Hidden folders come last. One is complete if its writer was killed just before it renamed it, but it may
    also be that its writer is about to do so.
    """
    found = []
    for path in folder.iterdir() if folder.is_dir() else []:
        if not (path / MANIFEST).is_file():
            continue
        try:
            found.append((path, read_manifest(path)))
        except (ValueError, OSError) as error:
            get_dist_logger().warning(f"passing over {path}: {error}")
    return sorted(found, key=lambda item: (not item[0].name.startswith("."), item[1].serial), reverse=True)
