"""Groups over several machines: memory within each, gloo between them; here the machines are made up."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import colossalai
from colossalai.communication.shared_memory import _islands, transport_of
from tests.communication.shared_memory.programs import Runner, Step, programs
from tests.communication.shared_memory.ranks_that_end import HOURS_S, error_of, wait_for_file
from tests.ranks import run_ranks
from tests.tiers import further

pytestmark = pytest.mark.dist
BOTH = "shared memory, and gloo between machines"
NAMES = ("north", "south", "east")


@contextmanager
def on_machines(machines: Sequence[int]) -> Iterator[int]:
    """Within the block, this rank is on the machine at its place; yields its rank."""
    place = _islands._location

    def elsewhere() -> dict[str, Any]:
        return {**place(), "kernel": NAMES[machines[int(os.environ["RANK"])]]}

    _islands._location = elsewhere
    try:
        dist.init_process_group("shared_memory", timeout=timedelta(seconds=HOURS_S))
        yield dist.get_rank()
        if dist.is_initialized():
            dist.destroy_process_group()
    finally:
        _islands._location = place


def run_program(groups: list[list[int]], program: list[Any], machines: list[int]) -> list[str]:
    with on_machines(machines):
        wrong = Runner(groups, "shared_memory", machines).run(program)
        dist.barrier()
        return wrong


def _shares(ranks: list[int], machines: list[int]) -> bool:
    return len(ranks) == 1 or len({machines[rank] for rank in ranks}) < len(ranks)


@pytest.mark.parametrize("num_programs", [2, further(6)])
def test_programs_of_calls(num_programs: int) -> None:
    @settings(max_examples=num_programs, suppress_health_check=list(HealthCheck), phases=(Phase.generate,))
    @given(drawn=programs(most=4), machines=st.lists(st.integers(0, 2), min_size=4, max_size=4))
    def check(drawn: tuple[int, list[list[int]], list[Any]], machines: list[int]) -> None:
        num_ranks, groups, program = drawn
        machines = [machines[0], *machines][:num_ranks]  # two share one: the world is not gloo's alone
        groups = [ranks if _shares(ranks, machines) else groups[0] for ranks in groups]
        wrong = run_ranks(run_program, num_ranks, groups, program, machines)
        assert not any(wrong), "\n".join(line for lines in wrong for line in lines)

    check()


@pytest.mark.parametrize("machines", [[2, 0, 1, 0], further([0, 1, 2, 2])], ids=["2010", "0122"])
def test_sums_go_in_the_order_of_machines(machines: list[int]) -> None:
    """Of three, as the order of two changes no bit: whole tensors, sections, at a root, scattered."""
    program = [
        Step(operation, 0, dtype, shape, reduction, root, False, False, root)
        for shape in ((7,), (70_001,))
        for dtype in (torch.float32, torch.bfloat16)
        for operation in ("all_reduce", "reduce", "reduce_scatter")
        for root, reduction in enumerate(("SUM", "AVG", "SUM", "PRODUCT"))
    ]
    wrong = run_ranks(run_program, 4, [[0, 1, 2, 3]], program, machines)
    assert not any(wrong), "\n".join(line for lines in wrong for line in lines)


def talk(machines: list[int]) -> tuple[list[str], list[tuple[int, int]]]:
    """Return how the ranks of three groups talk, and what a sum and a gather have sent, by this rank."""
    with on_machines(machines) as rank:
        groups = [None, dist.new_group([0, 1]), dist.new_group([1, 2])]
        said = [transport_of(pg) for pg in groups if pg != dist.GroupMember.NON_GROUP_MEMBER]
        world = dist.group.WORLD
        sent: list[int] = []
        across = world.collectives  # type: ignore[union-attr]
        exchange = across._exchange

        def counting(sends: dict[int, torch.Tensor], receives: dict[int, torch.Tensor]) -> None:
            sent.append(sum(tensor.nbytes for tensor in sends.values()))
            exchange(sends, receives)

        across._exchange = counting
        dist.all_reduce(torch.ones(300_000))
        summed, header = sum(sent), sent[0] if sent else 0
        sent.clear()
        dist.all_gather([torch.empty(1000) for _ in machines], torch.full((1000,), float(rank)))
        across._exchange = exchange
        return said, [(summed - header, sum(sent) - header)]


@pytest.mark.long  # how the ranks talk is in the job below, too
def test_a_machine_sends_as_much_as_one_rank_in_its_place() -> None:
    first, second, third, fourth = run_ranks(talk, 4, [0, 0, 1, 1])
    assert first[0] == [BOTH, "shared memory"]
    assert second[0] == [BOTH, "shared memory", "gloo"]
    assert third[0] == [BOTH, "gloo"]
    for leader in (first, third):
        assert leader[1] == [(4 * 300_000, 2 * 4 * 1000)]
    for other in (second, fourth):
        assert other[1] == [(0, 0)]


@pytest.mark.long  # of two machines above, and what three give is right by the sums
def test_three_machines_send_sections() -> None:
    """2 (H-1)/H of a sum, and to each of the two others what the machine's ranks give to a gather."""
    *leaders, other = run_ranks(talk, 4, [0, 1, 2, 2])
    sections = [2 * 2 * 4 * 100_000] * 3
    assert [found[1][0][0] for found in leaders] == sections
    assert [found[1][0][1] for found in leaders] == [2 * 4 * 1000, 2 * 4 * 1000, 2 * 8 * 1000]
    assert other[1] == [(0, 0)]


def use_messages(machines: list[int]) -> bool:
    with on_machines(machines) as rank:
        found = torch.zeros(5, 2)
        if rank == 2:
            senders = {dist.recv(found.t()[0]) for _ in range(2)}  # with gaps, from any source
            assert senders == {0, 1}
            work = dist.irecv(found.t()[1], 0, tag=7)
            assert work.wait(timedelta(seconds=HOURS_S))
            assert work.is_completed()
            assert found[:, 1].tolist() == [9.0] * 5
        else:
            dist.send(torch.full((5,), float(rank)), 2)
            if rank == 0:
                dist.isend(torch.full((5,), 9.0), 2, tag=7).wait()
        dist.group.WORLD.monitored_barrier()  # type: ignore[union-attr]
        tensor = torch.eye(3).to_sparse() * (rank + 1)
        dist.all_reduce(tensor, dist.ReduceOp.AVG)
        return torch.equal(tensor.to_dense(), torch.eye(3) * 2)


def test_messages_barriers_and_sparse_sums() -> None:
    assert run_ranks(use_messages, 3, [0, 0, 1]) == [True] * 3


def disagree(machines: list[int], odd: int) -> tuple[str, str]:
    with on_machines(machines) as rank:
        dist.barrier()
        count = 5 if rank == odd else 4
        return error_of(lambda: dist.all_reduce(torch.ones(count)))


@pytest.mark.parametrize("odd", [2, further(0)])
def test_ranks_that_disagree_are_named_across_machines(odd: int) -> None:
    """Rank 2 is alone: only the leaders can see it. Rank 0 is not: its neighbor sees it."""
    for kind, text in run_ranks(disagree, 3, [0, 0, 1], odd)[: 3 if odd else 2]:
        assert kind in ("DisagreementError", "DistBackendError")
        assert "ranks do not agree on all_reduce #" in text
        assert f"5 on rank [{odd}]" in text


def comes_late(machines: list[int], folder: Path) -> str:
    with on_machines(machines) as rank:
        dist.barrier()
        if rank == 2:
            for other in range(2):
                wait_for_file(folder / f"told-{other}")
            return ""
        barrier = dist.group.WORLD.monitored_barrier  # type: ignore[union-attr]
        error = error_of(lambda: barrier(timedelta(seconds=0.5)))[1]
        (folder / f"told-{rank}").touch()
        return error


def test_a_limit_holds_across_machines(tmp_path: Path) -> None:
    for error in run_ranks(comes_late, 3, [0, 0, 1], tmp_path)[:2]:
        assert "barrier #2 of group '0'" in error
        assert "within 0.5 s" in error


def dies(machines: list[int], victim: int) -> str:
    if int(os.environ["RANK"]) == victim:
        pid = os.fork()  # the pool takes the death of its own processes for a failure
        if pid:
            os.waitpid(pid, 0)
            return ""
    with on_machines(machines) as rank:
        dist.barrier()
        if rank == victim:
            os._exit(1)
        found = error_of(lambda: dist.all_reduce(torch.ones(4)))[1]
        dist.distributed_c10d.destroy_process_group()
        return found


@pytest.mark.parametrize("victim", [2, further(1)])
def test_a_death_ends_the_wait_on_all_machines(victim: int) -> None:
    errors = run_ranks(dies, 4, [0, 0, 1, 1], victim)
    for rank, error in enumerate(errors):
        assert bool(error) == (rank != victim), (rank, error)
    neighbor = {1: 0, 2: 3}[victim]
    assert f"rank {victim} has ended before the others were through with all_reduce" in errors[neighbor]


def trained(machines: list[int] | None) -> list[float]:
    """Train a model under tensor and data parallelism; return the losses."""
    place = _islands._location
    rank = int(os.environ["RANK"])
    if machines is not None:
        _islands._location = lambda: {**place(), "kernel": NAMES[machines[rank]]}
    try:
        config = {"parallel": {"tensor": {"size": 2, "mode": "1d"}}}
        colossalai.launch_from_torch(config, verbose=False)
        assert transport_of() == ("shared memory" if machines is None else BOTH)
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            colossalai.nn.Linear1D_Col(8, 16), torch.nn.Tanh(), colossalai.nn.Linear1D_Row(16, 8)
        ).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine, *_ = colossalai.initialize(model, optimizer, torch.nn.MSELoss(), verbose=False)
        losses = []
        for step in range(3):
            engine.zero_grad()
            x = torch.arange(16.0, dtype=torch.float64).view(2, 8).sin() + step
            loss = engine.criterion(engine(x), x.cos())
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return losses
    finally:
        _islands._location = place


def test_a_job_on_two_machines_trains_as_on_one() -> None:
    alone = run_ranks(trained, 4, None)
    assert run_ranks(trained, 4, [0, 0, 1, 1]) == [pytest.approx(losses, rel=1e-12) for losses in alone]
