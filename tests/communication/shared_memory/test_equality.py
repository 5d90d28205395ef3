"""Every call of torch.distributed over shared memory gives the bits of a sum written out in rank order."""

import os
import random
import time
from contextlib import nullcontext
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings

from colossalai._clock import Clock
from colossalai.communication.shared_memory import WaitOptions, empty_in_arena
from colossalai.communication.shared_memory._slots import Slots
from tests.communication.shared_memory.programs import (
    gather_single,
    programs,
    reduced,
    run_program,
    scatter_single,
)
from tests.communication.shared_memory.ranks_that_end import group
from tests.ranks import run_ranks
from tests.tiers import further, in_soak


@pytest.mark.dist
@pytest.mark.parametrize("num_programs", [2, further(6), in_soak(50)])
def test_programs_of_calls(num_programs):
    @settings(max_examples=num_programs, suppress_health_check=list(HealthCheck), phases=(Phase.generate,))
    @given(drawn=programs())
    def check(drawn):
        num_ranks, groups, program = drawn
        wrong = run_ranks(run_program, num_ranks, groups, program)
        assert not any(wrong), "\n".join(line for lines in wrong for line in lines)

    check()


DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int32)


def sparse_of(seed, rank):
    """Draw a sparse tensor of a rank: with places that come twice, none at all, and rows for values."""
    shared, own = random.Random(seed), random.Random(1000 * seed + rank)
    dims = shared.randint(1, 3)
    shape = [shared.randint(1, 5) for _ in range(dims)]
    num_sparse, dtype, op = shared.randint(1, dims), shared.choice(DTYPES), shared.choice(("SUM", "AVG"))
    count = own.choice((0, 0, 1, 3, 8))
    generator = torch.Generator().manual_seed(own.randrange(2**40))
    places = torch.stack([torch.randint(0, n, (count,), generator=generator) for n in shape[:num_sparse]])
    values = (
        torch.randn(count, *shape[num_sparse:], generator=generator, dtype=torch.float64).mul(8).to(dtype)
    )
    is_mean = op == "AVG" and dtype is not torch.int32
    return torch.sparse_coo_tensor(places, values, shape, check_invariants=True), is_mean


def add_sparse(num_cases):
    dist.init_process_group("shared_memory")
    wrong, works = [], []
    rank, size = dist.get_rank(), dist.get_world_size()
    for seed in range(num_cases):
        tensor, is_mean = sparse_of(seed, rank)
        op = dist.ReduceOp.AVG if is_mean else dist.ReduceOp.SUM
        works.append((tensor, dist.all_reduce(tensor, op, async_op=seed % 2 == 0)))
    for seed, (tensor, work) in enumerate(works):
        if work is not None:
            work.wait()
        terms = [sparse_of(seed, other)[0].coalesce() for other in range(size)]
        is_mean = sparse_of(seed, 0)[1]
        kept = torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else tensor.dtype
        total = sum((term.to_dense().to(kept) for term in terms), torch.zeros(tensor.shape, dtype=kept))
        wanted = (total / size if is_mean else total).to(tensor.dtype)
        places = {tuple(place) for term in terms for place in term.indices().t().tolist()}
        is_usual = not tensor._values().is_inference() and tensor.is_coalesced()
        if not torch.equal(tensor.to_dense(), wanted) or tensor._nnz() != len(places) or not is_usual:
            wrong.append(f"case {seed} on rank {rank}: {tensor}, not {wanted}")
    dist.destroy_process_group()
    return wrong


@pytest.mark.dist
@pytest.mark.parametrize(
    ("num_ranks", "num_cases"), [(3, 16), further(3, 40), further(1, 40), further(2, 40)]
)
def test_sums_of_sparse_tensors(num_ranks, num_cases):
    wrong = run_ranks(add_sparse, num_ranks, num_cases)
    assert not any(wrong), "\n".join(line for lines in wrong for line in lines)


SIZES = (40_000, 100_003, 1_300_000)  # elements: a part, a part of odd length, several parts


class Ahead:
    """What the ranks show of their calls to a slow one, which so lets them run ahead as far as they can.

    Args:
        path: A file that they share.
        rank: This rank.
        num_ranks: Number of ranks.

    Attributes:
        clock: The clock of this rank: a rank that waits for another one reads it again and again.
    """

    def __init__(self, path, rank, num_ranks):
        # (2, ranks): readings of the clocks, and calls that are over
        self._shown = torch.from_file(path, shared=True, size=2 * num_ranks, dtype=torch.int64).view(2, -1)
        self._readings, self._num_over = self._shown.unbind()
        self._rank = rank
        self._others = [other for other in range(num_ranks) if other != rank]
        self.clock = Clock(now=self._read_clock)

    def _read_clock(self):
        self._readings[self._rank] += 1
        return 0.0

    def end_call(self):
        """Show that a call of this rank is over, and its memory spoiled."""
        self._num_over[self._rank] += 1

    def slow(self, read):
        """Return a function of `Slots` that reads once each other rank waits, or is over with the call."""

        def late(*args, **options):
            before = self._readings.clone()
            while any(
                self._readings[other] == before[other] and self._num_over[other] <= self._num_over[self._rank]
                for other in self._others
            ):
                time.sleep(0.001)
            return read(*args, **options)

        return late


def term(rank, size, dtype, seed):
    return torch.randn(size, generator=torch.Generator().manual_seed(100 * seed + rank)).to(dtype)


def lend(path, cases):
    """Make calls whose operands some ranks lend, and spoil these as soon as a call is over."""
    rank, p = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    ahead = Ahead(path, rank, p)
    dist.init_process_group("shared_memory", pg_options=WaitOptions(clock=ahead.clock))
    wrong, lent_bytes = [], 0
    reads = {name: ahead.slow(getattr(Slots, name)) for name in ("operand", "get_operand")}
    for seed, (operation, size, dtype, lenders) in enumerate(cases):
        size = size // p * p
        terms = [term(other, size, dtype, seed) for other in range(p)]
        memory = (
            empty_in_arena(dist.group.WORLD, size, dtype)
            if rank in lenders
            else torch.empty(size, dtype=dtype)
        )
        assert memory is not None, "the machine has no room"
        lent_bytes += memory.nbytes * (rank in lenders)
        memory.copy_(terms[rank])
        own = memory.view(p, -1)[rank]
        with mock.patch.multiple(Slots, **reads) if rank == seed % p else nullcontext():
            if operation == "all_reduce":
                found, wanted = memory, reduced(terms, "SUM")
                dist.all_reduce(memory)
            elif operation == "reduce_scatter":
                found, wanted = own, reduced(terms, "SUM").view(p, -1)[rank]
                scatter_single(own, memory)
            else:
                found, wanted = memory, torch.cat([each.view(p, -1)[n] for n, each in enumerate(terms)])
                gather_single(memory, own)
        is_right = torch.equal(found, wanted)
        memory.fill_(float("nan"))
        ahead.end_call()
        if not is_right:
            wrong.append(f"rank {rank}: {operation} of {size} {dtype}, lent by {lenders}")
    dist.barrier()
    dist.destroy_process_group()
    return wrong, lent_bytes


@pytest.mark.dist
@pytest.mark.parametrize(
    ("num_ranks", "sizes"), [(3, SIZES[1:]), further(3, SIZES), further(2, SIZES), further(4, SIZES)]
)
def test_operands_that_are_read_where_they_lie(num_ranks, sizes, tmp_path):
    everybody = tuple(range(num_ranks))
    cases = [
        (operation, size, dtype, lenders)
        for operation in ("all_reduce", "reduce_scatter", "all_gather")
        for size in sizes
        for dtype in (torch.float32, torch.bfloat16)[: 2 if operation == "all_reduce" else 1]
        for lenders in (everybody, everybody[1:], (0, everybody[-1]))
    ]
    told = run_ranks(lend, num_ranks, str(tmp_path / "ahead"), cases)
    assert not any(wrong for wrong, _ in told), "\n".join(line for wrong, _ in told for line in wrong)
    assert all(lent > 0 for _, lent in told)


LONG = 1_500_000  # elements: more than passes at once


def make_calls_whose_operands_overlap(path):
    """Outputs that are one tensor, or lie in one another or in the input: as by gloo, the last rank's win."""
    with group(path) as rank:
        own, same, found = torch.tensor([rank + 1.0, 5.0]), torch.zeros(2), {}
        dist.all_gather([same, same], own)
        found["all_gather"] = same.tolist()
        three = torch.zeros(3)
        dist.all_gather([three[:2], three[1:]], own)
        found["rows that overlap"] = three.tolist()
        dist.gather(own, [same, same] if rank == 1 else None, 1)
        found["gather"] = same.tolist() if rank == 1 else []
        dist.all_to_all([same, same], [own, own + 1])
        found["all_to_all"] = same.tolist()
        twice = torch.ones(2)
        dist.group.WORLD.allreduce_coalesced([twice, twice]).wait()
        found["coalesced"] = twice.tolist()
        windows = torch.ones(9).as_strided(
            (2, 3), (3, 2)
        )  # they interleave, and no two elements share memory
        dist.all_reduce(windows)
        found["windows"] = windows.tolist()

        whole = torch.arange(2.0 * LONG) + rank
        expected = torch.cat([whole[LONG - 1 : -1] + other - rank for other in range(2)])
        gather_single(whole, whole[LONG - 1 : -1])
        found["input in the output"] = torch.equal(whole, expected)

        whole = torch.arange(2.0 * LONG + 1) + rank
        mine = slice(1 + rank * LONG, 1 + (rank + 1) * LONG)
        expected = torch.cat([whole[mine] + other - rank for other in range(2)])
        dist.all_to_all_single(whole[:-1], whole[1:])
        found["an exchange in place"] = torch.equal(whole[:-1], expected)

        whole = torch.arange(2.0 * LONG)
        output, parts = whole[LONG - 1 : -1], whole.clone().chunk(2)
        dist.scatter(output, list(whole.chunk(2)) if rank == 0 else None, 0)
        found["a part in the output"] = torch.equal(output, parts[rank])
        return found


@pytest.mark.dist
def test_operands_that_overlap(tmp_path):
    mine, theirs = run_ranks(make_calls_whose_operands_overlap, 2, tmp_path / "overlap")
    expected = {
        "all_gather": [2.0, 5.0],
        "rows that overlap": [1.0, 2.0, 5.0],
        "gather": [],
        "all_to_all": [2.0, 5.0],
        "coalesced": [2.0, 2.0],
        "windows": [[2.0] * 3] * 2,
        "input in the output": True,
        "an exchange in place": True,
        "a part in the output": True,
    }
    assert mine == expected
    assert theirs == expected | {"gather": [2.0, 5.0], "all_to_all": [3.0, 6.0]}


def gather_several_lists(path):
    with group(path) as rank:
        inputs = [torch.full((2, 2), rank + 1.0), torch.full((1,), rank + 10.0)]
        outputs = [[torch.zeros(2, 2), torch.zeros(1)] for _ in range(2)]
        with pytest.warns(FutureWarning):
            dist.all_gather_coalesced(outputs, inputs)
        tensor = torch.ones(2)
        dist.send(tensor, np.int64(1 - rank)) if rank == 0 else dist.recv(tensor, np.int64(0))
        return [[tensor.sum().item() for tensor in listed] for listed in outputs]


@pytest.mark.dist
def test_a_coalesced_gather_has_a_list_of_outputs_for_each_rank(tmp_path):
    found = run_ranks(gather_several_lists, 2, tmp_path / "lists")
    assert found == [[[4.0, 10.0], [8.0, 11.0]]] * 2
