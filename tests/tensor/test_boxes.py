"""Boxes of a tensor: flat ranges as boxes, what two have in common, whether some are all of it."""

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from colossalai.tensor import Box, flat_boxes, is_tiled, whole_box
from tests.checkpoint_io.cuts import SHAPES, boxes_in, cuts_of

pytestmark = pytest.mark.unit


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor whose elements are their own places in it."""
    return torch.arange(math.prod(shape)).view(shape)


@given(st.data(), SHAPES)
def test_a_flat_range_is_a_few_boxes_in_order(data: st.DataObject, shape: tuple[int, ...]) -> None:
    numel = math.prod(shape)
    begin = data.draw(st.integers(0, numel))
    end = data.draw(st.integers(begin, numel))
    boxes = flat_boxes(shape, begin, end)
    assert len(boxes) <= max(2 * len(shape) - 1, 1)
    whole = numbered(shape)
    found = [place for box in boxes for place in box.of(whole).flatten().tolist()]
    assert found == list(range(begin, end))


def test_as_many_boxes_as_there_can_be() -> None:
    assert len(flat_boxes((4, 4, 4, 4), 1, 255)) == 7
    assert flat_boxes((2, 3), 1, 6) == [Box((0, 1), (1, 2)), Box((1, 0), (1, 3))]
    assert flat_boxes((), 0, 1) == [Box((), ())]


@given(st.data(), SHAPES)
def test_what_two_boxes_have_in_common(data: st.DataObject, shape: tuple[int, ...]) -> None:
    one, other = data.draw(boxes_in(shape)), data.draw(boxes_in(shape))
    whole = numbered(shape)
    common = one.overlap(other)
    found = set() if common is None else set(common.of(whole).flatten().tolist())
    assert found == set(one.of(whole).flatten().tolist()) & set(other.of(whole).flatten().tolist())
    assert common is None or common.numel > 0
    assert common == other.overlap(one)


@given(st.data(), SHAPES)
def test_a_box_of_a_box(data: st.DataObject, shape: tuple[int, ...]) -> None:
    outer = data.draw(boxes_in(shape))
    inner = data.draw(boxes_in(outer.sizes))
    moved = inner.moved(outer.offsets)
    whole = numbered(shape)
    assert torch.equal(moved.of(whole), inner.of(outer.of(whole)))
    assert moved.moved(outer.offsets, sign=-1) == inner


@given(st.data(), SHAPES)
def test_a_box_of_a_permuted_tensor(data: st.DataObject, shape: tuple[int, ...]) -> None:
    box, dims = data.draw(boxes_in(shape)), data.draw(st.permutations(range(len(shape))))
    whole = numbered(shape)
    assert torch.equal(box.permuted(dims).of(whole.permute(dims)), box.of(whole).permute(dims))


@given(st.data(), SHAPES)
def test_a_cut_is_all_of_a_tensor(data: st.DataObject, shape: tuple[int, ...]) -> None:
    boxes = data.draw(st.permutations(data.draw(cuts_of(shape))))
    assert is_tiled(shape, boxes)
    filled = [box for box in boxes if box.numel > 0]
    assume(filled)
    assert not is_tiled(shape, filled[1:])
    assert not is_tiled(shape, [*filled, filled[0]])


@given(st.data(), SHAPES.filter(len))
def test_boxes_that_hide_a_hole(data: st.DataObject, shape: tuple[int, ...]) -> None:
    """As many elements as the tensor has, but not each once."""
    boxes = [box for box in data.draw(cuts_of(shape)) if box.numel > 0]
    number = data.draw(st.integers(0, max(len(boxes) - 1, 0)))
    dim, by = data.draw(st.integers(0, len(shape) - 1)), data.draw(st.sampled_from([-1, 1]))
    assume(boxes)
    boxes[number] = boxes[number].moved([by if axis == dim else 0 for axis in range(len(shape))])
    assert not is_tiled(shape, boxes)


@pytest.mark.parametrize(
    "boxes",
    [
        [],
        [Box((0,), (2,))],  # of another number of dimensions
        [Box((0, 0), (2,))],
        [Box((0, 0), (2, 4))],  # too wide
        [Box((0, 0), (3, 3)), Box((2, 0), (-1, 3))],
        [Box((0, 0), (1, 3)), Box((1, 1), (1, 3))],
    ],
)
def test_what_is_not_all_of_a_tensor(boxes: list[Box]) -> None:
    assert not is_tiled((2, 3), boxes)


def test_a_tensor_without_elements_needs_no_boxes() -> None:
    assert is_tiled((0, 3), [])
    assert is_tiled((0, 3), [whole_box((0, 3))])
    assert is_tiled((), [Box((), ())])
    assert not is_tiled((), [])
