"""Manifest of a training state: its file names, and the list of them with sizes and checksums, written last.

A folder is a complete training state if its manifest is intact and every file matches it. Nothing else
counts: not the folder's name, not its time.
"""

import json
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from colossalai.checkpoint_io.storage._file_blocks import MOST_READ, file_checksum
from colossalai.checkpoint_io.storage._untrusted import (
    FORM_OF_FILES,
    Count,
    FileEntry,
    Form,
    Json,
    file_entries,
    json_checksum,
    listed,
    read_checked_json,
    refuse_links_out,
    refuse_strays,
)

# Names of the parts of a training state, defined here only.
MANIFEST = "manifest.json"
MODEL_FOLDER, OPTIMIZER_FOLDER, RANDOM_FOLDER = "model", "optimizer", "random"
INDEX = "tensors.json"  # in each of the first two
SMALL_FILE = "parts.pt"
_IN_ALL = (SMALL_FILE, f"{MODEL_FOLDER}/{INDEX}")  # of these every training state consists
_FORMAT = 2
_FORM: dict[str | type, Form] = {
    "serial": Count(),
    "step": Count(),
    "num_ranks": Count(1),
    "versions": {str: str},
    "files": FORM_OF_FILES,
}


def random_file(rank: int, num_ranks: int) -> str:
    """Return the name of the file with the random states of a rank, within a training state."""
    return f"{RANDOM_FOLDER}/{rank:05d}-of-{num_ranks:05d}.pt"


@dataclass(frozen=True)
class Manifest:
    """Content of a training state.

    Attributes:
        serial: Number of the save in its folder. The newest state has the highest, independent of its step.
        step: The step it was saved at.
        num_ranks: On how many ranks.
        versions: Of the software that wrote it.
        config: The options of the run, as JSON.
        files: By path within the folder.
        others: Fields of a newer version; kept and ignored.
    """

    serial: int
    step: int
    num_ranks: int
    versions: dict[str, str]
    config: Json
    files: dict[str, FileEntry]
    others: dict[str, Json] = field(default_factory=dict)


def write_manifest(folder: Path, manifest: Manifest) -> Manifest:
    """Write a manifest, which also gets the files of the folder that it does not list yet; return it."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    names = [path.relative_to(folder).as_posix() for path in paths]
    files = {}
    for name in names:
        # Those of tensors were summed while they were written, and are not read again.
        size = (folder / name).stat().st_size
        files[name] = manifest.files.get(name) or FileEntry(
            size, file_checksum(folder / name, size, most=MOST_READ)
        )
    manifest = replace(manifest, files=files)
    body = asdict(manifest)
    body |= body.pop("others")
    content = {"format": _FORMAT, "crc32": json_checksum(body), "manifest": body}
    (folder / MANIFEST).write_text(json.dumps(content, indent=2), encoding="utf-8")
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a folder; its files are not looked at.

    Raises:
        ValueError: The manifest is damaged, lists files outside its folder, or is of a later format.
        OSError: The manifest cannot be read.
    """
    path = folder / MANIFEST
    body: dict[str, Any] = read_checked_json(path, "manifest", version=_FORMAT, form=_FORM)
    refuse_strays(body["files"], path, is_flat=False)
    files = file_entries(body["files"])
    unlisted = [name for name in _IN_ALL if name not in files]
    if unlisted:
        raise ValueError(f"{path} is damaged: it does not list {listed(unlisted)}, which all have")
    return Manifest(
        serial=body["serial"],
        step=body["step"],
        num_ranks=body["num_ranks"],
        versions=body["versions"],
        config=body.get("config"),
        files=files,
        others={name: value for name, value in body.items() if name not in (*_FORM, "config")},
    )


def first_misfit(folder: Path, manifest: Manifest) -> str | None:
    """Return which file is missing or of another size, and how; None if all are there. No file is read."""
    for name, entry in manifest.files.items():
        try:
            found = (folder / name).stat()
        except OSError:
            return f"{folder / name} is missing; {MANIFEST} lists it"
        if not stat.S_ISREG(found.st_mode) or found.st_size != entry.size:
            return f"{folder / name} has {found.st_size} bytes, {MANIFEST} says {entry.size}"
    return None


def verify_files(
    folder: Path,
    files: Mapping[str, FileEntry],
    *,
    listed_in: str,
    part: int = 0,
    num_parts: int = 1,
    most: int = MOST_READ,
) -> None:
    """Compare files with their entries; `num_parts` readers share the work, this one is `part`.

    Args:
        folder: The folder of the files.
        files: The entries, by name in the folder.
        listed_in: Name of the file with the entries, for messages.
        part: Index of this reader.
        num_parts: Number of readers.
        most: The most bytes that are read at once.

    Raises:
        ValueError: A file is missing, differs in size or checksum, or is outside of the folder; it is named.
        OSError: A file cannot be read.
    """
    refuse_links_out(files, folder)
    for name in share_of_files(files, part, num_parts):
        path, expected = folder / name, files[name]
        if not path.is_file():
            raise ValueError(f"{path} is missing; {listed_in} lists it")
        if path.stat().st_size != expected.size:
            raise ValueError(f"{path} has {path.stat().st_size} bytes, {listed_in} says {expected.size}")
        if file_checksum(path, expected.size, most=most) != expected.checksum:
            raise ValueError(f"{path} is damaged: its checksum differs from that in {listed_in}")


def share_of_files(files: Mapping[str, FileEntry], part: int, num_parts: int) -> list[str]:
    """Return the files of one of several readers, with about the same number of bytes each."""
    loads = [0] * num_parts
    share = []
    for name in sorted(files, key=lambda name: (-files[name].size, name)):
        reader = loads.index(min(loads))
        loads[reader] += files[name].size
        if reader == part:
            share.append(name)
    return share
