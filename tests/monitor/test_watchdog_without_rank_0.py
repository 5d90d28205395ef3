"""The watchdog where rank 0 is silent or gone, which else writes the report; perhaps with the store."""

import os
import signal
import sys

import pytest
import torch
import torch.distributed as dist

from colossalai.communication import all_reduce
from tests.monitor.hanging import (
    TP,
    continue_after_report,
    hold_the_lock,
    launch,
    let_time_pass,
    meet,
    note_known,
    report,
    wait_for,
    wait_for_report,
    wait_until_known,
)
from tests.ranks import run_ranks

pytestmark = pytest.mark.dist

SHORT_S = 3.0


@pytest.fixture
def agent_port():
    """A store in this process, as a launcher's agent serves it."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store.port
    del store


def _use_store_of_agent(port):
    os.environ.update(MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")


def holds_the_lock(folder):
    rank = launch(folder, waiting=(1, 2), silent=(0,))
    if rank == 0:
        hold_the_lock(folder)
    total = all_reduce(torch.ones(1), TP)
    if rank == 0:
        wait_for_report(folder)
    return total.item()


def test_the_lowest_rank_that_answers_reports_for_a_rank_0_that_cannot(tmp_path):
    assert run_ranks(holds_the_lock, 3, tmp_path) == [3.0] * 3
    lines = report(tmp_path).splitlines()
    assert lines[1].startswith("rank 0 (")
    assert "compiled code holds Python's lock, at hanging.py:" in lines[1]
    assert lines[1].endswith("in hold_the_lock; awaited by ranks 1, 2 in all_reduce #2 of axis tp")
    assert [line[:6] for line in lines[3:5]] == ["rank 1", "rank 2"]


def is_stopped(folder, port):
    if port:
        _use_store_of_agent(port)
    # Its store answers no later than within the least of its limits, as the timeout is the least.
    rank = launch(folder, timeout=SHORT_S, waiting=(1,), silent=(0,))
    pids = [0, 0]
    dist.all_gather_object(pids, os.getpid())
    if rank == 1:
        note_known(folder)
        continue_after_report(folder, pids[0])
    else:
        wait_until_known(folder)
        os.kill(os.getpid(), signal.SIGSTOP)
    return all_reduce(torch.ones(1), TP).item()


@pytest.mark.long  # where its store stops as well, it is in the next test
def test_a_stopped_rank_0_is_named_where_the_launcher_serves_the_store(tmp_path, agent_port):
    assert run_ranks(is_stopped, 2, tmp_path, agent_port) == [2.0, 2.0]
    line = report(tmp_path).splitlines()[1]
    assert line.startswith("rank 0 (")
    assert line.endswith("is stopped (SIGSTOP, or a debugger); awaited by rank 1 in all_reduce #4 of axis tp")


def test_a_stopped_rank_0_is_named_where_it_serves_the_store(tmp_path):
    assert run_ranks(is_stopped, 2, tmp_path, 0) == [2.0, 2.0]
    line = report(tmp_path).splitlines()[1]
    assert line.startswith("rank 0 (")
    assert "is stopped (SIGSTOP, or a debugger), and with it the store; awaited by rank 1 in all_red" in line


def loses_rank_0(folder):
    if os.environ["RANK"] == "0":
        _die_as_rank_0(folder)
        let_time_pass(folder)
        return
    rank = launch(folder, waiting=(1,))
    note_known(folder)
    if rank == 1:
        dist.recv(torch.empty(1), src=2)
    else:
        wait_for_report(folder)
        dist.send(torch.ones(1), dst=1)


def _die_as_rank_0(folder):
    """Be rank 0 in a process that dies after a while: the pool takes the death of its own for a failure."""
    pid = os.fork()
    if pid == 0:
        launch(folder)
        wait_until_known(folder)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)


def test_a_dead_rank_0_is_named_by_those_who_wait_for_others(tmp_path):
    run_ranks(loses_rank_0, 3, tmp_path)
    lines = report(tmp_path).splitlines()
    assert lines[1].startswith("rank 0 (")
    assert lines[1].endswith("has died, and with it the store")
    assert "waits in recv #1 from rank 2 of axis tp" in lines[3]


def loses_the_launcher(folder):
    if os.environ["RANK"] == "2":
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        (folder / "part").write_text(str(store.port))
        (folder / "part").rename(folder / "port")
        wait_for(lambda: len([*folder.glob("met-*")]) == 2)
        del store
        let_time_pass(folder)
        return None
    wait_for((folder / "port").exists)
    _use_store_of_agent((folder / "port").read_text())
    os.environ["WORLD_SIZE"] = "2"
    rank = launch(folder, waiting=(0,))
    meet()
    (folder / f"met-{rank}").touch()
    if rank == 1:
        wait_for_report(folder)
    return all_reduce(torch.ones(1), TP).item()


def test_a_rank_that_waits_speaks_for_itself_when_the_launcher_is_lost(tmp_path):
    assert run_ranks(loses_the_launcher, 3, tmp_path) == [2.0, 2.0, None]
    port = (tmp_path / "port").read_text()
    lines = report(tmp_path).splitlines()
    assert lines[1].startswith(
        f"the store does not answer any more: the launcher at 127.0.0.1:{port}, which serves it, is gone"
    )
    assert lines[2].startswith("rank 0 (")
    assert "has been in a collective (of group 0)" in lines[2]
    assert "waits in all_reduce #2 of axis tp" in lines[4]


def meets_a_closed_connection(folder):
    if os.environ["RANK"] == "0":
        _die_as_rank_0(folder)
        return
    launch(folder)
    note_known(folder)
    try:
        all_reduce(torch.ones(2), TP)
    except RuntimeError as error:
        sys.excepthook(type(error), error, error.__traceback__)


def test_an_error_of_a_closed_connection_names_a_rank_0_that_has_taken_the_store_along(tmp_path, capsys):
    run_ranks(meets_a_closed_connection, 2, tmp_path)
    lines = capsys.readouterr().out.splitlines()
    # torch's hook puts the rank before it; torch's own warnings of the lost store come before or after.
    (said,) = [line for line in lines if line.startswith("[rank1]: rank 0 (")]
    assert said.endswith("has died, and with it the store")
