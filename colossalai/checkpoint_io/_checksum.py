"""A checksum of files at the speed of memory.

A file is taken as sectors of 4096 bytes, a sector as numbers of 64 bits, whose sum modulo 2**64 is taken; the
checksum is the CRC-32 of these sums, 8 bytes for each 4096. A changed bit changes the sum of its sector, and
so do damaged words, but for one in 2**64; sectors that are lost, repeated or exchanged change the CRC. Words
that are exchanged within a sector go unseen, which is no way in which storage fails. CRC-32 of the bytes
themselves took half the time of loading (docs/design/checkpoint.md).
"""

import zlib

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
