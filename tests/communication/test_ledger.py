"""The time in the ledger, and the all-reduce that is waited for later."""

from pathlib import Path

import pytest
import torch

import colossalai
from colossalai._clock import Clock
from colossalai.communication import all_reduce, all_reduce_in_place, ledger, start_all_reduce
from colossalai.context import ParallelMode
from colossalai.core import global_context as gpc
from tests.communication.shared_memory.ranks_that_end import wait_for_file
from tests.ranks import run_ranks

pytestmark = pytest.mark.dist

WORLD = ParallelMode.GLOBAL
LATE_S = 5.0


def times(folder: Path) -> tuple[float, float, float]:
    """Rank 1 is late: rank 0 waits for it inside the collective. Files show that, and that it is late."""
    waits, late = folder / "waits", folder / "late"

    def now() -> float:
        seconds = LATE_S if late.exists() else 0.0
        waits.touch()
        return seconds

    colossalai.launch_from_torch({}, verbose=False)
    x = torch.ones(2)
    all_reduce(x, WORLD)
    with ledger() as untimed, ledger(timed=True, clock=Clock(now=now)) as timed:
        if gpc.get_global_rank() == 1:
            wait_for_file(waits)
            late.touch()
        all_reduce(x, WORLD)
        with ledger() as inner:
            all_reduce(x, WORLD)
    assert (untimed.count(), timed.count(), inner.count()) == (2, 2, 1)
    assert (
        timed.seconds("all_reduce", axis="global")
        == timed.seconds()
        == sum(entry.seconds for entry in timed.entries)
    )
    assert timed.seconds("broadcast") == 0.0
    assert timed.num_bytes() == untimed.num_bytes() == 2 * x.nbytes
    return untimed.seconds(), inner.seconds(), timed.seconds()


def test_the_time_of_a_collective_is_in_a_timed_ledger_only(tmp_path: Path):
    waiting, late = run_ranks(times, 2, tmp_path)
    assert waiting == (0.0, 0.0, LATE_S)
    assert late == (0.0, 0.0, 0.0)


def later(timed: bool) -> None:
    colossalai.launch_from_torch({}, verbose=False)
    rank = gpc.get_global_rank()
    x = torch.full((3,), float(rank + 1))
    with ledger(timed=timed) as book:
        wait = start_all_reduce(x, WORLD)
        if timed:  # its time is in the ledger already
            assert book.seconds() > 0
            assert x.tolist() == [3.0] * 3
        wait()
    assert x.tolist() == [3.0] * 3
    assert [entry.op for entry in book.entries] == ["all_reduce"]
    assert all_reduce_in_place(x, WORLD) is x
    assert x.tolist() == [6.0] * 3
    start_all_reduce(x, ParallelMode.TENSOR)()  # one rank: nothing to do
    assert x.tolist() == [6.0] * 3


@pytest.mark.parametrize("timed", [False, True])
def test_a_sum_that_is_waited_for_later(timed: bool):
    run_ranks(later, 2, timed)
