"""Random shapes, boxes and cuts: what hypothesis draws for the tests of boxes and chunks."""

import itertools
import math

from hypothesis import strategies as st

from colossalai.tensor import Box, flat_boxes, whole_box

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    """A box within a tensor; it may be empty where the tensor is."""
    offsets, sizes = [], []
    for extent in shape:
        begin = draw(st.integers(0, max(extent - 1, 0)))
        offsets.append(begin)
        sizes.append(draw(st.integers(min(1, extent), extent - begin)))
    return Box(tuple(offsets), tuple(sizes))


@st.composite
def cuts_of(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """Boxes that are all of a tensor, each element once: flat ranges, or halves of halves of ..."""
    if draw(st.booleans()):
        numel = math.prod(shape)
        at = sorted({0, numel, *draw(st.lists(st.integers(0, numel), max_size=3))})
        return [box for begin, end in itertools.pairwise(at) for box in flat_boxes(shape, begin, end)]
    boxes = [whole_box(shape)]
    for _ in range(draw(st.integers(0, 4))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        boxes += draw(halves_of(box))
    return boxes


@st.composite
def halves_of(draw: st.DrawFn, box: Box) -> list[Box]:
    """A box cut in two along one of its dimensions; itself where nothing can be cut."""
    dims = [dim for dim, size in enumerate(box.sizes) if size > 1]
    if not dims:
        return [box]
    dim = draw(st.sampled_from(dims))
    first = draw(st.integers(1, box.sizes[dim] - 1))
    end = list(box.offsets)
    end[dim] += first
    sizes = [list(box.sizes), list(box.sizes)]
    sizes[0][dim], sizes[1][dim] = first, box.sizes[dim] - first
    return [Box(box.offsets, tuple(sizes[0])), Box(tuple(end), tuple(sizes[1]))]
