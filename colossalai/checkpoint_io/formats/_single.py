"""Single files: torch's zip format or safetensors, told apart by their first bytes; small states in one.

Both are read memory-mapped: what comes back is a view of the file, and only what is copied out of it costs
memory. Both carry checksums: torch's zip archive by its nature, our safetensors files as CRC-32 of each
tensor in the header. Nothing in a file is executed unless the caller says that it may be.
"""

import enum
import json
import pickle
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import safetensors
import safetensors.torch
import torch

from colossalai.checkpoint_io._collective import called_by_all_ranks, on_every_rank
from colossalai.checkpoint_io.formats._safetensors import CHECKSUMS, has_intact_header
from colossalai.checkpoint_io.formats._torch_file import refuse_broken_frame, refuse_truncated, seal
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

_TORCH_ZIP = b"PK\x03\x04"
_TORCH_LEGACY = b"\x80\x02"  # a pickle of protocol 2: torch before 1.6

_ALLOWING = (
    "If you trust whoever made it, load_model and load_checkpoint (and Booster.load_model) read it with "
    "allow_pickle=True"
)


class Format(enum.Enum):
    """What a file holds, as seen from its content."""

    TORCH_ZIP = enum.auto()
    TORCH_LEGACY = enum.auto()
    SAFETENSORS = enum.auto()


def detect_format(path: Path) -> Format:
    """Tell a file's format by its first bytes.

    Raises:
        ValueError: The file has none of the formats, or is no regular file.
        OSError: The file cannot be read.
    """
    refuse_special(path)
    with path.open("rb") as file:
        start = file.read(9)
    # First, as the length of a header may happen to have the bytes of the other marks.
    if start[8:] == b"{" and int.from_bytes(start[:8], "little") <= path.stat().st_size - 8:
        return Format.SAFETENSORS
    if start.startswith(_TORCH_ZIP):
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
    is_zip = detect_format(path) is Format.TORCH_ZIP
    try:
        if is_zip:
            with zipfile.ZipFile(path) as archive:
                refuse_truncated(path, archive)  # it says so better than torch
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
    match detect_format(path):
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
        OSError: The file cannot be written; on all ranks. What was there before is still there.
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
    verify(path)
    content = read_torch(path, mapped=mapped, allow_pickle=allow_pickle)
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__} where a dict is expected")
    return content
