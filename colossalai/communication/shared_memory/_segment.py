"""Shared segments, which processes of one machine map, and arenas for tensors.

A segment is sparse: all of it is mapped, and only reserved ranges take memory. A range is reserved before it
is written: on the first touch of an unreserved page without free memory the system would kill the process
with SIGBUS, while a failed reservation is an error that can be handled.

[Note: detection of shared machines]
Host names do not identify a machine: containers of one machine have different names, and machines with the
same image can have equal names. So a process publishes paths to its segment. A process that can open one of
them, and finds the segment's token there, shares the machine's memory. The first path is `/proc/PID/fd/N` of
a memfd, which has no name, is not limited by the size of `/dev/shm` and is freed with the last process that
maps it. If that path cannot be opened (another PID namespace, a hardened /proc), the segment is a file in
`/dev/shm`: with a random name, private to the user, and unlinked as soon as all ranks have opened it.

An arena is a segment of one process, whose tensors the other ranks of its machine read in place. A tensor
that is sent repeatedly, such as a bucket of gradients, can be allocated there instead of by torch; its
collectives then skip the copy into a slot. An arena is address space, in which blocks are reserved as tensors
are made; freed blocks are kept for reuse up to a bound.

[Note: access to lent operands]
A call lends its operand if that is in the arena of its rank. Each rank decides alone, and its header has the
offset of the operand. p ranks, an operand of p sections in each part:

| from | until | this rank's section | the section of rank s |
| --- | --- | --- | --- |
| the call | WRITTEN of this rank | its owner may write | its owner may write |
| WRITTEN | REDUCED of s (of this rank) | its owner alone reads, and writes the sum | rank s alone reads |
| REDUCED of s | the end of the part | all read (all-reduce only) | its owner writes the sum of s |
| the last part | DONE of all, for which the call waits | all may still read | no rank reads |

A gather has no REDUCED: all ranks read the owner's bytes, which no rank writes, until all are DONE. Compared
with slots, lending costs one wait more, at the end of the call: with slots, a rank can continue while other
ranks still read its data.

[Note: arenas and fork]
A forked child gets a copy of its parent's memory, but shares the arena. Its writes would change the gradients
of its parent, so the child maps the arena privately: pages that it has not written still show the parent's
changes. So an arena is only for data that is written before it is read, such as gradients. It is not for
parameters, which a child (for example, an evaluation process) expects to be constant.
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
LEAST_BYTES = 64 << 10  # smallest tensor in an arena; for smaller ones a slot is as fast
_MOST_KEPT = 64 << 20  # bytes of freed blocks that stay reserved
_TOKEN = 32  # bytes of the token at the beginning of a segment
_NAMED_FOLDER = Path("/dev/shm")
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_ADD_SEALS, _SEAL_SHRINK, _SEAL_GROW = 1033, 2, 4  # of fcntl(2); the module names them on some builds only


class NoMemoryError(RuntimeError):
    """Shared memory could not be reserved or mapped; the message has the requested size."""


class Segment:
    """Memory that several processes map.

    Args:
        descriptor: Descriptor of the open file, which the segment owns from now on.
        size: Size of the file in bytes.
        path: Path of the file, if it has a name.

    Attributes:
        size: Size in bytes.
        address: Address of the first byte in this process.
        words: The segment as unsigned 32-bit words; a word is read and written atomically.
    """

    def __init__(self, descriptor: int, size: int, path: Path | None = None) -> None:
        self.size = size
        self._descriptor = descriptor
        self._path = path
        self._map = mmap.mmap(descriptor, size)
        self.words = (ctypes.c_uint32 * (size // 4)).from_buffer(self._map)
        self.address = ctypes.addressof(self.words)

    def reserve(self, start: int, length: int) -> None:
        """Allocate memory for a range of bytes, as far as it has none.

        Raises:
            NoMemoryError: The system has no memory for them.
        """
        try:
            # Here an error can be handled; at the first write it would be SIGBUS.
            os.posix_fallocate(self._descriptor, start, length)
        except OSError as error:
            raise NoMemoryError(
                f"no {-(-length // 1024)} KiB of shared memory: {error.strerror or error}"
            ) from None

    def give_back(self, start: int, length: int) -> None:
        """Return the memory of whole pages to the system; they read as zeros afterwards."""
        self._map.madvise(mmap.MADV_REMOVE, start, length)

    def map_privately(self) -> None:
        """Map the same memory privately at the same address: other processes do not see later writes."""
        flags = mmap.MAP_PRIVATE | _MAP_FIXED | _MAP_NORESERVE
        _mmap(self.address, self.size, mmap.PROT_READ | mmap.PROT_WRITE, flags, self._descriptor, 0)

    @property
    def token(self) -> bytes:
        """Random bytes that identify the segment."""
        return self.read(0, _TOKEN)

    def tensor(self, start: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return `count` elements from byte `start` on as a tensor, for short use.

        The segment keeps no tensor of all its bytes: tools that count the memory of tensors would include it.
        """
        if count == 0:
            return torch.empty(0, dtype=dtype, device="cpu")
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=start)

    def read(self, start: int, length: int) -> bytes:
        """Return a range of bytes."""
        return self._map[start : start + length]

    def write(self, start: int, data: bytes) -> None:
        """Set a range of reserved bytes."""
        self._map[start : start + len(data)] = data

    def offers(self) -> list[str]:
        """Return the paths by which another process of this machine can open the segment, best first."""
        return [str(self._path)] if self._path else [f"/proc/{os.getpid()}/fd/{self._descriptor}"]

    def hide(self) -> None:
        """Unlink the file, after all ranks have opened it: from now on it ends with its processes."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            self._path = None

    def close(self) -> None:
        """Close the file; the memory is freed with the last tensor over it, in all processes."""
        self.hide()
        if self._descriptor >= 0:
            # The mapping stays, as tensors over it can be alive.
            os.close(self._descriptor)
            self._descriptor = -1


def create_segment(size: int, *, first: int, named: bool = False) -> Segment:
    """Make a segment of `size` bytes, of which the first `first` bytes are reserved.

    Args:
        size: Address space, a multiple of the page size.
        first: Number of bytes to reserve at the beginning.
        named: Whether to make a file with a name instead of a memfd.

    Raises:
        NoMemoryError: The system has no folder or no memory for it.
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
        if path is None:  # no process can truncate the file under the others
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
    """Map the segment of another process; return None if none of its paths leads to it.

    Args:
        offers: Paths from `Segment.offers`.
        token: Token of the segment.
        size: Size of the segment.
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
    """Memory for tensors of this process that other ranks read in place.

    Args:
        size: Bytes of address space, and the bound of the reserved bytes.

    Attributes:
        size: Bytes of address space, rounded up to pages.
        num_reserved: Number of reserved bytes.

    Raises:
        NoMemoryError: The system has no address space for it.
    """

    def __init__(self, size: int) -> None:
        self.size = -(-size // PAGE) * PAGE
        self._segment = create_segment(self.size, first=PAGE)
        self.num_reserved = 0
        self._kept: dict[int, list[int]] = {}  # freed blocks that stay reserved, by length
        self._num_kept = 0
        self._holes = [(PAGE, self.size - PAGE)]  # (start, length), sorted; adjacent ones are merged
        self._freed: deque[tuple[int, int]] = deque()  # filled by finalizers, which can run at any time
        self._lock = threading.Lock()
        os.register_at_fork(after_in_child=self._segment.map_privately)  # See [Note: arenas and fork]

    def offer(self) -> dict[str, Any]:
        """Return the data with which another process opens the arena."""
        return {"paths": self._segment.offers(), "token": self._segment.token.hex(), "size": self.size}

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Return an uninitialized flat tensor in the arena; None if there is no room for it."""
        length = -(-numel * dtype.itemsize // PAGE) * PAGE
        with self._lock:
            self._take_back()
            start = self._reserve(length) if numel else None
        if start is None:
            return None
        block = (ctypes.c_char * length).from_address(self._segment.address + start)
        # The storage of the tensor holds the block, so the finalizer runs with the end of its last view.
        weakref.finalize(block, self._freed.append, (start, length)).atexit = False
        return torch.frombuffer(block, dtype=dtype, count=numel)

    def give_back(self) -> None:
        """Return all freed blocks to the system."""
        with self._lock:
            self._take_back(most=0)
            for length, places in self._kept.items():
                for start in places:
                    self._release(start, length)
            self._kept.clear()
            self._num_kept = 0

    def place(self, address: int, num_bytes: int) -> int:
        """Return the offset of a range of bytes in the arena; 0 if it is not in the arena."""
        at = address - self._segment.address
        return at if 0 < at <= self.size - num_bytes else 0

    def _reserve(self, length: int) -> int | None:
        """Return the start of a block: a freed block of this length, or the first hole that fits."""
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
        """Keep freed blocks up to `most` bytes, and return the others to the system."""
        while self._freed:
            start, length = self._freed.popleft()
            if self._num_kept + length <= most:
                self._kept.setdefault(length, []).append(start)
                self._num_kept += length
            else:
                self._release(start, length)

    def _release(self, start: int, length: int) -> None:
        # Frees the pages for all processes. No rank reads the block: its tensor has ended.
        self._segment.give_back(start, length)
        self.num_reserved -= length
        self._holes = _joined([*self._holes, (start, length)])


class Arenas:
    """The arena of this process and the mapped arenas of others, shared by all groups."""

    def __init__(self) -> None:
        self._own: Arena | None = None
        self._pid = 0
        self._opened: weakref.WeakValueDictionary[str, Segment] = weakref.WeakValueDictionary()

    @property
    def num_reserved(self) -> int:
        """Number of reserved bytes of the arena of this process."""
        arena = self.current()
        return 0 if arena is None else arena.num_reserved

    def give_back(self) -> None:
        """Return the unused blocks of this process to the system."""
        if (arena := self.current()) is not None:
            arena.give_back()

    def current(self) -> Arena | None:
        """Return the arena of this process, if it has one."""
        return self._own if self._pid == os.getpid() else None

    def own(self, size: int) -> Arena | None:
        """Return the arena of this process, made with `size` on the first call; None if that fails."""
        if self._pid != os.getpid():
            self._pid, self._own = os.getpid(), None
            if hasattr(os, "memfd_create"):  # a named file could outlive the process
                with suppress(NoMemoryError):
                    self._own = Arena(size)
        return self._own

    def open(self, offer: Mapping[str, Any]) -> Segment | None:
        """Map the arena of another process, once for all groups; None if it cannot be mapped."""
        found = self._opened.get(offer["token"])
        if found is None:
            found = open_segment(offer["paths"], bytes.fromhex(offer["token"]), offer["size"])
            if found is not None:
                found.close()  # the mapping remains valid without the descriptor
                self._opened[offer["token"]] = found
        return found


def _joined(holes: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the holes sorted by start, with adjacent ones merged."""
    found: list[tuple[int, int]] = []
    for start, length in sorted(holes):
        if found and sum(found[-1]) == start:
            found[-1] = (found[-1][0], found[-1][1] + length)
        else:
            found.append((start, length))
    return found


_MEMCPY = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memcpy = _MEMCPY(("memcpy", ctypes.CDLL(None)))  # releases the GIL during a call
_INTS = (ctypes.c_int,) * 3
_MMAP = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, *_INTS, ctypes.c_long)
_mmap = _MMAP(("mmap", ctypes.CDLL(None)))


def copy_bytes(target: int, source: int, num_bytes: int) -> None:
    """Copy bytes between addresses with memcpy, without torch's dispatcher and without the GIL.

    Args:
        target: Target address.
        source: Source address; the same address, or a range that does not overlap.
        num_bytes: Number of bytes.
    """
    if num_bytes and target != source:
        _memcpy(target, source, num_bytes)


def _open_offer(offer: str, size: int) -> int:
    """Open the file of a segment, after checks of its type, owner, size and mode.

    Raises:
        OSError: The file cannot be opened, or is not a segment of this user.
    """
    is_named = not offer.startswith("/proc/")  # the path to a memfd is a link
    descriptor = os.open(offer, os.O_RDWR | os.O_CLOEXEC | (os.O_NOFOLLOW if is_named else 0))
    found = os.fstat(descriptor)
    is_ours = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and found.st_size == size
    if not is_ours or (is_named and found.st_mode & 0o077):
        os.close(descriptor)
        raise OSError(f"{offer} is not a segment of this user")
    return descriptor


def _place_of_files() -> Path:
    return _NAMED_FOLDER if _NAMED_FOLDER.is_dir() else Path(tempfile.gettempdir())
