"""Single files: torch's zip format or safetensors, detected by their first bytes; small states in one.

Both are read memory-mapped: tensors are views of the file, and only copies cost memory. Both carry checksums:
torch's zip archive by its nature, our safetensors files as CRC-32 of each tensor in the header. Nothing in a
file is executed unless the caller allows it.
"""

import enum
import json
import os
import pickle
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, Protocol

import safetensors
import safetensors.torch
import torch

from colossalai.checkpoint_io._collective import called_by_all_ranks, on_every_rank
from colossalai.checkpoint_io.formats._safetensors import CHECKSUMS, has_intact_header
from colossalai.checkpoint_io.resharding import plain
from colossalai.checkpoint_io.storage import (
    OF_DAMAGE,
    atomic_file,
    damage_named,
    of_kind,
    refuse_special,
    staged,
)
from colossalai.logging import get_dist_logger

_END = b"PK\x05\x06"
_END_SIZE = 22  # of the record at the end, before the comment
_LOCAL = b"PK\x03\x04"
_LOCAL_FORMAT = "<4sHHHHHIIIHH"  # signature, version, flags, method, time, date, CRC, sizes, lengths
_LOCAL_SIZE = struct.calcsize(_LOCAL_FORMAT)
_HAS_DESCRIPTOR = 1 << 3  # then CRC and sizes can follow the content
_PREFIX = b"colossalai crc32 "
_DIGITS = 10
_SEAL_SIZE = len(_PREFIX) + _DIGITS
_BLOCK = 1 << 20
_TORCH_LEGACY = b"\x80\x02"  # a pickle of protocol 2: torch before 1.6

_ALLOWING = (
    "If you trust whoever made it, load_model and load_checkpoint (and Booster.load_model) read it with "
    "allow_pickle=True"
)


class Format(enum.Enum):
    """Format of a file, detected by its content."""

    TORCH_ZIP = enum.auto()
    TORCH_LEGACY = enum.auto()
    SAFETENSORS = enum.auto()


def detect_format(path: Path) -> Format:
    """Detect a file's format by its first bytes.

    Raises:
        ValueError: The file has none of the formats, or is not a regular file.
        OSError: The file cannot be read.
    """
    refuse_special(path)
    with path.open("rb") as file:
        start = file.read(9)
    # First, as the length of a header may happen to have the bytes of the other marks.
    if start[8:] == b"{" and int.from_bytes(start[:8], "little") <= path.stat().st_size - 8:
        return Format.SAFETENSORS
    if start.startswith(_LOCAL):
        return Format.TORCH_ZIP
    if start.startswith(_TORCH_LEGACY):
        return Format.TORCH_LEGACY
    raise ValueError(
        f"{path} is neither a torch file nor a safetensors file, or is damaged: {path.stat().st_size} bytes "
        f"that begin with {start!r}"
    )


def write_torch(path: Path, content: object) -> None:
    """Write plain values and tensors with `torch.save`, and put the seal on the file.

    Raises:
        OSError: The file cannot be written.
    """
    try:
        with path.open("wb") as file:
            torch.save(content, file)
        seal(path)
    except RuntimeError as error:
        # torch's writer notices the short file and hides why it is short.
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def read_torch(path: Path, *, mapped: bool = True, allow_pickle: bool = False) -> object:
    """Read a torch file of plain values and tensors, memory-mapped or into memory.

    Args:
        path: The file.
        mapped: Leave the tensors views of the file.
        allow_pickle: Run the code that a file may hold, if it cannot be restored without.

    Raises:
        ValueError: The file is damaged, or holds objects that only code could restore.
        OSError: The file cannot be read.
    """
    return _read_torch(path, detect_format(path), mapped=mapped, allow_pickle=allow_pickle)


def _read_torch(path: Path, format: Format, *, mapped: bool, allow_pickle: bool) -> object:
    is_zip = format is Format.TORCH_ZIP
    try:
        if is_zip:
            with zipfile.ZipFile(path) as archive:
                refuse_truncated(path, archive)  # its error is clearer than torch's
        is_mapped = is_zip and mapped
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=is_mapped)
        except pickle.UnpicklingError:
            if not allow_pickle:
                raise
            get_dist_logger().warning(f"running what {path} holds: allow_pickle=True", ranks=[0])
            return torch.load(path, map_location="cpu", weights_only=False, mmap=is_mapped)
    except pickle.UnpicklingError as error:
        raise ValueError(_refusal(path)) from error
    except OF_DAMAGE as error:
        raise ValueError(f"{path} is damaged or incomplete: {error}") from error


def read_safetensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Read a safetensors file, memory-mapped: the tensors by name, and the text in its header.

    Raises:
        ValueError: The file is damaged.
        OSError: The file cannot be read.
    """
    refuse_special(path)
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
        return safetensors.torch.load_file(path), header
    except (safetensors.SafetensorError, *OF_DAMAGE) as error:
        raise ValueError(f"{path} is damaged or incomplete: {error}") from error


def verify(path: Path) -> None:
    """Read a file from end to end and compare it with the checksums in it, if it has any.

    Raises:
        ValueError: The content differs from a checksum; the message names the file and the entry.
        OSError: The file cannot be read.
    """
    _verify(path, detect_format(path))


def _verify(path: Path, format: Format) -> None:
    match format:
        case Format.TORCH_ZIP:
            damaged = _first_damaged_record(path)
        case Format.SAFETENSORS:
            damaged = _first_damaged_tensor(path)
        case Format.TORCH_LEGACY:
            damaged = None
    if damaged is not None:
        raise ValueError(f"{path} is damaged: the checksum of {damaged!r} does not match its content")


def _first_damaged_record(path: Path) -> str | None:
    try:
        with zipfile.ZipFile(path) as archive:
            refuse_broken_frame(path, archive)
            return archive.testzip()
    except OF_DAMAGE as error:
        raise ValueError(f"{path} is damaged or incomplete: {error}") from error


def _first_damaged_tensor(path: Path) -> str | None:
    tensors, header = read_safetensors(path)
    if not has_intact_header(path):
        return "its header"
    with damage_named(path):
        checksums = of_kind(json.loads(header.get(CHECKSUMS, "{}")), dict, CHECKSUMS)
    for name, tensor in tensors.items():
        if name in checksums and checksums[name] != _checksum(tensor):
            return name
    return None


def _checksum(tensor: torch.Tensor) -> int:
    return zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data)


def _refusal(path: Path) -> str:
    """Say why torch would not unpickle a file: code in it, or damage."""
    is_zip = detect_format(path) is Format.TORCH_ZIP
    unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(path) if is_zip else []
    if not unsafe:
        return f"{path} is damaged, or needs code to be restored, which is refused: {_ALLOWING}"
    return (
        f"{path} holds objects that only running code could restore, and is refused: {', '.join(unsafe)}. "
        f"{_ALLOWING}"
    )


def has_checksums(path: Path) -> bool:
    """Return whether there is anything in an intact file that `verify` compares it with."""
    match detect_format(path):
        case Format.TORCH_ZIP:
            return True
        case Format.SAFETENSORS:
            return CHECKSUMS in read_safetensors(path)[1]
        case Format.TORCH_LEGACY:
            return False


class Stateful(Protocol):
    """An object that hands out and takes back its state."""

    def state_dict(self) -> Mapping[str, object]:
        """Return the state: plain values and tensors."""
        ...

    def load_state_dict(self, state_dict: dict[str, object], /) -> object:
        """Go back to a state."""
        ...


@called_by_all_ranks("save", "a learning rate scheduler")
def save_lr_scheduler(lr_scheduler: Stateful, checkpoint: str | Path) -> None:
    """Save a learning-rate scheduler in a file; collective: every rank calls it, global rank 0 writes.

    Raises:
        ValueError: The state of `lr_scheduler` holds a value that is not plain.
        OSError: The file cannot be written; on all ranks. An earlier file is kept.
    """
    state = plain(lr_scheduler.state_dict(), at="lr_scheduler")
    with staged(atomic_file, checkpoint) as write:
        write(lambda path: write_torch(path, state))


@called_by_all_ranks("load", "a learning rate scheduler")
def load_lr_scheduler(lr_scheduler: Stateful, checkpoint: str | Path) -> None:
    """Load a learning-rate scheduler from a file that `save_lr_scheduler` wrote; collective.

    Raises:
        ValueError: The file is damaged, or holds no dictionary.
        OSError: The file cannot be read.
    """
    lr_scheduler.load_state_dict(on_every_rank(lambda: read_plain(Path(checkpoint))))


def read_plain(path: Path, *, mapped: bool = False, allow_pickle: bool = False) -> dict[str, object]:
    """Read a torch file of a dictionary of plain values, its checksums compared.

    Args:
        path: The file.
        mapped: Leave the tensors in it views of the file.
        allow_pickle: Run the code that it may hold, if it cannot be restored without.

    Raises:
        ValueError: The file is damaged, or holds no dictionary.
        OSError: The file cannot be read.
    """
    format = detect_format(path)
    _verify(path, format)
    content = _read_torch(path, format, mapped=mapped, allow_pickle=allow_pickle)
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__} where a dict is expected")
    return content


def seal(path: Path) -> None:
    """Put the seal on an archive that has no comment yet.

    Raises:
        OSError: The file cannot be written.
    """
    with path.open("r+b") as file:
        file.seek(-_END_SIZE, os.SEEK_END)
        end = file.read(_END_SIZE)
        assert end.startswith(_END), "an archive that was just written has no comment"
        file.seek(-2, os.SEEK_END)
        file.write(struct.pack("<H", _SEAL_SIZE) + _PREFIX + b"0" * _DIGITS)
    with zipfile.ZipFile(path) as archive, path.open("r+b") as file:
        checksum = _frame_checksum(file, archive)
        file.seek(-_DIGITS, os.SEEK_END)
        file.write(f"{checksum:0{_DIGITS}d}".encode())


def refuse_truncated(path: Path, archive: zipfile.ZipFile) -> None:
    """See that an archive ends where its last record says: readers take a comment that is cut off.

    Raises:
        ValueError: The archive is cut off, or bytes follow its end.
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _END_SIZE - len(archive.comment)))
        end = file.read(_END_SIZE)
    if not end.startswith(_END) or end[-2:] != struct.pack("<H", len(archive.comment)):
        raise ValueError("it is cut off, or there is something behind its end")


def refuse_broken_frame(path: Path, archive: zipfile.ZipFile) -> None:
    """Compare the frame of an archive with its seal, or where it has none with itself.

    Raises:
        ValueError: The frame differs from its seal, or a header from the directory.
        OSError: The file cannot be read.
    """
    refuse_truncated(path, archive)
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _SEAL_SIZE - _END_SIZE))
        tail = file.read()
        if tail.startswith(_END) and len(tail) == _SEAL_SIZE + _END_SIZE:
            if tail[_END_SIZE:] != _PREFIX + f"{_frame_checksum(file, archive):0{_DIGITS}d}".encode():
                raise ValueError("the checksum of its headers and its directory does not match them")
            return
        for info in archive.infolist():
            _refuse_other_header(file, info)


def _frame_checksum(file: BinaryIO, archive: zipfile.ZipFile) -> int:
    """Return the CRC-32 of all bytes but the content of the members and the digits of the seal."""
    checksum = 0
    for begin, end in _frame(file, archive):
        file.seek(begin)
        while begin < end:
            block = file.read(min(_BLOCK, end - begin))
            if not block:
                raise ValueError("it ends before its directory does")
            checksum = zlib.crc32(block, checksum)
            begin += len(block)
    return checksum


def _frame(file: BinaryIO, archive: zipfile.ZipFile) -> Iterator[tuple[int, int]]:
    """Yield the ranges between the contents of the members."""
    done = 0
    for info in sorted(archive.infolist(), key=lambda info: info.header_offset):
        content = _content_begin(file, info)
        if info.header_offset < done:
            raise ValueError(f"{info.filename!r} begins before another member ends")
        yield done, content
        done = content + info.compress_size
    yield done, file.seek(0, os.SEEK_END) - _DIGITS


def _content_begin(file: BinaryIO, info: zipfile.ZipInfo) -> int:
    *_, name_length, extra_length = _local_header(file, info)
    return info.header_offset + _LOCAL_SIZE + name_length + extra_length


def _local_header(file: BinaryIO, info: zipfile.ZipInfo) -> tuple[int, ...]:
    file.seek(max(0, info.header_offset))
    signature, *fields = struct.unpack(_LOCAL_FORMAT, file.read(_LOCAL_SIZE))
    if signature != _LOCAL or info.header_offset < 0:
        raise ValueError(f"there is no header in front of {info.filename!r}")
    return tuple(fields)


def _refuse_other_header(file: BinaryIO, info: zipfile.ZipInfo) -> None:
    """Compare the header in front of a member with its entry in the directory.

    Zeros, or all bits, mean a value after the content, or in the extra field of a large member.
    """
    _, flags, method, _, _, checksum, packed, size, _, _ = _local_header(file, info)
    untold = (0, 0xFFFFFFFF)
    pairs = [(flags, info.flag_bits), (method, info.compress_type)]
    pairs += [
        (here, there)
        for here, there in ((checksum, info.CRC), (packed, info.compress_size), (size, info.file_size))
        if not (here in untold and (flags & _HAS_DESCRIPTOR or here))
    ]
    if any(here != there for here, there in pairs):
        raise ValueError(f"the header in front of {info.filename!r} differs from the directory")
