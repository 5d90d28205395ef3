"""Small chains, and all segments that they can have."""

from collections.abc import Iterator
from functools import cache

from hypothesis import strategies as st

from colossalai.auto_parallel.checkpoint._chain import Chain, ChainBlock
from colossalai.runtime import RecomputeSegment

Found = tuple[RecomputeSegment, ...]


@st.composite
def chains(draw: st.DrawFn, most_blocks: int) -> Chain:
    """Draw a chain of small whole numbers of bytes and seconds."""
    num_blocks = draw(st.integers(1, most_blocks))
    has_gradients = draw(st.booleans())
    tensors = draw(st.lists(st.integers(0, 6), min_size=num_blocks + 1, max_size=num_blocks + 1))
    blocks = [
        ChainBlock(
            name=f"blocks.{number}",
            forward_s=draw(st.integers(0, 5)),
            backward_s=draw(st.integers(0, 5)),
            saved_bytes=draw(st.integers(0, 12)),
            input_bytes=tensors[number],
            output_bytes=tensors[number + 1],
            forward_peak=draw(st.integers(0, 8)),
            backward_peak=draw(st.integers(0, 8)),
            gradient_bytes=draw(st.integers(0, 6)) if has_gradients else 0,
        )
        for number in range(num_blocks)
    ]
    return Chain(tuple(blocks))


def even_chain(num_blocks: int, *, saved: int = 16, size: int = 1) -> Chain:
    """Return a chain of equal blocks."""
    each = {"saved_bytes": saved, "input_bytes": size, "output_bytes": size, "forward_peak": size}
    costs = {"forward_s": 1.0, "backward_s": 2.0, "backward_peak": 3 * size}
    return Chain(tuple(ChainBlock(name=f"blocks.{n}", **costs, **each) for n in range(num_blocks)))


def chain_with_a_large_gradient() -> Chain:
    """Return one whose peak is in a forward that keeps nothing, where the gradient behind it is live."""
    tensors, peaks = [2, 50, 4, 4, 100], [0, 200, 0, 0]
    return Chain(
        tuple(
            ChainBlock(
                name=str(number),
                forward_s=1,
                backward_s=2,
                saved_bytes=30,
                input_bytes=tensors[number],
                output_bytes=tensors[number + 1],
                forward_peak=peak,
            )
            for number, peak in enumerate(peaks)
        )
    )


@cache
def segmentations(num_blocks: int, *, end_in_segments: bool) -> tuple[Found, ...]:
    """Return all nested segments that a chain can have.

    Args:
        num_blocks: Of the chain.
        end_in_segments: Also those where the last block of the chain, or of a segment, is in an (inner) one.
    """
    return tuple(_in_range(0, num_blocks, end_in_segments))


def _in_range(first: int, last: int, end_in_segments: bool) -> Iterator[Found]:
    yield from _parts(first, last, end_in_segments)
    if end_in_segments and first < last:
        yield from ((each,) for each in _segments(first, last, end_in_segments))


def _parts(first: int, last: int, end_in_segments: bool) -> Iterator[Found]:
    """Yield those of a range but for the segment of all of it."""
    if first == last:
        yield ()
        return
    yield from _in_range(first + 1, last, end_in_segments)
    for end in range(first + 1, last):
        for segment in _segments(first, end, end_in_segments):
            for behind in _in_range(end, last, end_in_segments):
                yield segment, *behind


def _segments(first: int, last: int, end_in_segments: bool) -> Iterator[RecomputeSegment]:
    for inner in _parts(first, last, end_in_segments):
        yield RecomputeSegment(first, last, inner)
