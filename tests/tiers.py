"""Which cells of a matrix of tests belong to `make test`, and which are left to `make long`.

Two rules. A test of ranks with several `parametrize` decorators is a matrix: `make test` runs each value of
each parameter once, along the diagonal, and `make long` the other combinations; the marker `every_cell` is
for a test whose combinations are features of their own, `each_value` for one without ranks that takes long
all the same. Within one list `make test` runs all but those that are marked as further ones.
"""

from collections.abc import Iterable
from typing import Any

import pytest


def further(*cell: Any) -> Any:
    """Return a cell for `parametrize` that belongs to the long tier."""
    return pytest.param(*cell, marks=pytest.mark.long)


def after_the_first(cells: Iterable[Any], num_first: int = 1) -> list[Any]:
    """Return cells, all but the first ones marked as further ones."""
    cells = list(cells)
    rest = (further(*cell) if isinstance(cell, tuple) else further(cell) for cell in cells[num_first:])
    return [*cells[:num_first], *rest]


def mark_combinations(items: Iterable[pytest.Item]) -> None:
    """Mark as long the cells of a matrix of ranks in which each value has had its turn in another cell.

    Cell i of the diagonal has value `i % n` of each `parametrize` of n values.
    """
    for item in items:
        is_matrix = any(map(item.get_closest_marker, ("dist", "each_value")))
        if not isinstance(item, pytest.Function) or not is_matrix:
            continue
        sizes = [len(mark.args[1]) for mark in item.iter_markers("parametrize")]
        if len(sizes) < 2 or item.get_closest_marker("every_cell"):
            continue
        place, rest = [], next(iter(item.callspec.indices.values()))
        for size in reversed(sizes):  # pytest counts the cells with the first decorator's values fastest
            rest, index = divmod(rest, size)
            place.append((index, size))
        if not any(all(turn % size == index for index, size in place) for turn in range(max(sizes))):
            item.add_marker(pytest.mark.long)
