"""Every row of the parity table trains as one process does."""

from typing import Any

import pytest

from tests.parity import table
from tests.parity.experts import table as experts
from tests.parity.training import check_runs, grouped_runs

SECTIONS = {
    **table.SECTIONS,
    "experts cut by hand": experts.CUT,
    "layers of experts": experts.LAYERS,
    "transformers with experts": experts.TRANSFORMERS,
}
GROUPS = [
    pytest.param(*group.values, marks=group.marks, id=f"{name}: {group.id}")
    for name, rows in SECTIONS.items()
    for group in grouped_runs(rows)
]


@pytest.mark.dist
@pytest.mark.parametrize(("num_ranks", "runs"), GROUPS)
def test_runs_are_one_process(num_ranks: int, runs: list[Any]) -> None:
    check_runs(num_ranks, runs)
