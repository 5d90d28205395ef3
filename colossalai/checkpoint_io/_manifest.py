"""The manifest of a training state: the list of its files with sizes and checksums, written last.

A folder is a complete training state if its manifest is intact and every file in it is as the manifest says.
Nothing else counts: not the folder's name, not its time.
"""

import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from colossalai.checkpoint_io._blocks import DEFAULT_BUFFER_MB, block_size
from colossalai.checkpoint_io._checksum import Checksum
from colossalai.checkpoint_io._file_blocks import file_blocks

MANIFEST = "manifest.json"
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
    """

    serial: int
    step: int
    num_ranks: int
    versions: dict[str, str]
    config: Any
    files: dict[str, FileEntry]


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write a manifest, which also gets the files of the folder that it does not list yet."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    names = [path.relative_to(folder).as_posix() for path in paths]
    files = {name: manifest.files.get(name) or file_entry(folder / name) for name in names}
    body = asdict(replace(manifest, files=files))
    content = {"format": _FORMAT, "crc32": json_checksum(body), "manifest": body}
    (folder / MANIFEST).write_text(json.dumps(content, indent=2), encoding="utf-8")


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a folder; its files are not looked at.

    Raises:
        ValueError: It is damaged, or of a later format.
        OSError: It cannot be read.
    """
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        number, body, checksum = content["format"], dict(content["manifest"]), content["crc32"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged: {error!r}") from error
    if number != _FORMAT:
        raise ValueError(f"{path} is of format {number}; this version reads format {_FORMAT}")
    if json_checksum(body) != checksum:
        raise ValueError(f"{path} is damaged: its checksum does not match its content")
    files = {name: FileEntry(**entry) for name, entry in body.pop("files").items()}
    return Manifest(**body, files=files)


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
        ValueError: A file is missing or differs; it is named.
    """
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
