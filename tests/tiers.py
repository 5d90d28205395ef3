"""Cells of a matrix of tests that are left to `make long`; the first ones run every feature once."""

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
