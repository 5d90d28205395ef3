"""Packing: parameters, in the order of their initialization, in chunks of one size.

A chunk holds consecutive parameters and is sharded into sections of equal length, one for each rank. All
chunks shared by several parameters have one size, so that they can reuse memory; the unused elements at their
ends are waste. A layout is counted in elements and is the same in every dtype; this file has no memory and no
process group.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ChunkLayout:
    """Offsets of parameters in one chunk.

    Attributes:
        params: Positions of the parameters in the packed sequence, in the order of their offsets.
        starts: Offset of each parameter in elements.
        size: Number of elements of the chunk, a multiple of the number of ranks.
        num_used: Number of elements of parameters; the unused ones are at the end.
    """

    params: tuple[int, ...]
    starts: tuple[int, ...]
    size: int
    num_used: int


@dataclass(frozen=True)
class Packing:
    """Parameters of one group, packed.

    Attributes:
        chunk_size: Number of elements of every chunk but those of parameters that have one of their own.
        chunks: The chunks, in the order of their first parameters.
    """

    chunk_size: int
    chunks: tuple[ChunkLayout, ...]

    @property
    def num_used(self) -> int:
        """Number of elements of parameters."""
        return sum(chunk.num_used for chunk in self.chunks)

    @property
    def num_wasted(self) -> int:
        """Number of unused elements."""
        return sum(chunk.size - chunk.num_used for chunk in self.chunks)


def pack(
    numels: Sequence[int], chunk_size: int, *, num_ranks: int = 1, alone: Collection[int] = ()
) -> Packing:
    """Pack parameters, in their order, into chunks of one size.

    A chunk is closed when the next parameter does not fit. A parameter larger than the chunk size has a chunk
    of its own, of its own size rounded up to a multiple of the ranks; the parameters around it are neighbours
    as if it were not there, for else every bias between two large matrices would have a chunk.

    Args:
        numels: Number of elements of each parameter, in the order of initialization.
        chunk_size: Number of elements of a chunk, a multiple of `num_ranks`.
        num_ranks: Number of ranks over which each chunk is cut.
        alone: Positions of parameters that have their own chunk regardless of their size.

    Raises:
        ValueError: `chunk_size` is not a positive multiple of `num_ranks`, or one of `numels` is negative.
    """
    if num_ranks < 1 or chunk_size < 1 or chunk_size % num_ranks:
        raise ValueError(
            f"chunk_size={chunk_size} cannot be cut into equal sections for num_ranks={num_ranks}: give "
            "a positive multiple of the number of ranks, and 1 rank or more"
        )
    check_numels(numels)
    alone = frozenset(alone)
    chunks: list[ChunkLayout] = []
    shared: list[int] = []
    starts: list[int] = []
    filled = 0
    for position, numel in enumerate(numels):
        if numel > chunk_size or position in alone:
            size = max(-(-numel // num_ranks), 1) * num_ranks
            chunks.append(ChunkLayout((position,), (0,), size, numel))
            continue
        if filled + numel > chunk_size:
            chunks.append(ChunkLayout(tuple(shared), tuple(starts), chunk_size, filled))
            shared, starts, filled = [], [], 0
        shared.append(position)
        starts.append(filled)
        filled += numel
    if shared:
        chunks.append(ChunkLayout(tuple(shared), tuple(starts), chunk_size, filled))
    return Packing(chunk_size, tuple(sorted(chunks, key=lambda chunk: chunk.params[0])))


def check_numels(numels: Sequence[int]) -> None:
    """Refuse numbers of elements that no parameter has.

    Raises:
        ValueError: `numels` has a negative entry.
    """
    for position, numel in enumerate(numels):
        if numel < 0:
            raise ValueError(f"numels[{position}]={numel} is negative: a parameter has 0 elements or more")
