"""`colossalai run`, for real: what the ranks see, and how a job ends when something goes wrong.

A job costs two seconds, most of them for importing torch. So one job answers several questions, and those
that need nobody to interfere run side by side.
"""

import json
import os
import pty
import re
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from colossalai.cluster import bind_ranks
from tests.harness.ports import PortReservation
from tests.launcher.command import Command, is_gone, start, wait_until
from tests.tiers import further

pytestmark = pytest.mark.dist

START_JOB = ("run", "--nproc_per_node", "2", "--no-bind")
SEES = """
import json, os, sys
names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"]
with open("rank_" + os.environ["RANK"], "w") as file:
    json.dump(
        {
            "env": {name: os.environ[name] for name in names},
            "argv": sys.argv,
            "path": sys.path[0],
            "name": __name__,
            "torch": "torch" in sys.modules,
            "tty": sys.stdout.isatty(),
            "cpus": sorted(os.sched_getaffinity(0)),
        },
        file,
    )
"""

# Rank 1 ends when rank 0 has written its line: the others are ended as soon as one has failed.
EXITS = """
import os, sys, time
print("rank", os.environ["RANK"], "of", __name__, sys.argv[1:], flush=True)
if os.environ["RANK"] == "1":
    while not os.path.exists("written"):
        time.sleep(0.01)
    sys.exit(3)
open("written", "w").close()
time.sleep(3600)
"""

# Rank 0 does not end when asked; nor does the child of rank 1, which is in a session of its own.
RAISES = """
import os, signal, subprocess, sys, time
if os.environ["RANK"] == "0":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print(os.getpid())
    open("deaf", "w").close()
    time.sleep(3600)
code = "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(3600)"
child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
child.stdout.readline()
print(child.pid)
while not os.path.exists("deaf"):
    time.sleep(0.01)
def train():
    raise ValueError("a loss of NaN")
train()
"""

# Its main thread fails, another one keeps the process alive.
HANGS = """
import os, threading, time
if os.environ["RANK"] == "1":
    threading.Thread(target=time.sleep, args=(3600,)).start()
    print(os.getpid())
    raise ValueError("never ends")
time.sleep(3600)
"""

# Rank 0 fails as soon as rank 1 is gone, and before the launcher has seen that.
PEERS = """
import os, socket, time
rank = os.environ["RANK"]
peer = socket.socket(socket.AF_UNIX)
if rank == "0":
    peer.bind("made")
    peer.listen()
    os.rename("made", "peer")
    peer, _ = peer.accept()
else:
    while not os.path.exists("peer"):
        time.sleep(0.01)
    peer.connect("peer")
os.write(1, f"{rank}:{os.getpid()}\\n".encode())  # one write: two ranks share the pipe
if not peer.recv(1):
    raise ConnectionError("the peer is gone")
"""

BARRIER = """
import faulthandler, os, time
faulthandler.dump_traceback_later(600)
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
os.write(1, f"{dist.get_rank()}:{os.getpid()}\\n".encode())  # one write: two ranks share the pipe
if dist.get_rank() == 1:
    time.sleep(3600)
dist.barrier()
"""

SLEEPS = """
import os, signal, sys, time
def save(number, frame):
    print("saved")
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print(os.getpid())
time.sleep(3600)
"""

DEAF = """
import os, signal, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.write(1, f"{os.getpid()}\\n".encode())  # one write: they share the file
time.sleep(3600)
"""

# What a rank is asked by a signal it says, and goes on.
ASKED = """
import os, signal, time
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, frame: os.write(1, b"asked\\n"))
os.write(1, f"{os.getpid()}\\n".encode())
time.sleep(3600)
"""

# The command, with an hour between the first signal to the ranks and the last one.
PATIENT = """
import sys
from colossalai.launcher import RunOptions, run
sys.exit(run(RunOptions(target="job.py", num_procs=2, bind=False, grace_s=3600.0)))
"""

DEAF_PARENT = f"""
import subprocess, sys
child = {DEAF!r}
subprocess.Popen([sys.executable, "-c", child], start_new_session=True)
{DEAF}
"""


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    """Start commands that are ended with the test."""
    commands: list[Command] = []

    def start_one(script: str, *args: str, driver: str = "") -> Command:
        args = args if args or driver else (*START_JOB, "job.py")
        commands.append(start(tmp_path, *args, script=script, driver=driver))
        return commands[-1]

    yield start_one
    for command in commands:
        command.end()


@pytest.fixture(scope="module")
def side_by_side(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Command]]:
    """The jobs that end by themselves."""
    folder = tmp_path_factory.mktemp("jobs")
    ours, theirs = pty.openpty()
    reservation = PortReservation()
    port = str(reservation.port)
    commands = {
        "sees": start(
            folder / "sees",
            *(
                "run",
                "--nproc-per-node",
                "2",
                "--bind",
                "--master_port",
                port,
                "job.py",
                "--flag",
                "$HOME ${local_rank} $$",
            ),
            script=SEES,
            stdout=theirs,
        ),
        "raises": start(folder / "raises", *START_JOB, "-m", "job", "-h", script=RAISES),
        "hangs": start(folder / "hangs", *START_JOB, "job.py", script=HANGS),
    }
    os.close(theirs)
    (folder / "sees" / "port").write_text(port)
    yield commands
    for command in commands.values():
        command.end()
    reservation.close()
    os.close(ours)


def test_what_a_rank_sees(side_by_side: dict[str, Command]):
    command = side_by_side["sees"]
    assert command.wait() == 0, command.err
    cpus = os.sched_getaffinity(0)
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    binding = bind_ranks(2, is_asked=True, environment=environment, allowed=cpus)
    for rank in ("0", "1"):
        assert json.loads((command.folder / f"rank_{rank}").read_text()) == {
            "env": {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": (command.folder / "port").read_text(),
                "OMP_NUM_THREADS": str(binding.num_threads),
            },
            "argv": ["job.py", "--flag", "$HOME ${local_rank} $$"],
            "path": str(command.folder),
            "name": "__main__",
            "torch": False,
            "tty": True,  # so a progress bar is drawn
            "cpus": list(binding.cpus[int(rank)]) if binding.cpus else sorted(cpus),
        }
    assert command.err == (f"colossalai run: {binding.note}\n" if binding.note else "")


@pytest.mark.long  # a module is run above as well, and whose exit code is told in test_failure
def test_a_module_that_exits(begin: Callable[..., Command]):
    command = begin(EXITS, *START_JOB, "-m", "job", "-h")
    assert command.wait() == 3
    assert sorted(command.out.splitlines()) == [f"rank {rank} of __main__ ['-h']" for rank in (0, 1)]
    assert re.fullmatch(
        r"colossalai run: rank 1 \(pid \d+\) failed with exit code 3: sys\.exit\(3\)", command.err.strip()
    )


def test_the_traceback_of_the_first_failure_is_shown_once(side_by_side: dict[str, Command]):
    command = side_by_side["raises"]
    assert command.wait() == 1
    assert re.search(
        r"colossalai run: rank 1 \(pid \d+\) failed with exit code 1: ValueError: a loss of NaN", command.err
    )
    assert command.err.count("Traceback (most recent call last)") == 1
    assert command.err.count('in train\n    raise ValueError("a loss of NaN")') == 1
    assert "_worker.py" not in command.err  # the frames before the script are ours
    assert "rank 0" not in command.err  # we ended it; it is not a failure


def test_nothing_is_left_of_a_stubborn_job(side_by_side: dict[str, Command]):
    command = side_by_side["raises"]
    command.wait()
    pids = [int(pid) for pid in command.out.split()]
    assert [is_gone(pid) for pid in pids] == [True, True]


def test_a_rank_that_has_failed_and_does_not_end_is_ended(side_by_side: dict[str, Command]):
    command = side_by_side["hangs"]
    assert command.wait() == 1
    assert "rank 1" in command.err
    assert "ValueError: never ends" in command.err
    assert is_gone(int(command.out))


@pytest.mark.parametrize("script", [PEERS, further(BARRIER)], ids=["peers", "barrier"])
def test_a_killed_rank_is_named_though_its_peers_fail_loudly(begin: Callable[..., Command], script: str):
    command = begin(script)
    pids = dict(word.split(":") for word in command.wait_for_words(2))
    os.kill(int(pids["1"]), signal.SIGKILL)
    assert command.wait() == 128 + signal.SIGKILL
    assert f"colossalai run: rank 1 (pid {pids['1']}) was killed by SIGKILL" in command.err
    assert command.err.count("Traceback") == 0
    assert all(is_gone(int(pid)) for pid in pids.values())


@pytest.mark.long  # the same within the grace, and the end of deaf ranks after it, are above and below
def test_ctrl_c_ends_ranks_that_ignore_it(begin: Callable[..., Command]):
    command = begin(DEAF_PARENT)  # torch's agent would kill it after 30 s, and not its child
    pids = command.wait_for_words(4)
    command.process.send_signal(signal.SIGINT)
    assert command.wait() == 130
    assert command.err.strip() == "colossalai run: stopped by SIGINT; its processes are ended"
    assert all(is_gone(int(pid)) for pid in pids)


def test_a_second_ctrl_c_does_not_wait(begin: Callable[..., Command]):
    command = begin(ASKED, driver=PATIENT)
    pids = command.wait_for_words(2)
    command.process.send_signal(signal.SIGINT)
    wait_until(lambda: command.out.count("asked") == 2)  # so the hour has begun that the first one gives
    assert not any(is_gone(int(pid)) for pid in pids)
    command.process.send_signal(signal.SIGINT)
    wait_until(lambda: all(is_gone(int(pid)) for pid in pids))
    assert command.wait() == 130


def test_ranks_may_save_when_the_job_is_terminated(begin: Callable[..., Command]):
    command = begin(SLEEPS)
    pids = command.wait_for_words(2)
    command.process.send_signal(signal.SIGTERM)
    assert command.wait() == 128 + signal.SIGTERM
    assert command.out.count("saved") == 2
    assert "stopped by SIGTERM" in command.err
    assert all(is_gone(int(pid)) for pid in pids)


def test_the_ranks_die_with_the_launcher(begin: Callable[..., Command]):
    command = begin(DEAF)
    pids = command.wait_for_words(2)
    command.process.kill()
    command.wait()
    wait_until(lambda: all(is_gone(int(pid)) for pid in pids))


def test_a_taken_port_names_its_holder_and_starts_nothing(begin: Callable[..., Command]):
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        port = listener.getsockname()[1]
        command = begin(
            "open('started', 'w')", "run", "--nproc_per_node", "1", "--master_port", str(port), "job.py"
        )
        assert command.wait() == 2
    assert f"port {port} is held by" in command.err
    assert f"(pid {os.getpid()}, user" in command.err
    assert "running since" in command.err
    assert not (command.folder / "started").exists()
