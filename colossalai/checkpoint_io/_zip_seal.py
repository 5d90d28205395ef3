"""The frame of a zip archive: what is in it beside the content of its members, and a checksum of that.

Members have a CRC-32 of their own. Headers, padding and the directory have none: a flipped bit there goes
unseen until some reader looks at just that field. So our archives carry a seal, the CRC-32 of all bytes that
belong to no member's content, as the comment of the archive:

    local header | content | ... | directory | end, with the comment's length | "colossalai crc32 0123456789"

Other writers leave none; of theirs we compare what stands twice, in front of a member and in the directory.
"""

import os
import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_END = b"PK\x05\x06"
_END_SIZE = 22  # of the record at the end, before the comment
_LOCAL = b"PK\x03\x04"
_LOCAL_FORMAT = "<4sHHHHHIIIHH"  # signature, version, flags, method, time, date, CRC, sizes, lengths
_LOCAL_SIZE = struct.calcsize(_LOCAL_FORMAT)
_HAS_DESCRIPTOR = 1 << 3  # then CRC and sizes may stand behind the content
_PREFIX = b"colossalai crc32 "
_DIGITS = 10
_SEAL_SIZE = len(_PREFIX) + _DIGITS
_BLOCK = 1 << 20


def seal(path: Path) -> None:
    """Put the seal on an archive that has no comment yet.

    Raises:
        OSError: It cannot be written.
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
        ValueError: It does not.
        OSError: It cannot be read.
    """
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _END_SIZE - len(archive.comment)))
        end = file.read(_END_SIZE)
    if not end.startswith(_END) or end[-2:] != struct.pack("<H", len(archive.comment)):
        raise ValueError("it is cut off, or there is something behind its end")


def refuse_broken_frame(path: Path, archive: zipfile.ZipFile) -> None:
    """Compare the frame of an archive with its seal, or where it has none with itself.

    Raises:
        ValueError: It differs.
        OSError: It cannot be read.
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
    """Compare the header in front of a member with what the directory says of it.

    Zeros, or all bits, stand for what is told behind the content, or in the extra field of a large member.
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
