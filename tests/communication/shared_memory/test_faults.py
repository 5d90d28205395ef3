"""Ranks that leave, are late, stopped or interrupted: who waits for them says so, and when it was to."""

import multiprocessing
import os
import signal
import sys
import threading
import time
from datetime import timedelta

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.communication.shared_memory.ranks_that_end import HOURS_S, error_of, group, wait_for_file
from tests.harness.clocks import ReadClock
from tests.ranks import run_ranks

pytestmark = pytest.mark.dist
LIMIT_S, STEP_S = 300.0, 10.0  # on the clock of rank 0


def leave_while_another_waits(folder):
    with group(folder / "leave") as rank:
        return [error_of(lambda: dist.all_reduce(torch.ones(2)))] if rank == 0 else []


def fail_between_collectives(folder):
    """Rank 1 is a process of multiprocessing, forked, and ends without having destroyed its group."""

    def be_rank_1():
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - of a process that ends
        manager = group(folder / "error")
        manager.__enter__()
        dist.all_reduce(torch.ones(2))
        raise KeyError("no such sample")

    if os.environ["RANK"] == "1":
        process = multiprocessing.get_context("fork").Process(target=be_rank_1)
        process.start()
        process.join()
        return []
    with group(folder / "error"):
        dist.all_reduce(torch.ones(2))
        return [
            error_of(lambda: dist.all_reduce(torch.ones(2))),
            error_of(lambda: dist.recv(torch.ones(2), 1)),
            error_of(lambda: dist.all_reduce(torch.ones(2), async_op=True)),
        ]


@pytest.mark.parametrize("how", [leave_while_another_waits, fail_between_collectives])
def test_a_rank_that_leaves_is_named(tmp_path, how):
    found, _ = run_ranks(how, 2, tmp_path)
    for kind, text in found:
        assert kind == "DistBackendError"
        assert "rank 1 has left the group before the others were through with all_reduce" in text


def leave_with_work_under_way(path):
    with group(path) as rank:
        if rank == 1:
            wait_for_file(path.with_suffix(".left"))
            return [error_of(lambda: dist.all_reduce(torch.ones(1)))[1]]
        pair = dist.group.WORLD
        works = [dist.all_reduce(torch.ones(1), async_op=True) for _ in range(3)]
        works.append(dist.irecv(torch.ones(1), 1))
        works.append(dist.isend(torch.ones(4 << 20), 1))
    told = [error_of(work.wait)[1] for work in works]
    told.append(error_of(lambda: pair.allreduce([torch.ones(1)]).wait())[1])
    path.with_suffix(".left").touch()
    return told


def test_work_of_a_group_that_is_destroyed_fails_and_nobody_waits_for_it(tmp_path):
    mine, theirs = run_ranks(leave_with_work_under_way, 2, tmp_path / "leave")
    assert all("destroyed" in text for text in mine), mine
    assert "rank 0 has left" in theirs[0]


def come_late(folder):
    """Rank 1 does not come; each call of rank 0 has a group of its own, as it ends with the first error.

    The time of a rank stands still, but for that of rank 0 in the call.
    """
    told = {}

    def late(name, call, timeout=LIMIT_S):
        path, clock = folder / name, ReadClock()
        with group(path, timeout=timeout, clock=clock.clock) as rank:
            if rank == 0:
                begun, clock.step = clock.seconds, STEP_S
                told[name] = (*error_of(call), clock.seconds - begun)
                path.with_suffix(".over").touch()
            else:
                wait_for_file(path.with_suffix(".over"))
                told[name] = (*error_of(lambda: dist.barrier()), 0.0)

    ones = torch.ones(2)
    late("blocking", lambda: dist.all_reduce(ones))
    late("asynchronous", lambda: dist.all_reduce(ones, async_op=True).wait())
    late("received", lambda: dist.recv(ones, 1))
    late("sent", lambda: dist.send(torch.ones(4 << 20), 1))
    late("monitored", lambda: dist.group.WORLD.monitored_barrier(timedelta(seconds=LIMIT_S)), HOURS_S)
    return told


def test_the_time_limit_names_who_has_not_come_and_the_call(tmp_path):
    told, others = run_ranks(come_late, 2, tmp_path)
    calls = {
        "blocking": "all_reduce #2 of group '0'",
        "asynchronous": "all_reduce #2 of group '0'",
        "received": "a message from rank 1 of group '0'",
        "sent": "a message to rank 1 of group '0'",
        "monitored": "barrier #2 of group '0'",
    }
    for name, call in calls.items():
        kind, text, seconds = told[name]
        assert kind == "DistBackendError", told
        assert text == f"rank 1 has not come to {call} within 300 s"
        assert LIMIT_S <= seconds <= LIMIT_S + 3 * STEP_S
        assert others[name][:2] == (kind, text)  # who comes then is told the same


def wait_with_limits_of_their_own(path):
    clock, is_under_way = ReadClock(), threading.Event()
    with group(path, clock=clock.clock) as rank:
        if rank == 1:
            wait_for_file(path.with_suffix(".over"))
        ones, limit = torch.ones(2), timedelta(seconds=0.2)
        reduced = torch.ones(3)
        clock.after(3, is_under_way.set)
        works = [dist.all_reduce(reduced, async_op=True), dist.irecv(ones, 1 - rank)]
        if rank == 0:
            is_under_way.wait()
            clock.step = limit.total_seconds() / 10
        told = [error_of(lambda work=work: work.wait(limit))[1] for work in works if rank == 0]
        path.with_suffix(".over").touch()
        dist.send(torch.full((2,), float(rank)), 1 - rank)
        for work in works:
            work.wait()
        return told, reduced.tolist(), ones.tolist()


def test_a_limit_of_one_wait_ends_neither_the_call_nor_the_group(tmp_path):
    (told, *mine), (_, *theirs) = run_ranks(wait_with_limits_of_their_own, 2, tmp_path / "limits")
    assert told == [
        "all_reduce #2 of group '0', which waits for rank 1, was not complete within 0.2 s",
        "rank 1 has not come to a message from rank 1 of group '0' within 0.2 s",
    ]
    assert mine == [[2.0] * 3, [1.0] * 2]
    assert theirs == [[2.0] * 3, [0.0] * 2]


def be_stopped(folder):
    """Rank 1 is stopped; meanwhile time passes for rank 0, which waits for it."""

    def run(name, call):
        path, clock = folder / name, ReadClock()
        with group(path, timeout=LIMIT_S, clock=clock.clock) as rank:
            if rank == 1:
                path.with_suffix(".written").write_text(str(os.getpid()))
                path.with_suffix(".written").rename(path.with_suffix(".pid"))
                os.kill(os.getpid(), signal.SIGSTOP)
                return error_of(lambda: dist.all_reduce(torch.ones(2)))[1]
            wait_for_file(path.with_suffix(".pid"))
            pid = int(path.with_suffix(".pid").read_text())
            while psutil.Process(pid).status() != psutil.STATUS_STOPPED:
                time.sleep(0.01)
            clock.step = STEP_S
            try:
                return call(pid, clock)
            finally:
                os.kill(pid, signal.SIGCONT)

    def wait_and_continue(pid, clock):
        def go_on():
            clock.step = 0.0
            os.kill(pid, signal.SIGCONT)

        clock.after(int(LIMIT_S / STEP_S) - 1, go_on)
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        return tensor.tolist()

    return (
        run("goes-on", wait_and_continue),
        run("too-long", lambda *_: error_of(lambda: dist.all_reduce(torch.ones(2)))[1]),
    )


def test_a_stopped_rank_is_waited_for_until_the_time_limit(tmp_path):
    mine, theirs = run_ranks(be_stopped, 2, tmp_path)
    limit = "rank 1 has not come to all_reduce #2 of group '0' within 300 s"
    assert mine == ([2.0, 2.0], limit)
    assert theirs == ("", limit)


def be_interrupted(folder):
    """Ctrl-C in rank 0, while it is seen to wait in a call of each kind; time stands still."""

    def interrupted(name, call):
        path, clock, waits = folder / name, ReadClock(), threading.Event()

        def interrupt():
            waits.wait()
            os.kill(os.getpid(), signal.SIGINT)

        with group(path, clock=clock.clock) as rank:
            if rank == 0:
                clock.after(3, waits.set)
                thread = threading.Thread(target=interrupt)
                thread.start()
                kind, _ = error_of(call)
                thread.join()
                path.with_suffix(".over").touch()
                return kind
            wait_for_file(path.with_suffix(".over"))
            return error_of(lambda: dist.all_gather_object([None] * 2, name))[1]

    big = torch.ones(4 << 20)
    return {
        "blocking": interrupted("blocking", lambda: dist.all_reduce(big)),
        "asynchronous": interrupted("asynchronous", lambda: dist.all_reduce(big, async_op=True).wait()),
        "received": interrupted("received", lambda: dist.recv(big, 1)),
        "sent": interrupted("sent", lambda: dist.send(big, 1)),
    }


def test_an_interrupt_ends_a_wait_and_the_others_are_told(tmp_path):
    mine, theirs = run_ranks(be_interrupted, 2, tmp_path)
    for name, kind in mine.items():
        assert kind == "KeyboardInterrupt", name
    for name, text in theirs.items():
        assert "rank 0 has left" in text, name
    assert theirs["blocking"] == "rank 0 has left all_reduce #2 of group '0': KeyboardInterrupt"
