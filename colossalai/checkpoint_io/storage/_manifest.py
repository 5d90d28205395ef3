"""The manifest of a training state: the list of its files with sizes and checksums, written last.

A folder is a complete training state if its manifest is intact and every file in it is as the manifest says.
Nothing else counts: not the folder's name, not its time.
"""

import json
import stat
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from colossalai.checkpoint_io._load_report import listed
from colossalai.checkpoint_io._streaming import DEFAULT_BUFFER_MB, block_size
from colossalai.checkpoint_io.storage._checksum import Checksum, file_blocks
from colossalai.checkpoint_io.storage._untrusted import (
    count_of,
    damage_named,
    field_of,
    read_json,
    refuse_links_out,
    refuse_strays,
    texts_of,
)

MANIFEST = "manifest.json"
_IN_ALL = ("parts.pt", "model/tensors.json")  # of these every training state consists
_BLOCK = 8 << 20  # the most
_FORMAT = 2


@dataclass(frozen=True)
class FileEntry:
    """What one file must be."""

    size: int
    checksum: int


@dataclass(frozen=True)
class Manifest:
    """What a training state consists of.

    Attributes:
        serial: Counts the training states that were saved in a folder. The newest has the highest, whatever
            its step.
        step: The step it was saved at.
        num_ranks: On how many ranks.
        versions: Of the software that wrote it.
        config: The options of the run, as JSON.
        files: By path within the folder.
        others: What a newer version has put in beside these; kept, and not looked at.
    """

    serial: int
    step: int
    num_ranks: int
    versions: dict[str, str]
    config: Any
    files: dict[str, FileEntry]
    others: dict[str, Any] = field(default_factory=dict)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write a manifest, which also gets the files of the folder that it does not list yet."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    names = [path.relative_to(folder).as_posix() for path in paths]
    files = {name: manifest.files.get(name) or file_entry(folder / name) for name in names}
    body = asdict(replace(manifest, files=files))
    body |= body.pop("others")
    content = {"format": _FORMAT, "crc32": json_checksum(body), "manifest": body}
    (folder / MANIFEST).write_text(json.dumps(content, indent=2), encoding="utf-8")


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a folder; its files are not looked at.

    Raises:
        ValueError: It is damaged, lists files outside its folder, or is of a later format.
        OSError: It cannot be read.
    """
    path = folder / MANIFEST
    content = read_json(path)
    with damage_named(path):
        number, body = field_of(content, "format", int), field_of(content, "manifest", dict)
        if number != _FORMAT:
            raise ValueError(f"{path} is of format {number}; this version reads format {_FORMAT}")
        if json_checksum(body) != field_of(content, "crc32", int):
            raise ValueError("its checksum does not match its content")
        manifest = _parsed(body)
    refuse_strays(manifest.files, path, is_flat=False)
    unlisted = [name for name in _IN_ALL if name not in manifest.files]
    if unlisted:
        raise ValueError(f"{path} is damaged: it does not list {listed(unlisted)}, which all have")
    return manifest


def _parsed(body: dict[str, Any]) -> Manifest:
    known = {each.name for each in fields(Manifest)} - {"others"}
    return Manifest(
        serial=count_of(field_of(body, "serial", int), "serial"),
        step=count_of(field_of(body, "step", int), "step"),
        num_ranks=count_of(field_of(body, "num_ranks", int), "num_ranks", least=1),
        versions=texts_of(field_of(body, "versions", dict), "versions"),
        config=body.get("config"),
        files=file_entries(field_of(body, "files", dict)),
        others={name: value for name, value in body.items() if name not in known},
    )


def file_entries(content: dict[str, Any]) -> dict[str, FileEntry]:
    """Return what an index or a manifest says that files must be; keys of newer versions are left out.

    Raises:
        ValueError: Something is missing, or is no number.
    """
    return {
        name: FileEntry(
            size=count_of(field_of(entry, "size", int), "size"),
            checksum=count_of(field_of(entry, "checksum", int), "checksum"),
        )
        for name, entry in content.items()
    }


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
    manifest: Manifest,
    *,
    part: int = 0,
    num_parts: int = 1,
    buffer_size: float = DEFAULT_BUFFER_MB,
) -> None:
    """Compare the files with the manifest; of `num_parts` readers who share the work, each its `part`.

    Args:
        folder: Where the files are.
        manifest: The manifest.
        part: Which of the readers this is.
        num_parts: How many they are.
        buffer_size: The memory that may be used, in MB.

    Raises:
        ValueError: A file is missing, differs, or lies outside the folder; it is named.
    """
    refuse_links_out(manifest.files, folder)
    for name in share_of_files(manifest.files, part, num_parts):
        verify_file(folder / name, manifest.files[name], listed_in=MANIFEST, buffer_size=buffer_size)


def verify_file(
    path: Path, expected: FileEntry, *, listed_in: str, buffer_size: float = DEFAULT_BUFFER_MB
) -> None:
    """Compare a file with what it must be.

    Raises:
        ValueError: It is missing or differs.
    """
    if not path.is_file():
        raise ValueError(f"{path} is missing; {listed_in} lists it")
    if path.stat().st_size != expected.size:
        raise ValueError(f"{path} has {path.stat().st_size} bytes, {listed_in} says {expected.size}")
    if file_entry(path, buffer_size=buffer_size) != expected:
        raise ValueError(f"{path} is damaged: its checksum differs from that in {listed_in}")


def share_of_files(files: Mapping[str, FileEntry], part: int, num_parts: int) -> list[str]:
    """Return the files of one of several readers, who get about the same number of bytes each."""
    loads = [0] * num_parts
    share = []
    for name in sorted(files, key=lambda name: (-files[name].size, name)):
        reader = loads.index(min(loads))
        loads[reader] += files[name].size
        if reader == part:
            share.append(name)
    return share


def file_entry(path: Path, *, buffer_size: float = DEFAULT_BUFFER_MB) -> FileEntry:
    """Return what a file is, read with a part of so many MB of memory."""
    size, checksum = path.stat().st_size, Checksum()
    for block in file_blocks(path, 0, size, most=min(_BLOCK, block_size(buffer_size))):
        checksum.update(block)
    return FileEntry(size, checksum.value)


def json_checksum(content: Any) -> int:
    """Return a checksum of what JSON can hold, the order of keys aside."""
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())
