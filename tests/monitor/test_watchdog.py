"""The watchdog names who is waited for: ranks that sleep, stop, die, or go another way; and ends the job.

Where a job can go on, it does (action "report"): the ranks come from the pool then, which takes no time.
"""

import os
import re
import signal
import subprocess
import sys
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn

import colossalai
from colossalai.booster import Booster
from colossalai.communication import all_reduce, copy_forward_reduce_backward
from colossalai.context._mesh import make_group
from colossalai.core import global_context as gpc
from colossalai.monitor._last_calls import MessageRecord
from colossalai.monitor._sections import name_modules, section
from tests.harness.clocks import process
from tests.launcher.command import start
from tests.monitor.hanging import (
    LIMIT_S,
    TIMEOUT_S,
    TP,
    continue_after_report,
    hold,
    hold_the_lock,
    launch,
    let_time_pass,
    meet,
    note_known,
    notices,
    pass_time,
    report,
    wait_for,
    wait_for_report,
    wait_until_known,
)
from tests.ranks import ROOT, RanksError, run_ranks
from tests.tiers import in_soak

pytestmark = pytest.mark.dist


class Block(nn.Module):
    def forward(self, x):
        return all_reduce(x, TP)


class Copying(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))  # the graph knows a module by its parameters

    def forward(self, x):
        return copy_forward_reduce_backward(x, gpc.axis(TP)) * self.scale


def _model(block):
    model = nn.Sequential(nn.Identity(), nn.ModuleDict({"attn": block()}))
    model.forward = lambda x: model[1]["attn"](x)
    name_modules(model)
    return model


class Samples(torch.utils.data.Dataset):
    def __init__(self, folder):
        self.folder = folder

    def __len__(self):
        return 1

    def __getitem__(self, index):
        hold(self.folder)  # a sample that takes for ever
        return torch.ones(3)


def sleeps_in_data_loading(folder):
    rank = launch(folder, waiting=(0,))
    batch = torch.ones(1, 3) if rank == 0 else next(iter(torch.utils.data.DataLoader(Samples(folder))))
    return _model(Block)(batch).tolist()


def test_a_rank_in_data_loading_is_named_and_the_job_can_go_on(tmp_path):
    assert run_ranks(sleeps_in_data_loading, 2, tmp_path) == [[[2.0, 2.0, 2.0]]] * 2
    text = report(tmp_path)
    assert "did not enter all_reduce #2 of axis tp in 1.attn; it is in data loading: hanging.py" in text
    assert text.splitlines()[1].startswith("rank 1 (")
    assert "waits in all_reduce #2 of axis tp in 1.attn with (1, 3) float32 for" in text
    assert "in __getitem__" in text
    assert text.index("Python stacks of rank 0:") < text.index("Python stacks of rank 1:")


def does_not_come_to_the_backward(folder):
    rank = launch(folder, waiting=(0,))
    x = torch.ones(2, requires_grad=True)
    model = _model(Copying)  # kept: the watchdog must not keep a model alive, and asks it for its names
    loss = model(x).sum()
    if rank == 1:
        try:
            raise KeyError("no key")
        except KeyError:  # it went another way
            hold(folder)
    loss.backward()
    return x.grad.tolist()


def test_the_module_of_a_backward_and_an_error_that_was_caught_are_named(tmp_path):
    assert run_ranks(does_not_come_to_the_backward, 2, tmp_path) == [[2.0, 2.0]] * 2
    text = report(tmp_path)
    assert "rank 1 (" in text.splitlines()[1]
    assert "did not enter all_reduce #2 of axis tp in 1.attn" in text
    assert "it is handling KeyError: 'no key' (raised at test_watchdog.py:" in text


def saves_on_rank_0_only(folder):
    """The most common mistake; the others come when a line has said what is wrong."""
    with notices(folder) as told:
        rank = launch(folder, timeout=900.0, action="end", notice=30.0, waiting=(0,))
        booster = Booster()
        model, *_ = booster.boost(torch.nn.Linear(2, 1))
        if rank != 0:
            let_time_pass(folder)
            wait_for(told)
        booster.save(folder / "states", model, step=0)
        meet()
        pass_time(folder, 90.0)  # another line would come now
        return told()


def test_after_a_while_one_line_says_who_waits_for_whom_and_until_when(tmp_path):
    lines, _, _ = run_ranks(saves_on_rank_0_only, 3, tmp_path)
    # Of each wait once; on a busy machine a later collective may take that long, too.
    (line,) = [line for line in lines if " in save #1 of a training state " in line]
    said = (
        r"colossalai watchdog: rank 0 waits for \d+ s in save #1 of a training state "
        r"\(it is in saving or loading a checkpoint: test_watchdog.py:.*`booster.save\(.*\)`\): "
        r"rank 1 \(.*\) did not enter save #1 of a training state; it is at hanging.py:[^;]*; "
        r"so with rank 2; if nothing moves, the job is ended in (8\d\d|900) s"
    )
    assert re.fullmatch(said, line), line
    assert not list(tmp_path.glob("hang-*"))


def waits_while_another_rank_writes(folder):
    """Rank 0 writes the first notice; of the second, rank 0 is taken to be late, and rank 1 writes it."""
    with notices(folder) as told:
        rank = launch(folder, timeout=900.0, notice=30.0, waiting=(0,))
        ((watchdog, _),) = process.watching
        conclude, wait = watchdog._conclude_if_lowest, watchdog._wait_for_key

        def conclude_first(number, **options):
            if number == "notice-0":
                conclude(number, **options)

        def wait_in_vain(key, number, **options):
            return wait(key, number, **options) and key != "report/notice-1/0"

        if rank == 0:
            watchdog._conclude_if_lowest = conclude_first
            dist.recv(torch.empty(3), src=1)
        else:
            watchdog._wait_for_key = wait_in_vain
            let_time_pass(folder)
            wait_for(told)
            watchdog._store.set("notice/1", "1")
            wait_for(lambda: watchdog._store.check("diagnosis/notice-1"))
            dist.send(torch.ones(3), dst=0)
        meet()
        return told()


def test_a_wait_is_in_one_notice_whichever_rank_writes_the_next(tmp_path):
    lines, _ = run_ranks(waits_while_another_rank_writes, 2, tmp_path)
    assert len([line for line in lines if " in recv #1 from rank 1 " in line]) == 1, lines


def does_not_send(folder):
    rank = launch(folder, waiting=(0,))
    for number in range(2):
        if rank == 0:
            dist.recv(torch.empty(3), src=1)
        else:
            if number == 1:
                hold(folder)
            dist.send(torch.ones(3), dst=0)


def test_a_message_that_is_not_sent_is_named(tmp_path):
    run_ranks(does_not_send, 2, tmp_path)
    text = report(tmp_path)
    assert "did not send message #2 to rank 0 of axis tp" in text
    assert "waits in recv #2 from rank 1 of axis tp with (3,) float32" in text


class Watched(threading.Thread):
    """Look at what a record says while the main thread waits; then make a file: it need not any more."""

    def __init__(self, record, file):
        super().__init__(daemon=True)
        self.record, self.file, self.channels = record, file, []

    def run(self):
        wait_for(lambda: bool(list(self.record.messages())))
        self.channels = [(message.channel, message.number) for message in self.record.messages()]
        self.file.touch()


def counts_and_waits(folder):
    colossalai.launch_from_torch({"watchdog": False}, verbose=False)
    record = MessageRecord()
    watched = Watched(record, folder / "seen")
    with record.recording():
        if dist.get_rank() == 0:
            watched.start()
            dist.recv(torch.empty(3), src=1)
            watched.join()
        else:
            wait_for((folder / "seen").exists)
            dist.send(torch.ones(3), dst=0)
    return dict(record.counts), watched.channels


def test_a_wait_is_for_what_the_partner_counts(tmp_path):
    (_, waits), (counts, _) = run_ranks(counts_and_waits, 2, tmp_path)
    assert waits == list(counts.items())


def leaves_messages_alone(folder):
    rank = launch(folder)
    meet()  # all clocks have begun
    if rank == 0:
        kept = [dist.isend(torch.ones(3), dst=1), dist.irecv(torch.ones(3), src=1)]
    else:
        kept = [dist.irecv(torch.ones(3), src=0)]
    pass_time(folder, 2.5 * TIMEOUT_S)
    return len(kept)


@pytest.mark.long  # such are left below, too
def test_a_message_that_nobody_waits_for_is_no_wait(tmp_path):
    run_ranks(leaves_messages_alone, 2, tmp_path)
    assert not list(tmp_path.glob("hang-*"))


def holds_the_lock(folder):
    rank = launch(folder, waiting=(0,), silent=(1,))
    if rank == 1:
        hold_the_lock(folder)
    all_reduce(torch.ones(2), TP)
    wait_for_report(folder)


@pytest.mark.long  # of rank 0 it is in test_watchdog_without_rank_0
def test_a_rank_that_cannot_answer_has_its_stacks_read_by_its_neighbor(tmp_path):
    run_ranks(holds_the_lock, 2, tmp_path)
    text = report(tmp_path)
    assert "compiled code holds Python's lock, at hanging.py:" in text
    assert "in hold_the_lock; awaited by rank 0 in all_reduce #2 of axis tp" in text


def is_stopped(folder):
    rank = launch(folder, waiting=(0,), silent=(1,))
    pids = [0, 0]
    dist.all_gather_object(pids, os.getpid())
    if rank == 0:
        continue_after_report(folder, pids[1])
    else:
        os.kill(os.getpid(), signal.SIGSTOP)
    return all_reduce(torch.ones(1), TP).item()


@pytest.mark.long  # rank 0 is stopped in test_watchdog_without_rank_0
def test_a_stopped_rank_is_named(tmp_path):
    assert run_ranks(is_stopped, 2, tmp_path) == [2.0, 2.0]
    assert "is stopped (SIGSTOP, or a debugger); awaited by rank 0 in all_reduce" in report(tmp_path)


def takes_another_branch(folder, backend):
    rank = launch(folder, action="end", backend=backend, waiting=(0, 1, 2))
    let_time_pass(folder)
    if rank == 2:
        dist.broadcast(torch.ones(4), src=0)
    all_reduce(torch.ones(4), TP)


def test_a_rank_in_another_collective_is_named_and_all_ranks_end(tmp_path):
    with pytest.raises(RanksError) as caught:
        run_ranks(takes_another_branch, 3, tmp_path, "gloo")
    assert str(caught.value).count("HangError: rank 2 (") == 3
    (line,) = report(tmp_path).splitlines()[1:2]
    assert line.startswith("rank 2 (")
    assert "entered broadcast as #2 of axis tp; it is at test_watchdog.py:" in line
    assert line.endswith("ranks 0, 1 entered all_reduce")


def test_through_shared_memory_it_is_named_at_once(tmp_path):
    with pytest.raises(RanksError) as caught:
        run_ranks(takes_another_branch, 3, tmp_path, "shared_memory")
    said = "ranks do not agree on the collective #2 of axis tp: op is all_reduce on rank"
    assert str(caught.value).count(said) >= 3
    assert not list(tmp_path.glob("hang-*.txt"))


def is_slow(folder):
    """Each wait is shorter than the timeout, all together are longer; for some messages nobody waits."""
    rank = launch(folder)
    meet()  # all clocks have begun
    kept = [dist.irecv(torch.ones(3), src=1 - rank)]
    if rank == 0:
        kept.append(dist.isend(torch.ones(3), dst=1, tag=1))
    for number in range(4):
        if rank == number % 2:
            wait_for((folder / "clock" / f"waits-{1 - rank}").exists)
            pass_time(folder, 0.7 * TIMEOUT_S)
        all_reduce(torch.ones(2), TP)
        with section("the forward"):
            meet()
            if rank == 0:
                pass_time(folder, 0.7 * TIMEOUT_S)
            meet()
    del kept
    gpc.destroy()
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("colossalai")]


def test_who_is_only_slow_is_left_alone(tmp_path):
    assert run_ranks(is_slow, 2, tmp_path) == [[], []]
    assert not list(tmp_path.glob("hang-*"))


def has_a_long_forward(folder):
    rank = launch(folder, waiting=(1,))
    if rank == 1:
        with section("the forward"):
            hold(folder)
    else:
        wait_for_report(folder)


def test_a_step_that_waits_for_nobody_is_named(tmp_path):
    run_ranks(has_a_long_forward, 2, tmp_path)
    line = report(tmp_path).splitlines()[1]
    assert line.startswith("rank 1 (")
    assert "has been in the forward for more than 60 s; it is in the forward: hanging.py:" in line


def meets_a_closed_connection(folder):
    rank = launch(folder, is_patient=False)
    if rank == 1:
        gpc.destroy()
        (folder / "left").touch()
        wait_for((folder / "told").exists)
        return
    wait_for((folder / "left").exists)
    try:
        all_reduce(torch.ones(2), TP)
    except RuntimeError as error:
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        (folder / "told").touch()


def test_an_error_of_a_closed_connection_says_whose(tmp_path, capsys):
    run_ranks(meets_a_closed_connection, 2, tmp_path)
    printed = capsys.readouterr().out
    assert "rank 1 has left the group before the others were through with all_reduce #" in printed
    assert "has left the job: its script has ended it" in printed.splitlines()[-1]


JOB = """
import os, pathlib, signal, sys, time
import torch, torch.distributed as dist
from colossalai.context._mesh import make_group
from tests.monitor.hanging import launch, let_time_pass

rank = launch(pathlib.Path(sys.argv[3]), action="end", backend=sys.argv[2], waiting=[0])
if sys.argv[1] == "dies":
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    pair = make_group([0, 1], purpose="test")
    if rank == 1:
        dist.distributed_c10d._get_default_store().wait(["what rank 2 would have written"])
    dist.all_reduce(torch.ones(2), group=pair)
elif rank == 1:
    let_time_pass(pathlib.Path(sys.argv[3]))
    time.sleep(1000)
dist.barrier()
"""


@pytest.mark.long  # any error of a rank is shown so, as in tests/launcher/test_run.py
def test_the_launcher_names_the_rank_that_was_waited_for(tmp_path):
    command = start(tmp_path, "run", "--nproc_per_node", "2", "job.py", "sleeps", "auto", ".", script=JOB)
    try:
        assert command.wait() == 1
    finally:
        command.end()
    launcher = command.err[command.err.index("colossalai run: ") :]
    assert launcher.startswith("colossalai run: rank 1 (pid ")
    assert (
        "did not enter barrier #2 of axis tp; it is at job.py:17 in <module>: `time.sleep(1000)`" in launcher
    )
    assert report(tmp_path).count("Python stacks of rank") == 2


DIFFERENT_SHAPES = """
import torch, torch.distributed as dist
import colossalai

colossalai.launch_from_torch(backend=BACKEND, verbose=False)
dist.barrier()
dist.all_reduce(torch.ones(1000 * (2 if dist.get_rank() == 1 else 1)))
"""


@pytest.mark.long  # parts of it without a launcher are in test_last_calls
@pytest.mark.parametrize("backend", ["shared_memory", in_soak("gloo")])
def test_a_rank_with_another_shape_is_named_and_not_the_one_that_it_kills(tmp_path, backend):
    script = DIFFERENT_SHAPES.replace("BACKEND", repr(backend))
    command = start(tmp_path, "run", "--nproc_per_node", "3", "job.py", script=script)
    try:
        assert command.wait() != 0
    finally:
        command.end()
    first = command.err[command.err.index("colossalai run: ") :].splitlines()[0]
    said = "DisagreementError: ranks do not agree on all_reduce #2 of axis dp: "
    assert said in first, command.err
    # On a busy machine one of the others may come late, or die before its record is read: it is not listed.
    if backend == "shared_memory":
        assert "number of elements is 1000 on rank" in first
        assert "2000 on rank [1]" in first
        return
    assert "shape is " in first
    assert "(2000,) on rank [1]" in first
    assert "(1000,) on rank" in first


def loses_rank_2(folder):
    """Rank 0 waits for 1 in a collective, 1 for 2 elsewhere: no connection to 2 is in use."""
    if os.environ["RANK"] == "2":
        pid = os.fork()  # the pool takes the death of its own processes for a failure
        if pid == 0:
            launch(folder)
            wait_until_known(folder)
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(pid, 0)
        let_time_pass(folder)
        return pid
    rank = launch(folder, waiting=(0,))
    note_known(folder)
    pair = make_group([0, 1], purpose="test")
    if rank == 1:
        wait_for_report(folder)
    dist.all_reduce(torch.ones(2), group=pair)
    return None


@pytest.mark.long  # rank 0 dies in test_watchdog_without_rank_0
def test_a_dead_rank_is_named(tmp_path):
    *_, pid = run_ranks(loses_rank_2, 3, tmp_path)
    lines = report(tmp_path).splitlines()
    assert lines[1].endswith(f"pid {pid}) has died")
    assert "did not enter all_reduce #1 of group 'test:0-1#0'; it is at hanging.py:" in lines[2]


@pytest.mark.long
@pytest.mark.parametrize("backend", ["shared_memory", in_soak("gloo")])
def test_a_dead_rank_is_named_where_no_launcher_looks(tmp_path, backend, job_port):
    """By the group that shares memory, whose waits end first; over gloo by the watchdog, as above."""
    (tmp_path / "job.py").write_text(JOB)
    address = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(job_port),
        "WORLD_SIZE": "3",
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "job.py", "dies", backend, "."],
            cwd=tmp_path,
            env={**os.environ, **address, "RANK": str(rank), "LOCAL_RANK": "0", "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        ranks[2].wait(timeout=LIMIT_S)
        if backend == "gloo":
            let_time_pass(tmp_path)
        errors = [rank.communicate(timeout=LIMIT_S)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [1, 1, -signal.SIGKILL]
    if backend == "shared_memory":
        call = "all_reduce #1 of group 'test:0-1#0'"
        assert f"rank 2 has ended before the others were through with {call}" in errors[0]
        for error in errors[:2]:  # rank 1 has asked the store, which was rank 0's
            assert f"pid {ranks[2].pid}) has died" in error
        return
    lines = report(tmp_path).splitlines()
    assert lines[1].endswith(f"pid {ranks[2].pid}) has died")
    assert "did not enter all_reduce #1 of group 'test:0-1#0'; it is at job.py:13" in lines[2]
    assert "the job ends; all stacks are in" in errors[0]
    assert "HangError: rank 2 (" in errors[1]
