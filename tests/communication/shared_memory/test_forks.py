"""Forked children of a rank: they do not use its groups, and their end and their life change nothing."""

import os
import signal

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from colossalai.communication.shared_memory import empty_in_arena
from tests.communication.shared_memory.ranks_that_end import (
    die,
    error_of,
    group,
    in_a_child,
    named,
    wait_for_file,
)
from tests.ranks import run_ranks

pytestmark = pytest.mark.dist


def call_in_a_child(path):
    """Of rank 1; the calls under way were made by its parent."""
    with group(path) as rank:
        tensor, received = torch.ones(2), torch.zeros(2)
        if rank == 0:
            wait_for_file(path.with_suffix(".forked"))
            dist.all_reduce(tensor)
            dist.send(torch.full((2,), 5.0), 1)
            dist.barrier()
            return tensor.tolist()
        works = [dist.all_reduce(tensor, async_op=True), dist.irecv(received, 0)]

        def be_a_child():
            ones = torch.ones(1)
            told = [
                error_of(lambda: dist.all_reduce(ones)),
                error_of(lambda: dist.all_reduce(ones, async_op=True)),
                error_of(lambda: dist.send(ones, 0)),
                error_of(lambda: dist.recv(ones, 0)),
                *(error_of(work.wait) for work in works),
            ]
            assert not any(work.is_completed() for work in works)
            dist.destroy_process_group()
            return [found[:2] for found in told]

        told, status = in_a_child(be_a_child)
        path.with_suffix(".forked").touch()
        for work in works:
            work.wait()
        dist.barrier()
        return told, status, tensor.tolist(), received.tolist()


def test_a_call_in_a_forked_child_is_refused_and_the_group_goes_on(tmp_path):
    mine, (told, status, *values) = run_ranks(call_in_a_child, 2, tmp_path / "child")
    assert mine == [2.0, 2.0]
    assert status == 0
    assert values == [[2.0, 2.0], [5.0, 5.0]]
    assert len(told) == 6
    for kind, text in told[:4]:
        assert kind == "RuntimeError"
        assert text.startswith("a forked child cannot make a call of group '0': its parent, process ")
    for kind, text in told[4:]:
        assert kind == "RuntimeError"
        assert text.startswith("a forked child cannot wait for a call of its parent, process ")


def leave_a_child_behind(path):
    with group(path) as rank:
        if rank == 1:
            pid = os.fork()
            if pid == 0:
                while True:
                    signal.pause()  # the pool ends it
            path.with_suffix(".child").write_text(str(pid))
            die()
        return error_of(lambda: dist.all_reduce(torch.ones(1)))


def lose_a_parent(path):
    if os.environ["RANK"] == "0":
        return leave_a_child_behind(path)
    in_a_child(leave_a_child_behind, path)
    os.kill(int(path.with_suffix(".child").read_text()), signal.SIGKILL)  # it lived until now
    return None


def test_a_child_that_lives_on_does_not_hide_the_death_of_its_parent(tmp_path):
    found, _ = run_ranks(lose_a_parent, 2, tmp_path / "parent")
    assert not named(found, 1)


class Squares(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.full((3,), float(index * index))


def load_during_collectives(path):
    with group(path) as rank:
        total = torch.zeros(3)
        works = []
        for epoch in range(2):
            loader = DataLoader(Squares(), batch_size=4, num_workers=2, multiprocessing_context="fork")
            for batch in loader:
                big = torch.full((50_000,), 1.0)
                works.append((dist.all_reduce(big, async_op=True), big))
                part = batch.sum(dim=0)
                dist.all_reduce(part)
                total += part
                other = torch.zeros(3)
                pending = dist.irecv(other, 1 - rank, tag=epoch)
                dist.send(part, 1 - rank, tag=epoch)
                pending.wait()
                assert torch.equal(other, part)
        for work, big in works:
            work.wait()
            assert big.eq(2.0).all()
        return total.tolist()


def test_workers_of_a_data_loader_are_forked_during_collectives(tmp_path):
    squares = sum(float(index * index) for index in range(40))
    assert run_ranks(load_during_collectives, 2, tmp_path / "loader") == [[4 * squares] * 3] * 2


def write_in_a_child(path):
    """A child of rank 1 writes into a tensor that its parent lends."""
    with group(path) as rank:
        tensor = empty_in_arena(dist.group.WORLD, 1 << 18, torch.float32).fill_(rank + 1.0)
        seen = [0.0, 0.0]
        if rank == 1:

            def be_a_child():
                before = tensor[0].item()
                tensor.fill_(1000.0)
                return [before, tensor[-1].item()]

            seen, status = in_a_child(be_a_child)
            assert status == 0
        dist.all_reduce(tensor)
        return seen, tensor.eq(3.0).all().item()


def test_what_a_child_writes_is_its_own(tmp_path):
    told = run_ranks(write_in_a_child, 2, tmp_path / "written")
    assert told == [([0.0, 0.0], True), ([2.0, 1000.0], True)]
