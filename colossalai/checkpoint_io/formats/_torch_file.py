"""Writer of torch files, in one pass and with tensors that are nowhere whole; and the seal of such a file.

Such a file is a zip archive that is not compressed: a pickle, in which a tensor is its shape and the key of
its values, and a record of values for each key. The pickle comes first and needs no values; a record is
streamed, and its checksum goes into the archive when it is complete (`zipfile` does that).
"""

import io
import os
import pickle
import struct
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from colossalai.checkpoint_io.resharding import TensorMetadata
from colossalai.checkpoint_io.storage import bytes_of

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


_FOLDER = "archive"  # torch's name for it where there is no file name
_ALIGNMENT = 64
_FILLER = 0x4246  # "FB": the extra field that torch fills, too
_HEADER = 30  # bytes of a zip entry before its name
_ZIP64_FIELD = 20


@dataclass(frozen=True, eq=False)
class _Values:
    """What the pickle refers to: the record with the values of a tensor."""

    key: str
    kind: type
    numel: int


def write_torch_stream(
    path: Path,
    content: object,
    tensors: Iterable[TensorMetadata],
    *,
    blocks_of: Callable[[TensorMetadata], Iterator[memoryview]],
    held_locally: Callable[[TensorMetadata], torch.Tensor | None],
) -> None:
    """Write plain values with tensors in them, as `torch.save` would.

    Args:
        path: The file.
        content: Nested plain values; in the place of a tensor that is streamed are its metadata.
        tensors: The metadata of those.
        blocks_of: Gives the bytes of each, asked for in the order of `tensors`.
        held_locally: Gives the tensor that metadata stand for where it has to be pickled (a sparse one).

    Raises:
        OSError: The file cannot be written.
    """
    text = io.BytesIO()
    pickler = _Pickler(text, held_locally)
    pickler.dump(content)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        _write_record(archive, "data.pkl", [text.getbuffer()], size=text.tell())
        _write_record(archive, "byteorder", [b"little"], size=6)
        for tensor in tensors:
            key = pickler.key_of(tensor)
            if key is None:  # not in the content, or pickled: its values are passed by
                for _ in blocks_of(tensor):
                    pass
            else:
                _write_record(archive, f"data/{key}", blocks_of(tensor), size=tensor.nbytes)
        for key, values in pickler.local.items():
            _write_record(archive, f"data/{key}", [bytes_of(values)], size=values.nbytes)
        _write_record(archive, "version", [b"3\n"], size=2)
    seal(path)


class _Pickler(pickle.Pickler):
    """Pickles tensors by shape and key, and remembers the keys.

    Args:
        file: Where to.
        held_locally: See `write_torch_stream`.
    """

    def __init__(
        self, file: io.BytesIO, held_locally: Callable[[TensorMetadata], torch.Tensor | None]
    ) -> None:
        super().__init__(file, protocol=2)
        self._held_locally = held_locally
        self._keys: dict[int, str] = {}
        self.local: dict[str, torch.Tensor] = {}

    def key_of(self, tensor: TensorMetadata) -> str | None:
        """Return the key of the record of a tensor, None if there is none."""
        return self._keys.get(id(tensor))

    def persistent_id(self, value: Any) -> Any:
        """Return what stands for a record."""
        return ("storage", value.kind, value.key, "cpu", value.numel) if isinstance(value, _Values) else None

    def reducer_override(self, value: Any) -> Any:
        """Return how a tensor is made again from its record."""
        if isinstance(value, TensorMetadata):
            whole = self._held_locally(value)
            if whole is not None:
                return whole.__reduce_ex__(2)
            key = self._keys[id(value)] = self._next_key()
            return _recipe(key, value.shape, value.dtype)
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            key = self._next_key()
            self.local[key] = value.detach().cpu().contiguous()
            return _recipe(key, tuple(value.shape), value.dtype)
        return NotImplemented

    def _next_key(self) -> str:
        return str(len(self._keys) + len(self.local))


def _recipe(key: str, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Any, tuple[Any, ...]]:
    meta = torch.empty(shape, dtype=dtype, device="meta")
    place: tuple[Any, ...] = (0, shape, meta.stride(), False, OrderedDict())
    kind = torch.storage._dtype_to_storage_type_map().get(dtype)
    if kind is None or dtype in torch.storage._new_dtypes():
        return torch._utils._rebuild_tensor_v3, (
            _Values(key, torch.UntypedStorage, meta.nbytes),
            *place,
            dtype,
        )
    return torch._utils._rebuild_tensor_v2, (_Values(key, getattr(torch, kind), meta.numel()), *place)


def _write_record(archive: zipfile.ZipFile, name: str, blocks: Iterable[Any], *, size: int) -> None:
    info = zipfile.ZipInfo(f"{_FOLDER}/{name}")
    info.file_size = size
    is_large = size * 1.05 > zipfile.ZIP64_LIMIT  # as zipfile itself decides
    # Values begin at a multiple of 64: they are mapped into memory where they lie.
    before = archive.start_dir + _HEADER + len(info.filename) + 4 + (_ZIP64_FIELD if is_large else 0)
    filler = -before % _ALIGNMENT
    info.extra = struct.pack("<HH", _FILLER, filler) + bytes(filler)
    with archive.open(info, "w", force_zip64=is_large) as record:
        for block in blocks:
            record.write(block)
