"""Collectives of outcomes: what the ranks raise, and how many there are."""

import errno
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.optim import AdamW

import colossalai
from colossalai.checkpoint_io import TrainingState, resume_training_state, save_training_state
from colossalai.checkpoint_io._collective import COLLECTIVE, Agreement, FullDiskError
from colossalai.cluster import gather_values
from colossalai.core import global_context as gpc
from tests.ranks import run_ranks


def fails_with(error: Exception, *, beside: tuple[str, str]) -> Exception:
    """Return what rank 1 raises whose action fails, after rank 0 has failed, too."""
    agreement = Agreement(lambda value: [(beside, None), value], lambda: 1)

    def fail() -> None:
        raise error

    with pytest.raises(type(error) if beside[0] == type(error).__name__ else Exception) as caught:
        agreement.on_every_rank(fail)
    return caught.value


@pytest.mark.unit
def test_ranks_that_fail_in_different_ways_raise_one_kind() -> None:
    """They go on from it alike: a rank that made room alone would wait for the others."""
    own = ValueError("no place for this dtype")
    raised = fails_with(own, beside=("FullDiskError", "no room"))
    assert type(raised) is FullDiskError
    assert str(raised) == "rank 0: no room"
    assert raised.__cause__ is own
    full = FullDiskError(errno.ENOSPC, "no room")
    assert type(fails_with(full, beside=("ValueError", "no place"))) is ValueError
    assert fails_with(full, beside=("FullDiskError", "no room here")) is full


def exchanges(folder: Path) -> list[int]:
    """Return how many exchanges two saves and a load take."""
    colossalai.launch_from_torch({}, verbose=False)
    model = nn.Linear(2, 2)
    state = TrainingState(model=model, optimizer=AdamW(model.parameters()))
    counts = []

    def counted(value: Any) -> list[Any]:
        counts[-1] += 1
        return gather_values(value)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(COLLECTIVE, "_exchange", counted)
        for step in (1, 2):
            counts.append(0)
            save_training_state(folder, state, step=step, keep_last=1)
        counts.append(0)
        assert resume_training_state(folder, state) == {"step": 2}
    gpc.destroy()
    return counts


@pytest.mark.dist
def test_exchanges_of_saves_and_of_a_load(tmp_path: Path) -> None:
    """Save: plan, folder, outcome of writing, rename; the second one removes the first: files, folders.

    Load: names of the states, check of the newest, names in the model, comparison, copies.
    """
    assert run_ranks(exchanges, 2, tmp_path) == [[4, 6, 5]] * 2
