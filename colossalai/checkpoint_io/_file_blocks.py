"""The bytes of a file, block after block, without a copy of them where that can be had.

A block is mapped into memory rather than read into it. What the disk cannot give would then kill the process
when it is looked at; so the kernel is asked to bring all of a block in first, and refuses if it cannot. Then,
and where there is no such call, the block is read: slower by the copy, and an error has its reason.
Blocks end at multiples of their size in the file. A file that was written in such blocks of `WRITTEN` bytes
lies in the page cache in huge pages, each of which is mapped in one step.
"""

import mmap
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

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
