"""Reader of torch's distributed checkpoints (DCP): shards of global tensors, as ours are.

Their metadata are a pickle, which could execute anything: it is read only where the caller allows it. A shard
is a torch file within a file; only its values are mapped into memory.
"""

import io
import os
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from colossalai.checkpoint_io.resharding import FlatStateDict, StoredShard, StoredStateDict, StoredTensor
from colossalai.checkpoint_io.storage import refuse_strays
from colossalai.tensor import Box

DCP_INDEX = ".metadata"


@dataclass(frozen=True, eq=False)
class DcpShard(StoredShard):
    """A shard in a file of torch's.

    Attributes:
        box: Which part of the tensor it is.
        path: The file.
        begin: The offset of the torch file within it.
        length: Bytes of that.
    """

    box: Box
    path: Path
    begin: int
    length: int

    def read(self, box: Box, out: torch.Tensor) -> None:
        """See the base class."""
        out.copy_(box.of(_values(self.path, self.begin, self.length)))


def read_dcp(folder: Path, *, allow_pickle: bool) -> tuple[StoredStateDict, dict[str, object]]:
    """Open a folder that `torch.distributed.checkpoint.save` wrote.

    Args:
        folder: The folder.
        allow_pickle: Whether its index, a pickle, may be read.

    Returns:
        Its tensors by their full names, and the other values; None for a value that is not plain.

    Raises:
        ValueError: Reading a pickle is not allowed, or the checkpoint is damaged.
        OSError: The checkpoint cannot be read.
    """
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

    path = folder / DCP_INDEX
    if not allow_pickle:
        raise ValueError(
            f"{path} is a pickle, which can execute any code when it is read: give --allow-pickle if you "
            f"trust its origin"
        )
    try:
        metadata = pickle.loads(path.read_bytes())
        refuse_strays({place.relative_path for place in metadata.storage_data.values()}, path, is_flat=False)
        tensors: dict[str, StoredTensor] = {}
        others: dict[str, object] = {}
        for name, entry in metadata.state_dict_metadata.items():
            if isinstance(entry, BytesStorageMetadata):
                others[name] = _plain_value(folder, metadata.storage_data[MetadataIndex(name)])
            else:
                tensors[name] = _dcp_tensor(folder, name, entry, metadata.storage_data)
    except (pickle.UnpicklingError, AttributeError, KeyError, EOFError, TypeError) as error:
        raise ValueError(f"{path} is damaged or of another version of torch: {error!r}") from error
    return FlatStateDict(tensors, None), others


def _dcp_tensor(folder: Path, name: str, entry: Any, places: Mapping[Any, Any]) -> StoredTensor:
    from torch.distributed.checkpoint.metadata import MetadataIndex

    shards = []
    for number, chunk in enumerate(entry.chunks):
        place = places[MetadataIndex(name, chunk.offsets, number)]
        if getattr(place, "transform_descriptors", None):
            kinds = place.transform_descriptors
            raise ValueError(f"{name} is stored through {kinds}: only plain tensors can be read")
        box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
        shards.append(DcpShard(box, folder / place.relative_path, place.offset, place.length))
    return StoredTensor(tuple(entry.size), entry.properties.dtype, tuple(shards))


def _plain_value(folder: Path, place: Any) -> Any:
    with (folder / place.relative_path).open("rb") as file:
        file.seek(place.offset)
        content = file.read(place.length)
    try:
        return torch.load(io.BytesIO(content), weights_only=True)
    except pickle.UnpicklingError:
        return None


def _values(path: Path, offset: int, length: int) -> torch.Tensor:
    """Return the values of a shard as a view of the file."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with (
        path.open("rb") as file,
        io.BufferedReader(_Slice(file, offset, length)) as part,
        FakeTensorMode(),  # shapes and places only
    ):
        fake = torch.load(part, weights_only=True)
    if not fake.numel():
        return torch.empty(tuple(fake.shape), dtype=fake.dtype)
    begin = offset + fake.untyped_storage()._checkpoint_offset
    end = begin + fake.untyped_storage().nbytes()
    content = torch.from_file(str(path), shared=False, size=end, dtype=torch.uint8)[begin:]
    if begin % fake.dtype.itemsize:
        content = content.clone()
    values = content.view(fake.dtype)
    return values.as_strided(fake.shape, fake.stride(), values.storage_offset() + fake.storage_offset())


class _Slice(io.RawIOBase):
    """A part of a file that is read as a file.

    Args:
        file: The file.
        begin: Its offset.
        length: Its bytes.
    """

    def __init__(self, file: BinaryIO, begin: int, length: int) -> None:
        super().__init__()
        self._file = file
        self._begin = begin
        self._length = length
        self._place = 0

    def readable(self) -> bool:
        """Return that it can be read."""
        return True

    def seekable(self) -> bool:
        """Return that any place can be gone to."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Go to a place."""
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._length}[whence]
        self._place = start + offset
        return self._place

    def tell(self) -> int:
        """Return the place."""
        return self._place

    def readinto(self, buffer: Any, /) -> int:
        """Fill the buffer, up to the end of the part."""
        view = memoryview(buffer).cast("B")[: max(0, self._length - self._place)]
        content = os.pread(self._file.fileno(), len(view), self._begin + self._place)
        view[: len(content)] = content
        self._place += len(content)
        return len(content)
