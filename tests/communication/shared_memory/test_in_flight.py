"""Calls hold up nothing else: groups in opposite orders, messages, full mailboxes; portable waits."""

import platform
import time

import pytest
import torch
import torch.distributed as dist

from colossalai.communication.shared_memory import _counters, _membership
from tests.communication.shared_memory.programs import Step, run_program
from tests.communication.shared_memory.ranks_that_end import HOURS_S, group, wait_for_file
from tests.ranks import run_ranks
from tests.tiers import further

pytestmark = pytest.mark.dist


def use_groups_in_opposite_orders(path):
    with group(path) as rank:
        groups = [dist.new_group() for _ in range(2)]
        order = groups if rank == 0 else groups[::-1]
        tensors = [torch.full((50_000,), float(rank + 1)) for _ in range(8)]
        works = [
            dist.all_reduce(tensor, group=order[turn % 2], async_op=True)
            for turn, tensor in enumerate(tensors)
        ]
        for work in works:  # rank 0 waits for the call of one group first, rank 1 for that of the other
            work.wait()
        return all(tensor.eq(3.0).all() for tensor in tensors)


def test_two_groups_in_opposite_orders_finish(tmp_path):
    assert run_ranks(use_groups_in_opposite_orders, 2, tmp_path / "orders") == [True, True]


def send_beside_collectives(path):
    """Each message meets a rank that is busy with something else."""
    with group(path, message_poll_s=HOURS_S) as rank:
        other, told = 1 - rank, []
        big = torch.arange(4 << 20, dtype=torch.float32)  # 16 MB, four times a mailbox

        # To a rank that is in collectives and has not asked for it.
        sent = dist.isend(big, 1, tag=1) if rank == 0 else None
        total = torch.ones(100_000)
        for _ in range(5):
            dist.all_reduce(total)
        told.append(total[0].item() == 32.0)
        if rank == 1:
            into = torch.zeros_like(big)
            dist.recv(into, 0, tag=1)
            told.append(torch.equal(into, big))
        else:
            sent.wait()
            told.append(True)

        # Tags in the opposite order, small ones and large ones.
        for size in (3, 1 << 20, 3 << 20):
            if rank == 0:
                works = [dist.isend(torch.full((size,), float(tag)), 1, tag=tag) for tag in range(4)]
                for work in works:
                    work.wait()
                told.append(True)
            else:
                into = [torch.zeros(size) for _ in range(4)]
                for tag in reversed(range(4)):
                    dist.recv(into[tag], 0, tag=tag)
                told.append(all(tensor.eq(float(tag)).all() for tag, tensor in enumerate(into)))

        # Asked for, waited for only after a collective.
        into = torch.zeros(1 << 20)
        received = dist.irecv(into, other, tag=7)
        dist.barrier()
        sending = dist.isend(torch.full((1 << 20,), float(rank)), other, tag=7)
        dist.barrier()
        while into[-1].item() != other and rank == 0:
            time.sleep(0.01)  # nobody waits for it, and it comes
        told.append(rank == 1 or bool(into.eq(float(other)).all()))
        received.wait()
        sending.wait()

        # Many that fill the mailbox, before the other one asks for any.
        count = 3000
        works = [dist.isend(torch.full((500,), float(number)), other) for number in range(count)]
        dist.barrier()
        into = torch.zeros(500)
        right = True
        for number in range(count):
            dist.recv(into, other)
            right = right and into[0].item() == into[-1].item() == number
        for work in works:
            work.wait()
        told.append(right)
        return told


def test_messages_and_collectives_do_not_hold_up_one_another(tmp_path):
    for told in run_ranks(send_beside_collectives, 2, tmp_path / "messages"):
        assert told == [True] * 7


def compute_while_a_message_passes(path):
    """Rank 0 sends 16 MB and computes, rank 1 has asked and computes: the message passes meanwhile.

    By alarms alone: a message thread that misses one polls after hours.
    """
    with group(path, message_poll_s=HOURS_S) as rank:
        tensor = torch.ones(4 << 20) if rank == 0 else torch.zeros(4 << 20)
        work = dist.isend(tensor, 1) if rank == 0 else dist.irecv(tensor, 0)
        # The sender's tensor shows nothing: what is sent is seen by whom it reaches.
        while rank == 1 and tensor[-1].item() != 1.0:
            time.sleep(0.01)
        path.with_suffix(".passed").touch() if rank == 1 else wait_for_file(path.with_suffix(".passed"))
        work.wait()
        path.with_suffix(f".{rank}").touch()
        wait_for_file(path.with_suffix(f".{1 - rank}"))
        return tensor.eq(1.0).all().item()


def test_a_large_message_passes_while_both_ranks_compute(tmp_path):
    assert run_ranks(compute_while_a_message_passes, 2, tmp_path / "pass") == [True, True]


def _program():
    sizes = ((), (7,), (129, 65), (400_000,))
    operations = (
        "all_reduce",
        "reduce_scatter",
        "all_gather",
        "uneven",
        "broadcast",
        "gather",
        "scatter",
        "message",
    )
    return [
        Step(operation, number % 2, torch.float32, shape, "SUM", number, False, bool(number % 3), number)
        for number, (operation, shape) in enumerate((one, size) for size in sizes for one in operations)
    ]


def run_without_a_futex(is_ordered):
    _membership.waiting_of_this_system = lambda: _counters.Polling(is_ordered=is_ordered)
    return run_program([[0, 1, 2], [0, 2]], _program())


class Unordered(_counters.Futex):
    """As on a processor that keeps no order by itself."""

    def __init__(self):
        super().__init__(_counters._FUTEX_NUMBERS[platform.machine()], is_ordered=False)


def run_with_fences():
    _membership.waiting_of_this_system = Unordered
    return run_program([[0, 1, 2], [0, 2]], _program())


@pytest.mark.parametrize("is_ordered", [False, further(True)])
def test_the_portable_wait_gives_the_same(is_ordered):
    assert run_ranks(run_without_a_futex, 3, is_ordered) == [[], [], []]


@pytest.mark.long  # the fences with the portable wait are above
def test_the_wait_of_processors_without_order_gives_the_same():
    if not isinstance(_counters.waiting_of_this_system(), _counters.Futex):
        pytest.skip("no futex here")
    assert run_ranks(run_with_fences, 3) == [[], [], []]
