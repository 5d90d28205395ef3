"""Data parallelism trains as one process does, through both doors, and both doors give the same bits."""

import pytest

from tests.parity.subjects.doors import both_doors
from tests.ranks import run_ranks
from tests.tiers import further

pytestmark = pytest.mark.dist


@pytest.mark.parametrize("method", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    ("world_size", "accumulation", "max_norm"),
    [(2, 1, None), (2, 4, 0.5), (4, 2, None), further(2, 2, None), further(2, 1, 0.5), further(4, 4, 0.5)],
)
def test_both_doors_against_one_process(method, world_size, accumulation, max_norm):
    for by_engine, by_booster in run_ranks(both_doors, world_size, method, accumulation, max_norm):
        assert by_engine == by_booster  # bit for bit
        assert by_engine[-1] < by_engine[0]
