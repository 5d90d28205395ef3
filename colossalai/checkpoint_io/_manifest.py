"""The manifest of a training state: the list of its files with sizes and checksums, written last.

A folder is a complete training state if its manifest is intact and every file in it is as the manifest says.
Nothing else counts: not the folder's name, not its time.
"""

import json
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
_BLOCK = 1 << 20
_FORMAT = 1


@dataclass(frozen=True)
class FileEntry:
    """What one file must be."""

    size: int
    crc32: int


@dataclass(frozen=True)
class Manifest:
    """What a training state consists of.

    Attributes:
        serial: Counts the training states that were saved in a folder. The newest has the highest, whatever
            its step.
        step: The step it was saved at.
        num_ranks: On how many ranks.
        versions: Of the software that wrote it.
        files: By path within the folder.
    """

    serial: int
    step: int
    num_ranks: int
    versions: dict[str, str]
    files: dict[str, FileEntry]


def write_manifest(folder: Path, *, serial: int, step: int, num_ranks: int, versions: dict[str, str]) -> None:
    """List everything in a folder in its manifest."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    files = {path.relative_to(folder).as_posix(): _entry(path) for path in paths}
    body = asdict(Manifest(serial, step, num_ranks, versions, files))
    content = {"format": _FORMAT, "crc32": _checksum(body), "manifest": body}
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
    if _checksum(body) != checksum:
        raise ValueError(f"{path} is damaged: its checksum does not match its content")
    files = {name: FileEntry(**entry) for name, entry in body.pop("files").items()}
    return Manifest(**body, files=files)


def verify_files(folder: Path, manifest: Manifest, *, part: int = 0, num_parts: int = 1) -> None:
    """Compare the files with the manifest; of `num_parts` readers who share the work, each its `part`.

    Raises:
        ValueError: A file is missing or differs; it is named.
    """
    for name, expected in list(manifest.files.items())[part::num_parts]:
        path = folder / name
        if not path.is_file():
            raise ValueError(f"{path} is missing; the manifest lists it")
        if path.stat().st_size != expected.size:
            raise ValueError(f"{path} has {path.stat().st_size} bytes, the manifest says {expected.size}")
        if _entry(path) != expected:
            raise ValueError(f"{path} is damaged: its checksum differs from the manifest's")


def _entry(path: Path) -> FileEntry:
    size = checksum = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            size += len(block)
            checksum = zlib.crc32(block, checksum)
    return FileEntry(size, checksum)


def _checksum(body: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())
