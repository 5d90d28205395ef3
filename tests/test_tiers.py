"""What the tiers of tests promise about cells of matrices."""

import ast
import itertools
from pathlib import Path

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


def test_what_has_more_examples_in_soak_is_run_by_it() -> None:
    """By its marker; without it `make soak` would never try the examples that are promised."""
    found = 0
    for path in Path(__file__).parent.rglob("test_*.py"):
        if path == Path(__file__) or "soaked(" not in (text := path.read_text()):
            continue
        for node in ast.parse(text).body:
            if "soaked(" in (written := ast.unparse(node)):
                assert "@pytest.mark.soak" in written, f"{path}:{node.lineno}"
                found += 1
    assert found
