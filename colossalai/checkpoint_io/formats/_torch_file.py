"""Writer of torch files, in one pass and with tensors that no rank holds whole.

Such a file is a zip archive that is not compressed: a pickle, in which a tensor is its shape and the key of
its values, and a record of values for each key. The pickle comes first and needs no values; a record is
streamed, and its checksum goes into the archive when it is complete (`zipfile` does that).
"""

import io
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from colossalai.checkpoint_io.formats._single import seal
from colossalai.checkpoint_io.resharding import TensorMetadata
from colossalai.checkpoint_io.storage import bytes_of

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
        blocks_of: Returns the bytes of each tensor, called in the order of `tensors`.
        held_locally: Returns the tensor of metadata if it has to be pickled (a sparse one).

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
        file: The destination.
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
        """Return the reference of a record."""
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
    # Values begin at a multiple of 64, since they are mapped into memory.
    before = archive.start_dir + _HEADER + len(info.filename) + 4 + (_ZIP64_FIELD if is_large else 0)
    filler = -before % _ALIGNMENT
    info.extra = struct.pack("<HH", _FILLER, filler) + bytes(filler)
    with archive.open(info, "w", force_zip64=is_large) as record:
        for block in blocks:
            record.write(block)
