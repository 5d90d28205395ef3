"""What the tiers of tests promise about cells of matrices."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tiers import pairwise

pytestmark = pytest.mark.unit


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_each_two_values_meet(sizes: list[int]) -> None:
    cells = pairwise(*map(range, sizes))
    assert len(set(cells)) == len(cells) <= max(1, *(a * b for a, b in itertools.pairwise([*sizes, 1]))) * 4
    for (first, num_first), (second, num_second) in itertools.combinations(enumerate(sizes), 2):
        met = {(cell[first], cell[second]) for cell in cells}
        assert met == set(itertools.product(range(num_first), range(num_second)))
