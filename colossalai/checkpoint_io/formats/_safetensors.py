"""Writer of safetensors files, in one pass.

A file is the length of its header in 8 bytes, the header in JSON, and the values, one tensor after the other.
The layout is known before the values, but the checksums of the tensors in the header are known after them: so
the header is written twice, the first time with the widest numbers. The second one is at most as long, and is
padded with blanks.
"""

import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from colossalai.checkpoint_io.resharding import TensorMetadata
from colossalai.checkpoint_io.storage import damage_named, differs_by_one, json_checksum

CHECKSUMS = "crc32"  # key of the CRC-32 of each tensor, in JSON
_OF_HEADER = "crc32_of_header"  # key of the CRC-32 of the rest of the header
_ALIGNMENT = 16  # the widest element, complex128: a mapping of any tensor can be viewed as its dtype
_WIDEST = 0xFFFFFFFF
_DIGITS = 10  # of `_WIDEST`
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_METADATA = "__metadata__"


def has_name_for(dtype: torch.dtype) -> bool:
    """Return whether the format has tensors of a dtype."""
    return dtype in _NAMES


def header_of(
    listings: Sequence[tuple[str, torch.dtype, tuple[int, ...]]],
    sizes: Sequence[int],
    metadata: Mapping[str, str],
) -> bytes:
    """Return the beginning of a file; the tensors follow it, one after the other.

    Args:
        listings: Name, dtype and shape of the tensors, in order. A tensor of a dtype that the format lacks
            is listed as bytes.
        sizes: The bytes of each.
        metadata: Additional text.
    """
    texts = dict(metadata)
    entries: dict[str, Mapping[str, object]] = {_METADATA: texts}
    end = 0
    for (name, dtype, shape), size in zip(listings, sizes, strict=True):
        known = _NAMES.get(dtype)
        entries[name] = {
            "dtype": known or "U8",
            "shape": list(shape) if known else [size],
            "data_offsets": [end, end + size],
        }
        end += size
    texts[_OF_HEADER] = _header_checksum(entries)
    text = json.dumps(entries).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def has_intact_header(path: Path) -> bool:
    """Return whether the header of a file matches its checksum, or has none: others write none.

    Raises:
        ValueError: The file does not begin with a header.
        OSError: The file cannot be read.
    """
    with path.open("rb") as file, damage_named(path):
        entries = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        texts = entries.get(_METADATA) or {}
        if _OF_HEADER in texts:
            return _is_of_rest(_OF_HEADER, entries)
        # A header without the name is one of others, unless the checksum is there under a damaged name.
        return not any(_is_of_rest(name, entries) for name in texts if differs_by_one(name, _OF_HEADER))


def _is_of_rest(name: str, entries: Mapping[str, Mapping[str, object]]) -> bool:
    """Return whether a text of the metadata is the checksum of the header without it."""
    rest = {key: text for key, text in entries[_METADATA].items() if key != name}
    return entries[_METADATA][name] == _header_checksum({**entries, _METADATA: rest})


def _header_checksum(entries: Mapping[str, Mapping[str, object]]) -> str:
    return f"{json_checksum(entries):0{_DIGITS}d}"


def in_file_order(tensors: Mapping[str, TensorMetadata]) -> dict[str, TensorMetadata]:
    """Return tensors as they lie in a file: the widest dtype first, so all begin where they should."""
    return dict(sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize))


def write_safetensors(
    path: Path,
    tensors: Mapping[str, TensorMetadata],
    *,
    header: Mapping[str, str],
    blocks_of: Callable[[TensorMetadata], Iterator[memoryview]],
) -> None:
    """Write tensors.

    Args:
        path: The file.
        tensors: By name, in the order of `in_file_order`.
        header: Additional text for the header.
        blocks_of: Returns the bytes of each tensor, called in the same order.

    Raises:
        ValueError: The format has no place for one of the tensors.
        OSError: The file cannot be written.
    """
    strange = [
        f"{tensor.dtype} ({name})" for name, tensor in tensors.items() if not has_name_for(tensor.dtype)
    ]
    if strange:
        raise ValueError(f"safetensors has no {strange[0]}: use use_safetensors=False")
    listings = [(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]
    sizes = [tensor.nbytes for tensor in tensors.values()]

    def start_with(checksums: Mapping[str, int]) -> bytes:
        metadata = {"format": "pt", CHECKSUMS: json.dumps(checksums), **header}
        return header_of(listings, sizes, metadata)

    start = start_with(dict.fromkeys(tensors, _WIDEST))
    checksums: dict[str, int] = {}
    with path.open("wb") as file:
        file.write(start)
        for name, tensor in tensors.items():
            checksum = 0
            for block in blocks_of(tensor):
                checksum = zlib.crc32(block, checksum)
                file.write(block)
            checksums[name] = checksum
        text = start_with(checksums)[8:]
        file.seek(8)
        file.write(text.ljust(len(start) - 8))
