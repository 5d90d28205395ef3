"""Shared segments: memory that processes of one machine map, and how they come by it.

A segment is sparse: it is mapped whole, and takes memory only where it was reserved. Nothing is written to a
place that was not reserved: a page that the system cannot give when it is first touched ends a process with
SIGBUS, while a reservation that fails is an error that can be answered.

[Note: who shares a machine]
Names of hosts say nothing: containers of one machine have different ones, and images start with the same. So
a process offers ways to open its segment, and whoever can open one, maps it and finds the segment's token
there shares the machine's memory. The first way is `/proc/PID/fd/N` of a memfd, which has no name, is not
bounded by `/dev/shm` and is gone with the last process that maps it, however that ends. Where it is closed
(another PID namespace, a hardened /proc) a file in `/dev/shm` serves: with a name that cannot be guessed, for
this user alone, and unlinked as soon as all have opened it.
"""

import ctypes
import fcntl
import mmap
import os
import secrets
import stat
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

PAGE = mmap.PAGESIZE
_TOKEN = 32  # bytes at the beginning of a segment, by which it is known
_NAMED_FOLDER = Path("/dev/shm")
_ADD_SEALS, _SEAL_SHRINK, _SEAL_GROW = 1033, 2, 4  # of fcntl(2); the module names them on some builds only


class NoMemoryError(RuntimeError):
    """Shared memory that could not be reserved or mapped; the message says how much was asked for."""


class Segment:
    """Memory that several processes map.

    Args:
        descriptor: Of the open file; owned by the segment from here on.
        size: Of the file, in bytes.
        path: Where the file still has a name.

    Attributes:
        size: In bytes.
        address: Of the first byte in this process.
        words: All of it, as unsigned 32-bit words; one word is read and written in one piece.
    """

    def __init__(self, descriptor: int, size: int, path: Path | None = None) -> None:
        self.size = size
        self._descriptor = descriptor
        self._path = path
        self._map = mmap.mmap(descriptor, size)
        self.words = (ctypes.c_uint32 * (size // 4)).from_buffer(self._map)
        self.address = ctypes.addressof(self.words)

    def reserve(self, start: int, length: int) -> None:
        """Have the system give memory for some bytes now, as far as it has not.

        Raises:
            NoMemoryError: The system has no memory for them.
        """
        try:
            os.posix_fallocate(self._descriptor, start, length)
        except OSError as error:
            raise NoMemoryError(
                f"no {-(-length // 1024)} KiB of shared memory: {error.strerror or error}"
            ) from None

    @property
    def token(self) -> bytes:
        """What this segment is known by."""
        return self.read(0, _TOKEN)

    def tensor(self, start: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return `count` elements from byte `start` on as a tensor, which is to be let go of soon.

        There is no tensor of it all: it would look like so much memory to whoever counts that of tensors.
        """
        if count == 0:
            return torch.empty(0, dtype=dtype, device="cpu")
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=start)

    def read(self, start: int, length: int) -> bytes:
        """Return some bytes of it."""
        return self._map[start : start + length]

    def write(self, start: int, data: bytes) -> None:
        """Set some bytes of it; they have been reserved."""
        self._map[start : start + len(data)] = data

    def offers(self) -> list[str]:
        """Return the paths by which another process of this machine may open it, the best first."""
        return [str(self._path)] if self._path else [f"/proc/{os.getpid()}/fd/{self._descriptor}"]

    def hide(self) -> None:
        """Take its name away: all have opened it, and nothing is left behind from now on."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            self._path = None

    def close(self) -> None:
        """Let go of it: the memory is returned when the last tensor over it has gone, in all processes."""
        self.hide()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def create_segment(size: int, *, first: int, named: bool = False) -> Segment:
    """Make a segment of `size` bytes, of which the `first` ones are reserved.

    Args:
        size: Address space, a multiple of the page size.
        first: Bytes at its beginning that will be written to whatever happens.
        named: Make a file with a name instead of a memfd.

    Raises:
        NoMemoryError: The system has no place or no memory for it.
    """
    path = None
    try:
        if named or not hasattr(os, "memfd_create"):
            path = _place_of_files() / f"colossalai-{secrets.token_hex(16)}"
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(path, flags, 0o600)
        else:
            descriptor = os.memfd_create("colossalai", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise NoMemoryError(f"no shared memory can be made here: {error}") from None
    try:
        os.ftruncate(descriptor, size)
        os.posix_fallocate(descriptor, 0, first)
        if path is None:  # nobody can take memory away under those who have mapped it
            fcntl.fcntl(descriptor, _ADD_SEALS, _SEAL_SHRINK | _SEAL_GROW)
        segment = Segment(descriptor, size, path)
    except (OSError, ValueError) as error:
        os.close(descriptor)
        if path is not None:
            path.unlink(missing_ok=True)
        raise NoMemoryError(f"no {-(-first // 1024)} KiB of shared memory: {error}") from None
    segment.write(0, secrets.token_bytes(_TOKEN))
    return segment


def open_segment(offers: Sequence[str], token: bytes, size: int) -> Segment | None:
    """Map what another process offers; None where none of its offers leads to its memory.

    Args:
        offers: Of `Segment.offers`.
        token: Of the segment, by which it is known.
        size: Of the segment.
    """
    for offer in offers:
        with suppress(OSError, ValueError):
            descriptor = _open_offer(offer, size)
            try:
                segment = Segment(descriptor, size)
            except (OSError, ValueError):
                os.close(descriptor)
                raise
            if segment.token == token:
                return segment
            segment.close()
    return None


_MEMCPY = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memcpy = _MEMCPY(("memcpy", ctypes.CDLL(None)))  # gives up Python's lock for the time of a call


def copy_bytes(target: int, source: int, num_bytes: int) -> None:
    """Copy bytes between addresses, by the C library: past torch's dispatcher, without Python's lock.

    Args:
        target: Where to.
        source: Where from; the same address or a range that does not overlap.
        num_bytes: How many.
    """
    if num_bytes and target != source:
        _memcpy(target, source, num_bytes)


def _open_offer(offer: str, size: int) -> int:
    """Open a file if it is one that a rank of ours may have made.

    Raises:
        OSError: The file cannot be opened, or is not such a one.
    """
    is_named = not offer.startswith("/proc/")  # there the link itself is the way to a memfd
    descriptor = os.open(offer, os.O_RDWR | os.O_CLOEXEC | (os.O_NOFOLLOW if is_named else 0))
    found = os.fstat(descriptor)
    is_ours = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and found.st_size == size
    if not is_ours or (is_named and found.st_mode & 0o077):
        os.close(descriptor)
        raise OSError(f"{offer} is not a segment of this user")
    return descriptor


def _place_of_files() -> Path:
    return _NAMED_FOLDER if _NAMED_FOLDER.is_dir() else Path(tempfile.gettempdir())
