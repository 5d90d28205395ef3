"""Tensors as a sequence of blocks: in row-major order, none larger than a limit.

A file is written so that no more than a few blocks are in memory beside what the ranks hold anyway. The
limit follows from the buffer size that the caller gives.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from colossalai.checkpoint_io.resharding import Box, Entry, Stored, whole_box

DEFAULT_BUFFER_MB = 512.0
_MB = 1024 * 1024
# One that is assembled, what was received of it, a copy that makes it contiguous; and what the communication
# and the allocator keep of the ones before.
_BLOCKS_IN_BUFFER = 8
_MOST = 32 * _MB  # larger blocks are not written faster

Blocks = Callable[[Entry], Iterator[torch.Tensor]]
"""Gives the blocks of a tensor, contiguous and in host memory."""


def block_size(buffer_size: float) -> int:
    """Return how many bytes a block has at most.

    Args:
        buffer_size: The memory that may be used, in MB of 1024 * 1024 bytes.

    Raises:
        ValueError: It is too small to move a tensor at all.
    """
    size = int(buffer_size * _MB / _BLOCKS_IN_BUFFER)
    if size < 1024:
        raise ValueError(f"buffer_size={buffer_size} MB is too small: give at least 0.008, in MB")
    return min(size, _MOST)


def block_boxes(shape: Sequence[int], *, most: int) -> Iterator[Box]:
    """Yield boxes of up to `most` elements that are, one after the other, a row-major tensor."""
    shape, numel = tuple(shape), math.prod(shape)
    if numel <= most:
        if numel > 0:
            yield whole_box(shape)
        return
    rows = most * shape[0] // numel
    if rows == 0:
        for row in range(shape[0]):
            for box in block_boxes(shape[1:], most=most):
                yield Box((row, *box.offsets), (1, *box.sizes))
        return
    for first in range(0, shape[0], rows):
        yield Box((first, *(0 for _ in shape[1:])), (min(rows, shape[0] - first), *shape[1:]))


def stored_blocks(tensor: Entry, *, size: int) -> Iterator[torch.Tensor]:
    """Yield the blocks of a tensor in a checkpoint.

    Args:
        tensor: The tensor, `Stored`.
        size: The most bytes of a block.
    """
    assert isinstance(tensor, Stored), "what is not stored has to be gathered"
    for box in block_boxes(tensor.shape, most=max(1, size // tensor.dtype.itemsize)):
        block = torch.empty(box.sizes, dtype=tensor.dtype)
        tensor.read(box, block)
        yield block


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor."""
    return flat_bytes(tensor).numpy().data


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor as numbers of 8 bits."""
    # Not view(-1): that of a single element keeps its stride, by which it is no row of bytes.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


class Flow:
    """The bytes of several tensors, one after the other.

    Where they come from other ranks, these send them whatever happens here: so the flow is taken to its end,
    by `drain` if not by use.

    Args:
        tensors: The tensors, in the order in which they are asked for.
        blocks: Gives the blocks of each.
    """

    def __init__(self, tensors: Iterable[Entry], blocks: Blocks) -> None:
        self._blocks = (block for tensor in tensors for block in blocks(tensor))

    def of(self, tensor: Entry) -> Iterator[memoryview]:
        """Yield the bytes of the next tensor."""
        left = tensor.nbytes
        while left > 0:
            block = bytes_of(next(self._blocks))
            left -= len(block)
            yield block
        assert left == 0, "a block belongs to one tensor"

    def drain(self) -> None:
        """Take what has not been asked for, and forget it."""
        for _ in self._blocks:
            pass
