"""Each optimizer trains as on one process beside each method, or is refused by name, as the document says."""

from itertools import cycle
from typing import Any

import pytest
import torch
import transformers.optimization

import colossalai.nn.optimizer
from tests.tiers import further
from tests.turns import grouped, run_each
from tests.verdicts import page
from tests.verdicts.optimizers import COLUMNS, OPTIMIZERS, classes_of, run


def cells() -> list[Any]:
    """Return all cells; in `make test` each row has its turn in one column."""
    return [
        (column, label) if column == first else further(column, label)
        for label, first in zip(OPTIMIZERS, cycle(COLUMNS), strict=False)
        for column in COLUMNS
    ]


@pytest.mark.dist
@pytest.mark.parametrize(("num_ranks", "cells"), grouped(cells(), lambda *_: 2))
def test_a_cell_is_what_the_document_says(num_ranks: int, cells: list[tuple[str, str]]) -> None:
    listed = page.read("optimizer", COLUMNS)
    for (column, label), of_ranks in zip(cells, run_each(num_ranks, run, cells), strict=True):
        assert set(of_ranks) == {listed[label][column]}, (label, column)


@pytest.mark.unit
def test_the_document_has_a_row_for_each_optimizer() -> None:
    known = {*classes_of(torch.optim), *classes_of(colossalai.nn.optimizer)}
    known |= {f"transformers.{name}" for name in classes_of(transformers.optimization)}
    assert known == set(OPTIMIZERS), "give a new optimizer a row in tests/verdicts/optimizers.py"
    assert list(page.read("optimizer", COLUMNS)) == list(OPTIMIZERS), "python -m tests.verdicts"


@pytest.mark.unit
def test_a_terminal_of_80_columns_shows_the_tables() -> None:
    lines = page.PAGE.read_text().splitlines()
    assert not [line for line in lines if line.startswith("|") and len(line) > 80]
