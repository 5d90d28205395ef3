"""The test infrastructure itself: what `run_ranks` returns, and how it tells of failing and hanging ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests._zygote import GRACE_S
from tests.ranks import ROOT, RanksError, RanksTimeoutError, run_ranks, start_zygote

pytestmark = pytest.mark.dist
END_S = 120.0  # for the end of a process, on a busy machine


def _describe(word: str) -> tuple[int, str, str, int]:
    names = ("LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS")
    values = "/".join(os.environ[name] for name in names)
    return int(os.environ["RANK"]), word, values, torch.get_num_threads()


@pytest.mark.parametrize("world_size", [1, 3])
def test_results_come_by_rank(world_size: int) -> None:
    results = run_ranks(_describe, world_size, "hello")
    assert results == [
        (rank, "hello", f"{rank}/{world_size}/{world_size}/127.0.0.1/1", 1) for rank in range(world_size)
    ]


def _reduce() -> torch.Tensor:
    dist.init_process_group("gloo")
    value = torch.full((2,), float(dist.get_rank() + 1), dtype=torch.float64)
    dist.all_reduce(value)
    return value  # the process group is left as it is: a rank ends without ceremony


def test_collectives_work() -> None:
    for value in run_ranks(_reduce, 4):
        torch.testing.assert_close(value, torch.full((2,), 10.0, dtype=torch.float64))


def _use_the_store_of_a_rank_that_has_returned() -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        time.sleep(0.5)
        dist.distributed_c10d._get_default_store().add("late", 1)


def test_no_rank_leaves_before_all_have_returned() -> None:
    run_ranks(_use_the_store_of_a_rank_that_has_returned, 2)


def _threads() -> tuple[int, int]:
    return threading.active_count(), len(list(Path("/proc/self/task").iterdir()))


def test_ranks_start_without_threads() -> None:
    assert run_ranks(_threads, 2) == [(1, 1)] * 2


def _pid_and_environment() -> tuple[int, str, str]:
    return os.getpid(), os.environ.get("RANKS_TEST", ""), os.getcwd()


def test_ranks_are_fresh_and_see_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = {pid for pid, _, _ in run_ranks(_pid_and_environment, 2)}
    monkeypatch.setenv("RANKS_TEST", "here")
    monkeypatch.chdir(tmp_path)
    after = run_ranks(_pid_and_environment, 2)
    assert before.isdisjoint(pid for pid, _, _ in after)
    assert [rest for _, *rest in after] == [["here", str(tmp_path)]] * 2


def _big() -> bytes:
    return b"x" * 5_000_000


def test_a_large_result_is_no_deadlock() -> None:
    assert [len(result) for result in run_ranks(_big, 2)] == [5_000_000] * 2


def _fail_on_rank_1() -> None:
    print("about to work")
    if os.environ["RANK"] == "1":
        raise KeyError("the missing piece")
    _wait_for_nothing()


def test_first_failing_rank_is_shown_with_its_traceback() -> None:
    with pytest.raises(RanksError) as caught:
        run_ranks(_fail_on_rank_1, 3)
    message = str(caught.value)
    assert message.splitlines()[1].startswith("rank 1: raised: Traceback")
    assert "in _fail_on_rank_1" in message
    assert "KeyError: 'the missing piece'" in message
    assert "rank 1 wrote:\nabout to work" in message
    assert "rank 0: was stopped because another rank had failed" in message


def _fail_one_after_the_other(folder: str) -> None:
    """Raise on rank 2, on rank 1 once that is gone, and on rank 0 after some computation more."""
    rank = int(os.environ["RANK"])
    own, before = Path(folder, str(rank)), Path(folder, str(rank + 1))
    own.with_suffix(".new").write_text(str(os.getpid()))
    own.with_suffix(".new").rename(own)
    while rank < 2 and not before.exists():
        time.sleep(0.01)
    while rank < 2 and Path("/proc", before.read_text()).exists():  # the keeper of the ranks reaps it
        _compute(0.05)
    if rank == 0:
        _compute(1.5 * GRACE_S)
    raise ValueError(f"from {rank}")


def _compute(seconds: float) -> None:
    """Compute for some processor time."""
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def test_the_others_may_tell_their_errors_too(tmp_path: Path) -> None:
    with pytest.raises(RanksError) as caught:
        run_ranks(_fail_one_after_the_other, 3, str(tmp_path))
    message = str(caught.value)
    places = [message.index(f"ValueError: from {rank}") for rank in (2, 1, 0)]
    assert places == sorted(places)


def _hang_on_rank_0() -> None:
    if os.environ["RANK"] == "0":
        _wait_for_nothing()


def _wait_for_nothing() -> None:
    threading.Event().wait()


def test_a_hang_is_ended_with_stacks() -> None:
    with pytest.raises(RanksTimeoutError) as caught:
        run_ranks(_hang_on_rank_0, 2, idle_s=1.0)
    message = str(caught.value)
    assert message.splitlines()[1] == "rank 0: hung: no progress for 1 s"
    assert "in _wait_for_nothing" in message
    assert "rank 1: returned" in message


def _compute_for_ever() -> None:
    while not threading.Event().wait(0.08):  # a fifth of a processor is as much progress as a whole one
        _compute(0.02)


def test_ranks_that_compute_for_ever_are_ended_with_stacks() -> None:
    with pytest.raises(RanksTimeoutError) as caught:
        run_ranks(_compute_for_ever, 2, timeout=5.0, idle_s=1.0)
    message = str(caught.value)
    assert "rank 0: hung: not returned after 5 s" in message
    assert "rank 1: hung: not returned after 5 s" in message
    assert "in _compute_for_ever" in message


def _work_while_the_other_waits(seconds: float, is_child: bool, folder: str) -> None:
    done = Path(folder, "done")
    if os.environ["RANK"] == "0":
        while not done.exists():
            time.sleep(0.1)
        return
    if is_child and (pid := os.fork()) != 0:
        os.waitpid(pid, 0)
        return
    _compute(seconds)
    done.touch()
    if is_child:
        os._exit(0)


@pytest.mark.parametrize("is_child", [False, True])
def test_a_job_is_not_ended_while_a_rank_or_its_child_computes(tmp_path: Path, is_child: bool) -> None:
    run_ranks(_work_while_the_other_waits, 2, 3.0, is_child, str(tmp_path), idle_s=1.0)


def _write_while_idle(count: int) -> None:
    for number in range(count):
        print(number, flush=True)
        time.sleep(0.2)


def test_a_job_is_not_ended_while_it_writes() -> None:
    run_ranks(_write_while_idle, 1, 15, idle_s=1.0)


def _find_the_port_taken(folder: str) -> str:
    seen = Path(folder, "ports")
    with seen.open("a") as file:
        file.write(os.environ["MASTER_PORT"] + "\n")
    ports = seen.read_text().split()
    print("a try")
    if len(ports) < 3:
        raise RuntimeError(f"port: {ports[-1]}, code: -98, name: EADDRINUSE")
    return " ".join(ports)


def test_a_port_that_another_program_takes_is_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (ports,) = run_ranks(_find_the_port_taken, 1, str(tmp_path))
    assert len(set(ports.split())) == 3
    assert capsys.readouterr().out == "a try\n"


def _be_killed() -> None:
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    _wait_for_nothing()


def _exit_early() -> None:
    os._exit(3)


def test_a_killed_rank_is_reported() -> None:
    with pytest.raises(RanksError, match="rank 1: died: killed by SIGKILL"):
        run_ranks(_be_killed, 2)


def test_a_rank_that_exits_is_reported() -> None:
    with pytest.raises(RanksError, match="rank 0: died: exited with code 3 before it returned"):
        run_ranks(_exit_early, 1)


def _return_a_lambda() -> object:
    return lambda: None


def test_a_result_that_cannot_be_pickled_is_an_error_of_the_rank() -> None:
    with pytest.raises(RanksError, match="rank 0: raised"):
        run_ranks(_return_a_lambda, 1)


def _start_child() -> int:
    pid = os.fork()
    if pid == 0:
        _wait_for_nothing()
    return pid


def test_children_of_a_rank_end_with_it() -> None:
    [pid] = run_ranks(_start_child, 1)
    assert not _is_running(pid)


def _is_running(pid: int) -> bool:
    """Whether a process runs; it is not our child, so it may be a zombie for a moment."""
    end = time.monotonic() + END_S
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return False
        if state == "Z":
            return False
        time.sleep(0.05)
    return True


PARENT = """
import sys
from tests.ranks import run_ranks
from tests.test_ranks import _report_and_hang
run_ranks(_report_and_hang, 2, sys.argv[1])
"""


def _report_and_hang(folder: str) -> None:
    (Path(folder) / os.environ["RANK"]).write_text(f"{os.getpid()} {os.getppid()}\n")
    _wait_for_nothing()


def _start_parent(folder: Path) -> subprocess.Popen[bytes]:
    folder.mkdir()
    return subprocess.Popen([sys.executable, "-c", PARENT, str(folder)], cwd=ROOT, stderr=subprocess.DEVNULL)


def _pids(folder: Path) -> set[int]:
    """Return the pids of the two ranks and of their zygote, once all are there."""
    end = time.monotonic() + 600
    while (text := "".join(path.read_text() for path in folder.iterdir())).count("\n") < 2:
        assert time.monotonic() < end, "the ranks do not begin"
        time.sleep(0.05)
    pids = {int(pid) for pid in text.split()}
    assert len(pids) == 3
    return pids


@pytest.mark.long  # it imports all that a zygote imports, twice
def test_nothing_outlives_the_test_process(tmp_path: Path) -> None:
    ways = [signal.SIGKILL, signal.SIGINT]  # both at once: most of the time goes into imports
    parents = [_start_parent(tmp_path / how.name) for how in ways]
    try:
        pids = [_pids(tmp_path / how.name) for how in ways]
        for parent, how in zip(parents, ways, strict=True):
            parent.send_signal(how)
            parent.wait(timeout=120)
    finally:
        for parent in parents:
            parent.kill()
            parent.wait()
    assert not [pid for pid in set.union(*pids) if _is_running(pid)]


@pytest.mark.long  # it imports all that a zygote imports
def test_a_dead_zygote_is_replaced() -> None:
    zygote = start_zygote()
    zygote.process.kill()
    zygote.process.wait()
    assert [rank for rank, *_ in run_ranks(_describe, 2, "again")] == [0, 1]
    assert start_zygote() is not zygote
