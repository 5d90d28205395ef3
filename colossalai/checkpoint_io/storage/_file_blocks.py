"""Blocks of files: their size, their reading, and a checksum at the speed of memory.

A file is written and read in blocks, so that only a few are in additional memory; their size follows from the
caller's buffer size.

For the checksum a file is taken as sectors of 4096 bytes, a sector as numbers of 64 bits, whose sum modulo
2**64 is taken; the checksum is the CRC-32 of these sums, 8 bytes for each 4096. A changed bit changes the sum
of its sector, and so do damaged words, but for one in 2**64; sectors that are lost, repeated or exchanged
change the CRC. Words that are exchanged within a sector are not detected; storage does not fail in this way.
CRC-32 of the bytes themselves took half the time of loading (docs/design/checkpoint_formats.md).
"""

import mmap
import os
import sys
import zlib
from collections.abc import Iterable, Iterator
from operator import itemgetter
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch

DEFAULT_BUFFER_MB = 512.0
_MB = 1024 * 1024
# A block being assembled, its received parts, a contiguous copy; and memory that the communication and the
# allocator keep of earlier blocks.
_BLOCKS_IN_BUFFER = 8
_MOST = 32 * _MB  # larger blocks are not written faster
MOST_READ = 8 * _MB  # nor are larger ones than this read faster
WRITTEN = 2 << 20  # bytes that are written at once, at multiples of it: a huge page of x86 and of most others
_SECTOR = 4096
_WORD = 8


def block_size(buffer_size: float) -> int:
    """Return how many bytes a block has at most.

    Args:
        buffer_size: The memory that may be used, in MB of 1024 * 1024 bytes.

    Raises:
        ValueError: `buffer_size` is too small to move a tensor at all.
    """
    size = int(buffer_size * _MB / _BLOCKS_IN_BUFFER)
    if size < 1024:
        raise ValueError(f"buffer_size={buffer_size} MB is too small: give at least 0.008, in MB")
    return min(size, _MOST)


def read_block_size(buffer_size: float) -> int:
    """Return how many bytes are read at once at most; see `block_size`.

    Raises:
        ValueError: `buffer_size` is too small to move a tensor at all.
    """
    return min(MOST_READ, block_size(buffer_size))


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor as numbers of 8 bits."""
    # Not view(-1): a single element keeps its stride there, and cannot be viewed as bytes.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor in host memory."""
    return flat_bytes(tensor).numpy().data


def aligned_blocks(tensor: torch.Tensor, begin: int, *, most: int) -> Iterator[memoryview]:
    """Yield the memory of a contiguous tensor in host memory, in blocks for a file.

    Args:
        tensor: The tensor.
        begin: Its offset in the file.
        most: Blocks end at multiples of it in the file: one of 2 MB can be a huge page of the page cache.
    """
    content = bytes_of(tensor)
    while content:
        size = most - begin % most
        yield content[:size]
        content, begin = content[size:], begin + len(content[:size])


class Checksum:
    """Checksum of bytes in blocks of any sizes."""

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


def file_checksum(path: Path, size: int, *, most: int) -> int:
    """Return the checksum of the first `size` bytes of a file, read in blocks of up to `most`.

    Raises:
        OSError: The file cannot be read, or ends before.
    """
    checksum = Checksum()
    for block in file_blocks(path, 0, size, most=most):
        checksum.update(block)
    return checksum.value


_SMALL = 256 << 10  # less is copied faster than mapped
_POPULATE_READ = 22  # MADV_POPULATE_READ, of Linux 5.14, for which Python has no name


def file_blocks(path: Path, begin: int, end: int, *, most: int) -> Iterator[memoryview]:
    """Yield the bytes of a file from `begin` to `end`; a block is valid until the next one is requested.

    Args:
        path: The file.
        begin: Offset of the first block.
        end: End of the last one.
        most: The most bytes of a block.

    Raises:
        OSError: The file cannot be read, or ends before.
    """
    with path.open("rb", buffering=0) as file:
        yield from _blocks(file, path, begin, end, most)


def read_into(path: Path, ranges: Iterable[tuple[int, torch.Tensor]], *, most: int) -> None:
    """Fill tensors with ranges of a file, which is opened once and read in the order of the offsets.

    Args:
        path: The file.
        ranges: Offsets in the file, each with a contiguous tensor in host memory, which takes as many bytes
            as it has.
        most: The most bytes that are read at once.

    Raises:
        OSError: The file cannot be read, or ends before.
    """
    with path.open("rb", buffering=0) as file:
        for begin, out in sorted(ranges, key=itemgetter(0)):
            rest = flat_bytes(out)
            # torch copies wide numbers faster than bytes.
            is_odd = (begin | len(rest) | most | rest.data_ptr()) % _WORD
            unit = torch.uint8 if is_odd else torch.int64
            for block in _blocks(file, path, begin, begin + len(rest), most):
                # The source gets no name: its memory is unmapped when the next block is requested.
                rest[: len(block)].view(unit).copy_(torch.frombuffer(block, dtype=unit))
                rest = rest[len(block) :]


def _blocks(file: BinaryIO, path: Path, begin: int, end: int, most: int) -> Iterator[memoryview]:
    while begin < end:
        stop = min(end, begin + most - begin % most)
        view = _mapped(file, begin, stop) if stop - begin >= _SMALL else None
        if view is None:
            yield _read(file, path, begin, stop)
        else:
            # Unmapped when the next block is asked for: a caller that keeps this one would fail there.
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
        # Loads the pages: an unreadable page is an error here instead of a fatal signal.
        view.madvise(_POPULATE_READ)
    except OSError:  # reading gives the reason
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
