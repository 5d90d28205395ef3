"""Which cells of a matrix of tests belong to `make test`, and which are left to `make long`.

Two rules. A test of ranks with several `parametrize` decorators is a matrix: `make test` runs each value of
each parameter once, along the diagonal, and `make long` the other combinations; the marker `every_cell` is
for a test whose combinations are features of their own, `each_value` for one without ranks that takes long
all the same. Within one list `make test` runs all but those that are marked as further ones.
What takes minutes for its number of examples alone has as many as were promised in `make soak`, which also
runs the costliest further cells: those that meet nothing new, but for a size or a family.
"""

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
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


OF_SOAK = (
    pytest.mark.long,
    pytest.mark.soak,
    pytest.mark.skipif(not os.environ.get("SOAK"), reason="it is costly: make soak runs it"),
)
"""The marks of a cell that `make soak` alone runs."""


def in_soak(*cell: Any, **options: Any) -> Any:
    """Return a cell for `parametrize` that belongs to `make soak`, since it is costly."""
    return pytest.param(*cell, marks=OF_SOAK, **options)


def every_other(cells: Iterable[Any], first: int = 0) -> list[Any]:
    """Return cells for `parametrize`: every other one of the long tier, those between of `make soak`.

    Args:
        cells: All of them, tuples of values or single values.
        first: 0 or 1, where the first one of the long tier stands.
    """
    both = itertools.cycle((further, in_soak) if first == 0 else (in_soak, further))
    return [
        mark(*cell) if isinstance(cell, tuple) else mark(cell)
        for mark, cell in zip(both, cells, strict=False)
    ]


def of_soak(test: Callable[..., None]) -> Callable[..., None]:
    """Leave a test to `make soak`, since it is costly; a decorator."""
    for mark in OF_SOAK:
        test = mark(test)
    return test


def soaked(most: int) -> int:
    """Return how many examples of a property a test with the marks `long` and `soak` tries.

    `most` in `make soak`, else a sixteenth.
    """
    return most if os.environ.get("SOAK") else most // 16


def pairwise(*values: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return cells of a matrix of three parameters and more in which each two values meet at least once.

    Faults of a combination are mostly those of two of its methods, and so many fewer cells meet them all: 25
    of 125 for three parameters of five values. Greedy, in the order of the product.
    """
    places = list(itertools.product(*(range(len(each)) for each in values)))
    missing = {pair for cell in places for pair in _pairs_of(cell)}
    cells = []
    while missing:
        cell = max(places, key=lambda each: len(missing.intersection(_pairs_of(each))))
        missing.difference_update(_pairs_of(cell))
        cells.append(tuple(each[place] for each, place in zip(values, cell, strict=True)))
    return cells


def once_and_pairs(once: Sequence[tuple[Any, ...]], *values: Sequence[Any]) -> list[Any]:
    """Return all cells of a matrix of costly cells.

    `make test` runs those of `once`, `make long` those of `pairwise`, `make soak` the others.
    """
    pairs = set(pairwise(*values))
    others = [cell for cell in itertools.product(*values) if cell not in once]
    return [*once, *(further(*cell) if cell in pairs else in_soak(*cell) for cell in others)]


def _pairs_of(cell: tuple[int, ...]) -> Iterator[tuple[tuple[int, int], ...]]:
    """Return all pairs of parameters with their values."""
    return itertools.combinations(enumerate(cell), 2)


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
