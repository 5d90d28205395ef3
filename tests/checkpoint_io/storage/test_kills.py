"""Ranks that are killed at any moment while they save leave the last checkpoint or the one before."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from colossalai.checkpoint_io import save_training_state
from tests.checkpoint_io.killed_ranks import run_tries, state_of
from tests.ranks import run_ranks
from tests.tiers import further

pytestmark = pytest.mark.dist

NUM_TRIES = 20
FEW_TRIES = 6


def keeper(folder: Path, num_tries: int, num_ranks: int) -> list[dict[str, Any]]:
    kills = run_tries(folder, num_tries=num_tries, seed=20, num_ranks=num_ranks)
    save_training_state(folder, state_of(7), step=7, keep_last=1)
    return [asdict(kill) for kill in kills]


@pytest.mark.parametrize(
    ("num_tries", "num_ranks"),
    [(FEW_TRIES, 2), (FEW_TRIES, 1), further(NUM_TRIES, 2), further(2 * NUM_TRIES, 1)],
)
def test_kill_any_rank_at_any_moment(num_tries: int, num_ranks: int, tmp_path: Path) -> None:
    (kills,) = run_ranks(keeper, 1, tmp_path, num_tries, num_ranks)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000007"]  # nothing of the killed ones
    assert len(kills) == num_tries
    assert kills[-1]["told"] >= num_tries  # with this seed the keeper waits for 6 saves in 6 tries, 24 in 20
    assert any(kill["num_left"] for kill in kills), "not one fell into the writing of a save"
