"""Debug mode: ranks that would enter different collectives get an error with the values of each."""

import pytest
import torch
import torch.distributed as dist

import colossalai
from colossalai.communication import all_gather, all_reduce, broadcast
from colossalai.context import ParallelMode
from colossalai.core import global_context as gpc
from tests.harness.clocks import clock_of_file, process
from tests.monitor.hanging import wait_for
from tests.ranks import run_ranks

pytestmark = pytest.mark.dist

TP = ParallelMode.PARALLEL_1D
CONFIG = {"parallel": {"tensor": {"size": 2, "mode": "1d"}}, "debug": True}


def _error(call):
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return ""


def disagreements():
    """Disagree in one thing after the other; the groups are as good as before after each error."""
    colossalai.launch_from_torch(CONFIG, verbose=False)
    rank = gpc.get_global_rank()
    dtypes, reductions = (torch.float32, torch.float64), (dist.ReduceOp.SUM, dist.ReduceOp.MAX)
    found = {
        "shape": _error(lambda: all_reduce(torch.ones(4 + rank), TP)),
        "dtype": _error(lambda: all_reduce(torch.ones(4, dtype=dtypes[rank]), TP)),
        "op": _error(lambda: (all_reduce, _broadcast)[rank](torch.ones(4), TP)),
        "reduction": _error(lambda: dist.all_reduce(torch.ones(4), reductions[rank])),
        "root": _error(lambda: dist.broadcast(torch.ones(4), src=rank)),
    }
    found["works on"] = all_reduce(torch.ones(2), TP).tolist()
    return found


def _broadcast(tensor, axis):
    return broadcast(tensor, 0, axis)


def test_all_ranks_get_the_differing_values():
    first, second = run_ranks(disagreements, 2)
    assert first == second
    assert "all_reduce #1 of axis tp: shape is (4,) on rank [0], (5,) on rank [1]" in first["shape"]
    assert "rank 1 at test_debug_mode.py" in first["shape"]
    assert "dtype is float32 on rank [0], float64 on rank [1]" in first["dtype"]
    assert "op is all_reduce on rank [0], broadcast on rank [1]" in first["op"]
    assert "reduction is SUM on rank [0], MAX on rank [1]" in first["reduction"]
    assert "root is 0 on rank [0], 1 on rank [1]" in first["root"]
    assert first["works on"] == [2.0, 2.0]


def one_does_not_come(folder):
    process.clock = clock_of_file(folder / "late")
    options = {"timeout": 100.0, "action": "report"}
    colossalai.launch_from_torch({**CONFIG, "watchdog": options}, verbose=False)
    all_reduce(torch.ones(3), TP)
    if gpc.get_global_rank() == 0:
        error = _error(lambda: all_reduce(torch.ones(4), TP))
        (folder / "done").touch()
        return error
    (folder / "late").touch()
    wait_for((folder / "done").exists)
    return None


def test_who_does_not_come_is_named_with_where_it_was_last(tmp_path):
    error, _ = run_ranks(one_does_not_come, 2, tmp_path)
    assert "all_reduce of (4,) #2 of axis tp: after 80 s ranks [1] have not come to it" in error
    assert "rank 1 was last in all_reduce of (3,) #1 of axis tp" in error


def what_agrees():
    """Everything that is right as it is: objects, uneven all-to-all, gather and scatter, messages."""
    colossalai.launch_from_torch(CONFIG, verbose=False)
    rank = gpc.get_global_rank()
    assert all_gather(torch.full((1, 2), float(rank)), 0, TP).tolist() == [[0, 0], [1, 1]]
    objects = [None, None]
    dist.all_gather_object(objects, "x" * (rank + 1))
    assert objects == ["x", "xx"]
    received = torch.zeros(2 if rank == 0 else 4)
    dist.all_to_all_single(received, torch.ones(3), [1, 1] if rank == 0 else [2, 2], [1, 2])
    assert received.sum() == len(received)
    parts = [torch.zeros(1), torch.zeros(1)] if rank == 0 else None
    dist.gather(torch.ones(1), parts, dst=0)
    dist.scatter(torch.ones(1), parts, src=0)
    dist.barrier()
    if rank == 0:
        dist.send(torch.ones(1), 1)
    else:
        dist.recv(torch.ones(1), 0)
    gpc.destroy()
    return dist.ProcessGroup.allreduce.__name__


def test_what_agrees_goes_on_and_the_end_of_the_job_ends_the_mode():
    assert run_ranks(what_agrees, 2) == ["allreduce", "allreduce"]
