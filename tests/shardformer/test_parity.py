"""Each row of the parity table of transformers trains as one process does."""

from typing import Any

import pytest

from tests.parity.training import check_runs, grouped_runs

pytest.importorskip("transformers")

from tests.shardformer.table import FUSED_LOSS, TRANSFORMERS


@pytest.mark.dist
@pytest.mark.parametrize(("num_ranks", "runs"), grouped_runs([*TRANSFORMERS, *FUSED_LOSS]))
def test_runs_are_one_process(num_ranks: int, runs: list[Any]) -> None:
    check_runs(num_ranks, runs)
