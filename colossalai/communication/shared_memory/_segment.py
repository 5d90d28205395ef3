"""Shared segments: memory that processes of one machine map, and how they come by it; arenas for tensors.

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

An arena is the segment of a process, in which the other ranks of its machine read its tensors where they lie.
A tensor that is sent again and again, such as a bucket of gradients, may be allocated there instead of by
torch; then a collective copies nothing into a slot first. It is address space without memory, in which blocks
are reserved as tensors are made; what is freed is kept for the next ones up to a bound.

[Note: who writes while others read]
A call lends its operand if that lies in the arena of its rank; each rank decides alone, and its header says
where it is. p ranks, an operand of p sections in each part:

| from | until | this rank's section | the section of rank s |
| --- | --- | --- | --- |
| the call | WRITTEN of this rank | its owner may write | its owner may write |
| WRITTEN | REDUCED of s (of this rank) | its owner alone reads, and writes the sum | rank s alone reads |
| REDUCED of s | the end of the part | all read (all-reduce only) | its owner writes what s has summed |
| the last part | DONE of all, for which the call waits | all may still read | nobody reads |

A gather has no REDUCED: all read the owner's bytes, which nobody writes, until all are DONE. So what a call
that lends costs more than one through slots is the last wait: through slots a rank may go on while others
still read what it gave.

[Note: arenas and fork]
A forked child has a copy of all other memory of its parent, and here the memory itself. What it writes would
change the gradients of its parent, so the child maps the arena anew, for itself alone: it sees what it has
not written yet as the parent changes it. So only what is written before it is read belongs here: gradients,
and no parameters, which a child (say, one that evaluates) expects to stay as they were.
"""

import ctypes
import fcntl
import mmap
import os
import secrets
import stat
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

PAGE = mmap.PAGESIZE
LEAST_BYTES = 64 << 10  # of a tensor: what is smaller goes through a slot as fast
_MOST_KEPT = 64 << 20  # bytes of freed blocks that stay reserved
_TOKEN = 32  # bytes at the beginning of a segment, by which it is known
_NAMED_FOLDER = Path("/dev/shm")
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
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

    def give_back(self, start: int, length: int) -> None:
        """Let the system have the memory of whole pages again; they read as zeros then."""
        self._map.madvise(mmap.MADV_REMOVE, start, length)

    def map_privately(self) -> None:
        """Map the same memory for this process alone, in the same place: what it writes, nobody else sees."""
        flags = mmap.MAP_PRIVATE | _MAP_FIXED | _MAP_NORESERVE
        _mmap(self.address, self.size, mmap.PROT_READ | mmap.PROT_WRITE, flags, self._descriptor, 0)

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


class Arena:
    """The memory of this process.

    Args:
        size: Bytes of address space, and the most that is ever reserved.

    Attributes:
        size: As given.
        num_reserved: Bytes that take memory now.

    Raises:
        NoMemoryError: The system gives no address space for it.
    """

    def __init__(self, size: int) -> None:
        self.size = -(-size // PAGE) * PAGE
        self._segment = create_segment(self.size, first=PAGE)
        self.num_reserved = 0
        self._kept: dict[int, list[int]] = {}  # places of freed blocks that are reserved still, by length
        self._num_kept = 0
        self._holes = [(PAGE, self.size - PAGE)]  # place and length, by place; none next to another
        self._freed: deque[tuple[int, int]] = deque()  # by finalizers, which may run at any moment
        self._lock = threading.Lock()
        os.register_at_fork(after_in_child=self._segment.map_privately)  # See [Note: arenas and fork]

    def offer(self) -> dict[str, Any]:
        """Return what another process opens it by."""
        return {"paths": self._segment.offers(), "token": self._segment.token.hex(), "size": self.size}

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Return a flat tensor that lies here, of no certain values; None where there is no room for it."""
        length = -(-numel * dtype.itemsize // PAGE) * PAGE
        with self._lock:
            self._take_back()
            start = self._reserve(length) if numel else None
        if start is None:
            return None
        block = (ctypes.c_char * length).from_address(self._segment.address + start)
        # The storage of the tensor holds the block, so this is called when the last view of it has gone.
        weakref.finalize(block, self._freed.append, (start, length)).atexit = False
        return torch.frombuffer(block, dtype=dtype, count=numel)

    def give_back(self) -> None:
        """Give all freed blocks back to the system."""
        with self._lock:
            self._take_back(most=0)
            for length, places in self._kept.items():
                for start in places:
                    self._release(start, length)
            self._kept.clear()
            self._num_kept = 0

    def place(self, address: int, num_bytes: int) -> int:
        """Return where some bytes of this process lie in the arena; 0 if they do not."""
        at = address - self._segment.address
        return at if 0 < at <= self.size - num_bytes else 0

    def _reserve(self, length: int) -> int | None:
        """Return a place for a block: one that was freed, or the first hole where it fits."""
        if places := self._kept.get(length):
            self._num_kept -= length
            return places.pop()
        for number, (start, free) in enumerate(self._holes):
            if length <= free:
                with suppress(NoMemoryError):
                    self._segment.reserve(start, length)
                    self._holes[number : number + 1] = [(start + length, free - length)] * (free > length)
                    self.num_reserved += length
                    return start
                return None
        return None

    def _take_back(self, *, most: int = _MOST_KEPT) -> None:
        """Keep the blocks that were freed, up to `most` bytes; the system gets the others."""
        while self._freed:
            start, length = self._freed.popleft()
            if self._num_kept + length <= most:
                self._kept.setdefault(length, []).append(start)
                self._num_kept += length
            else:
                self._release(start, length)

    def _release(self, start: int, length: int) -> None:
        self._segment.give_back(start, length)
        self.num_reserved -= length
        self._holes = _joined([*self._holes, (start, length)])


class Arenas:
    """The arena of this process, and those of others that it has mapped, for all groups together."""

    def __init__(self) -> None:
        self._own: Arena | None = None
        self._pid = 0
        self._opened: weakref.WeakValueDictionary[str, Segment] = weakref.WeakValueDictionary()

    @property
    def num_reserved(self) -> int:
        """Bytes that the arena of this process takes now."""
        arena = self.current()
        return 0 if arena is None else arena.num_reserved

    def give_back(self) -> None:
        """Give back what this process has reserved and does not use."""
        if (arena := self.current()) is not None:
            arena.give_back()

    def current(self) -> Arena | None:
        """Return the arena of this process, if it has one."""
        return self._own if self._pid == os.getpid() else None

    def own(self, size: int) -> Arena | None:
        """Return that of this process, made with `size` if it is not there; None where it cannot be made."""
        if self._pid != os.getpid():
            self._pid, self._own = os.getpid(), None
            if hasattr(os, "memfd_create"):  # a file with a name would stay behind
                with suppress(NoMemoryError):
                    self._own = Arena(size)
        return self._own

    def open(self, offer: Mapping[str, Any]) -> Segment | None:
        """Map the arena of another process, once for all groups; None if it cannot be mapped."""
        found = self._opened.get(offer["token"])
        if found is None:
            found = open_segment(offer["paths"], bytes.fromhex(offer["token"]), offer["size"])
            if found is not None:
                found.close()  # what is mapped stays; the descriptor is of no more use
                self._opened[offer["token"]] = found
        return found


def _joined(holes: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return holes by place, those that touch as one."""
    found: list[tuple[int, int]] = []
    for start, length in sorted(holes):
        if found and sum(found[-1]) == start:
            found[-1] = (found[-1][0], found[-1][1] + length)
        else:
            found.append((start, length))
    return found


_MEMCPY = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memcpy = _MEMCPY(("memcpy", ctypes.CDLL(None)))  # gives up Python's lock for the time of a call
_INTS = (ctypes.c_int,) * 3
_MMAP = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, *_INTS, ctypes.c_long)
_mmap = _MMAP(("mmap", ctypes.CDLL(None)))


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
