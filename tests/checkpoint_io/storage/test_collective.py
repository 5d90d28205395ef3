"""Collectives of outcomes: what the ranks raise."""

import errno

import pytest

from colossalai.checkpoint_io._collective import Agreement, FullDiskError

pytestmark = pytest.mark.unit


def fails_with(error: Exception, *, beside: tuple[str, str]) -> Exception:
    """Return what rank 1 raises whose action fails, after rank 0 has failed, too."""
    agreement = Agreement(lambda value: [(beside, None), value], lambda: 1)

    def fail() -> None:
        raise error

    with pytest.raises(type(error) if beside[0] == type(error).__name__ else Exception) as caught:
        agreement.on_every_rank(fail)
    return caught.value


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
