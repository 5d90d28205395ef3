"""A checksum of files at the speed of memory.

A file is taken as sectors of 4096 bytes, a sector as numbers of 64 bits, whose sum modulo 2**64 is taken; the
checksum is the CRC-32 of these sums, 8 bytes for each 4096. A changed bit changes the sum of its sector, and
so do damaged words, but for one in 2**64; sectors that are lost, repeated or exchanged change the CRC. Words
that are exchanged within a sector go unseen, which is no way in which storage fails. CRC-32 of the bytes
themselves took half the time of loading (docs/design/checkpoint.md).
"""

import mmap
import os
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

_SECTOR = 4096
_WORD = 8


class Checksum:
    """The checksum of bytes that come in blocks, whatever their sizes."""

    def __init__(self) -> None:
        self._crc = 0
        self._rest = b""  # the beginning of a sector

    def update(self, block: bytes | memoryview) -> None:
        """Take the next bytes."""
        content = memoryview(block).cast("B")
        if self._rest:
            missing = _SECTOR - len(self._rest)
            self._rest += bytes(content[:missing])
            content = content[missing:]
            if len(self._rest) < _SECTOR:
                return
            self._add(self._rest)
        whole = len(content) // _SECTOR * _SECTOR
        self._add(content[:whole])
        self._rest = bytes(content[whole:])

    @property
    def value(self) -> int:
        """The checksum of all bytes so far."""
        tail = self._rest + bytes(-len(self._rest) % _WORD)
        if not tail:
            return self._crc
        return zlib.crc32(np.frombuffer(tail, np.uint64).sum(dtype=np.uint64).tobytes(), self._crc)

    def _add(self, sectors: bytes | memoryview) -> None:
        words = np.frombuffer(sectors, np.uint64).reshape(-1, _SECTOR // _WORD)
        self._crc = zlib.crc32(np.add.reduce(words, axis=1).data, self._crc)


WRITTEN = 2 << 20  # bytes that are written at once, at multiples of it: a huge page of x86 and of most others
_SMALL = 256 << 10  # less is copied faster than mapped
_POPULATE_READ = 22  # MADV_POPULATE_READ, of Linux 5.14, for which Python has no name


def file_blocks(path: Path, begin: int, end: int, *, most: int) -> Iterator[memoryview]:
    """Yield the bytes of a file from `begin` to `end`; a block can be used until the next one is asked for.

    Args:
        path: The file.
        begin: Where the first block begins.
        end: Where the last one ends.
        most: The most bytes of a block.

    Raises:
        OSError: The file cannot be read, or ends before.
    """
    with path.open("rb", buffering=0) as file:
        while begin < end:
            stop = min(end, begin + most - begin % most)
            view = _mapped(file, begin, stop) if stop - begin >= _SMALL else None
            if view is None:
                yield _read(file, path, begin, stop)
            else:
                with view, memoryview(view)[begin % mmap.ALLOCATIONGRANULARITY :] as block:
                    yield block
            begin = stop


def _mapped(file: BinaryIO, begin: int, end: int) -> mmap.mmap | None:
    """Return a part of a file, in memory, from the beginning of a page on; None if that cannot be had."""
    if sys.platform != "linux":
        return None
    start = begin // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    try:
        # A private mapping: torch takes no memory that it could not write to.
        view = mmap.mmap(file.fileno(), end - start, offset=start, access=mmap.ACCESS_COPY)
    except (OSError, ValueError):  # the file system maps nothing, or the file has been cut
        return None
    try:
        view.madvise(_POPULATE_READ)
    except OSError:  # reading tells why
        view.close()
        return None
    return view


def _read(file: BinaryIO, path: Path, begin: int, end: int) -> memoryview:
    block = memoryview(bytearray(end - begin))
    done = 0
    while done < len(block):
        count = os.preadv(file.fileno(), [block[done:]], begin + done)
        if count == 0:
            raise OSError(f"{path} ends at byte {begin + done}, where more was expected")
        done += count
    return block
