"""However a job on two hosts ends, all of it is gone, and the report names who was first."""

import re
import signal
from pathlib import Path

import psutil
import pytest

from tests.launcher.command import is_gone, wait_until
from tests.launcher.hosts.launch import Launch, timed, wait_until_empty
from tests.launcher.hosts.side_by_side import Site, side_by_side

pytestmark = pytest.mark.cluster

# Ranks that ignore every request to end; each has a child in a session of its own that does, too.
PREPARE = """
import os, signal, subprocess, sys, time
code = '''
import signal, time
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
print(flush=True)
time.sleep(3600)
'''
child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
child.stdout.readline()
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
print(f"rank {os.environ['RANK']}: {os.getpid()}")
"""
DEAF = f"{PREPARE}time.sleep(3600)\n"

# Rank 1 fails when it is told to; rank 0 soon after, as the peer in a collective does.
RAISES = f"""{PREPARE}
while not os.path.exists("fail" + os.environ["RANK"]):
    time.sleep(0.01)
if os.environ["RANK"] == "1":
    open("fail0", "w").close()
    raise ValueError("a loss of NaN")
time.sleep(0.05)
raise RuntimeError("connection closed by peer")
"""

# Each rank says that it is asked to end, and goes on.
ASKED = """
import os, signal, time
rank = os.environ["RANK"]
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, frame: os.write(1, f"rank {rank} is asked\\n".encode()))
os.write(1, f"rank {rank}: {os.getpid()}\\n".encode())
time.sleep(3600)
"""

# The command, with an hour between the first signal to the ranks and the last one.
PATIENT = """
import sys
from colossalai.launcher import RunOptions, run
sys.exit(run(RunOptions(target="job.py", host_list="host1,host2", preflight=False, grace_s=3600.0)))
"""

SLEEPS = """
import time, torch.distributed as dist
import colossalai
colossalai.launch_from_torch({"watchdog": {"timeout": 10.0, "folder": "reports"}}, verbose=False)
dist.barrier()
if dist.get_rank() == 1:
    time.sleep(3600)
dist.barrier()
"""


def end_of(job: Launch) -> int:
    """Wait for the end of a job, and for the end of all that runs on the hosts."""
    code = job.wait()
    wait_until_empty(job.network)
    return code


@side_by_side
def test_a_rank_that_raises_is_named_with_its_traceback(site: Site) -> None:
    job = site.start(RAISES)
    pids = job.pids()
    (job.folder / "fail1").touch()
    assert end_of(job) == 1
    assert re.search(
        rf"^colossalai run: rank 1 on host2 \(pid {pids[1]}\) failed with exit code 1: ValueError: a loss of",
        job.err,
        re.MULTILINE,
    )
    assert job.err.count("Traceback (most recent call last)") == 1
    assert "rank 0" not in job.err.partition("after it:")[0]


@side_by_side
def test_a_killed_rank_is_named(site: Site) -> None:
    job = site.start(DEAF)
    pids = job.pids()
    psutil.Process(pids[0]).kill()
    assert end_of(job) == 128 + signal.SIGKILL
    assert f"colossalai run: rank 0 on host1 (pid {pids[0]}) was killed by SIGKILL" in job.err


@side_by_side
def test_a_signal_to_the_head_ends_all(site: Site) -> None:
    job = site.start(DEAF)
    job.pids()
    job.process.send_signal(signal.SIGTERM)
    assert end_of(job) == 128 + signal.SIGTERM
    assert "colossalai run: stopped by SIGTERM; its processes are ended" in job.err


@side_by_side
def test_a_second_ctrl_c_gives_no_grace(site: Site) -> None:
    job = site.start_driver(PATIENT, ASKED)
    pids = job.pids()
    job.process.send_signal(signal.SIGINT)
    job.wait_for(r"rank \d is asked$", 2)  # so the hour has begun that the first one gives
    assert not any(map(is_gone, pids.values()))
    job.process.send_signal(signal.SIGINT)
    assert end_of(job) == 128 + signal.SIGINT
    assert "colossalai run: stopped by SIGINT; its processes are ended" in job.err


@side_by_side
def test_a_killed_agent_leaves_nothing(site: Site) -> None:
    job = site.start(DEAF)
    job.pids()
    folders = [_folder_of(job.agent(host)) for host in ("host1", "host2")]
    job.agent("host2").kill()
    assert end_of(job) == 1
    assert "colossalai run: host2 is lost: its agent was killed by SIGKILL" in job.err
    assert [folder.exists() for folder in folders] == [False, False]


def _folder_of(agent: psutil.Process) -> Path:
    """Return the folder that an agent holds the lock of."""
    (lock,) = [file.path for file in agent.open_files() if file.path.endswith("-lock")]
    return Path(lock).parent


@side_by_side
def test_an_agent_that_hears_nothing_any_more_is_killed(site: Site) -> None:
    job = site.start(DEAF)
    job.pids()
    job.agent("host2").suspend()
    job.process.send_signal(signal.SIGTERM)  # it would end when asked, if it could hear
    assert end_of(job) == 128 + signal.SIGTERM


@side_by_side
def test_a_link_that_is_lost_ends_both_sides(site: Site) -> None:
    job = site.start(DEAF)
    pids = job.pids()
    site.network.cut("host2")
    try:
        assert timed(job.wait) > 8  # a short silence is none
        wait_until(lambda: all(is_gone(pid) for pid in pids.values()))
    finally:
        site.network.mend("host2")
    assert job.wait() == 1
    assert "host2 is lost: nothing was heard of it for 12 s: its link or the machine is down" in job.err
    wait_until_empty(site.network)


@side_by_side
def test_an_ssh_client_that_dies_is_a_lost_host(site: Site) -> None:
    job = site.start(DEAF)
    job.pids()
    job.ssh_client("host2").kill()
    assert end_of(job) == 1
    assert "colossalai run: host2 is lost: ssh, which leads to it, was killed by SIGKILL" in job.err


@side_by_side
def test_the_hosts_notice_that_the_head_was_killed(site: Site) -> None:
    job = site.start(DEAF)
    job.pids()
    job.process.kill()
    job.wait()
    wait_until_empty(site.network)


@side_by_side
def test_a_rank_that_sleeps_is_named_by_the_watchdog(site: Site) -> None:
    job = site.start(SLEEPS)
    assert end_of(job) == 1
    (report,) = (site.folder / "reports").glob("hang-*.txt")
    verdict = "did not enter barrier #2 of axis dp; it is at job.py:7 in <module>: `time.sleep(3600)`"
    assert re.search(rf"^rank 1 \(host2\) {re.escape(verdict)}", report.read_text(), re.MULTILINE)
    assert re.search(r"^colossalai run: rank 1 on host2 \(pid \d+\)", job.err, re.MULTILINE)
    assert verdict in job.err
