"""Blocks go round the ring behind the computation, and sums come home."""

import pytest
import torch

import colossalai
from colossalai.communication import RingShift, RingSum, _ring, ledger, ring_blocks
from colossalai.context import ParallelMode
from colossalai.core import global_context as gpc
from tests.ranks import run_ranks

pytestmark = pytest.mark.dist


def round_trip(size):
    colossalai.launch_from_torch({}, verbose=False)
    axis = gpc.axis(ParallelMode.GLOBAL)
    block, flag = torch.full((2, 3), float(axis.rank)), torch.tensor([axis.rank % 2 == 0])
    home, owners = RingSum(axis), []
    with ledger() as book:
        # A transposed tensor travels as well, and it arrives as it was.
        for owner, (values, flags) in ring_blocks([block.t(), flag], axis):
            owners.append(owner)
            assert values.tolist() == [[float(owner)] * 2] * 3
            assert flags.item() == (owner % 2 == 0)
            home.add(values.clone() * 10 + axis.rank, torch.ones(1))
        total, count = home.finish()
    assert owners == [(axis.rank - step) % size for step in range(size)]
    assert total.tolist() == [[10.0 * axis.rank * size + sum(range(size))] * 2] * 3
    assert count.item() == size
    assert block.tolist() == [[float(axis.rank)] * 3] * 2
    assert book.num_bytes("shift", axis="global") == (size - 1) * (2 * 24 + 1 + 4)
    assert book.count() == (size - 1) * 4


@pytest.mark.parametrize("size", [1, 2, 4])
def test_sums_come_home(size):
    run_ranks(round_trip, size, size)


def events():
    colossalai.launch_from_torch({}, verbose=False)
    found, begin, wait = [], _ring.ring_shift_async, RingShift.wait
    _ring.ring_shift_async = lambda *args: found.append("send") or begin(*args)
    RingShift.wait = lambda shift: found.append("wait") or wait(shift)
    for _ in ring_blocks([torch.ones(1)], gpc.axis(ParallelMode.GLOBAL)):
        found.append("compute")
    return found


def test_the_next_block_is_under_way_during_the_computation():
    assert run_ranks(events, 2) == [["send", "compute", "wait", "compute"]] * 2
