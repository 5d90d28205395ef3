"""What the tiers of tests promise about cells of matrices."""

import ast
import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tiers import every_other, further, in_soak, pairwise
from tests.turns import MOST_TOGETHER, grouped

pytestmark = pytest.mark.unit


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_each_two_values_meet(sizes: list[int]) -> None:
    cells = pairwise(*map(range, sizes))
    assert len(set(cells)) == len(cells) <= max(1, *(a * b for a, b in itertools.pairwise([*sizes, 1]))) * 4
    for (first, num_first), (second, num_second) in itertools.combinations(enumerate(sizes), 2):
        met = {(cell[first], cell[second]) for cell in cells}
        assert met == set(itertools.product(range(num_first), range(num_second)))


def test_cells_of_one_tier_and_one_number_of_ranks_share_a_start() -> None:
    many = [further(f"long {number}", 2) for number in range(MOST_TOGETHER + 1)]
    cells = [("first", 2), further("other", 4), *many, in_soak("costly", 2), ("second", 2)]
    groups = {group.id: group for group in grouped(cells, lambda _, num_ranks: num_ranks)}
    assert {name: [cell[0] for cell in group.values[1]] for name, group in groups.items()} == {
        "2 ranks": ["first", "second"],
        "2 ranks long 1": [f"long {number}" for number in range(MOST_TOGETHER)],
        "2 ranks long 2": [f"long {MOST_TOGETHER}"],
        "2 ranks soak": ["costly"],
        "4 ranks long": ["other"],
    }
    for name, group in groups.items():
        assert group.values[0] == int(name[0])
        marks = {mark.name for mark in group.marks}
        assert marks == (
            {"long", "soak", "skipif"} if "soak" in name else {"long"} if "long" in name else set()
        )


@pytest.mark.parametrize("first", [0, 1])
def test_cells_alternate_between_long_and_soak(first: int) -> None:
    cells = every_other([("a", 1), ("b", 2), "c"], first)
    assert [cell.values for cell in cells] == [("a", 1), ("b", 2), ("c",)]
    in_long = [not any(mark.name == "soak" for mark in cell.marks) for cell in cells]
    assert in_long == [place % 2 == first for place in range(3)]
    assert all(any(mark.name == "long" for mark in cell.marks) for cell in cells)


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
