"""However a job on two hosts ends, all of it is gone within 30 s, and the report names who was first."""

import re
import signal
import time
from pathlib import Path

import psutil
import pytest

from colossalai.launcher._processes import GRACE_S
from tests.launcher.command import is_gone, wait_until
from tests.launcher.hosts.launch import Launch, timed, wait_until_empty
from tests.launcher.hosts.side_by_side import Site, side_by_side

pytestmark = pytest.mark.cluster

GONE_S = 30.0

# Ranks that ignore every request to end; each has a child in a session of its own that does, too.
PREPARE = """
import os, signal, subprocess, sys, time
code = '''
import signal, time
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
print(flush=True)
time.sleep(90)
'''
child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
child.stdout.readline()
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
print(f"rank {os.environ['RANK']}: {os.getpid()}")
"""
DEAF = f"{PREPARE}time.sleep(90)\n"

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


SLEEPS = """
import time, torch.distributed as dist
import colossalai
colossalai.launch_from_torch({"watchdog": {"timeout": 2.0, "folder": "reports"}}, verbose=False)
dist.barrier()
if dist.get_rank() == 1:
    time.sleep(100)
dist.barrier()
"""


def end_of(job: Launch) -> int:
    """Wait for the end of a job, and for the end of all that runs on the hosts; both within the time."""
    seconds = timed(lambda: job.wait(GONE_S))
    wait_until_empty(job.network, GONE_S - seconds)
    return job.wait(0)


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
    job = site.start(DEAF)
    pids = job.pids()
    job.process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    job.process.send_signal(signal.SIGINT)
    # Until the ranks are gone, no longer: on a busy machine the head takes its time to end.
    assert timed(lambda: wait_until(lambda: all(map(is_gone, pids.values())), GONE_S)) < GRACE_S - 0.5
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
        assert timed(lambda: job.wait(GONE_S)) > 8  # a short silence is none
        wait_until(lambda: all(is_gone(pid) for pid in pids.values()), GONE_S)
    finally:
        site.network.mend("host2")
    assert job.wait() == 1
    assert "host2 is lost: nothing was heard of it for 12 s: its link or the machine is down" in job.err
    wait_until_empty(site.network, GONE_S)


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
    wait_until_empty(site.network, GONE_S)


@side_by_side
def test_a_rank_that_sleeps_is_named_by_the_watchdog(site: Site) -> None:
    job = site.start(SLEEPS)
    assert end_of(job) == 1
    (report,) = (site.folder / "reports").glob("hang-*.txt")
    verdict = "did not enter barrier #2 of axis dp; it is at job.py:7 in <module>: `time.sleep(100)`"
    assert re.search(rf"^rank 1 \(host2\) {re.escape(verdict)}", report.read_text(), re.MULTILINE)
    assert re.search(r"^colossalai run: rank 1 on host2 \(pid \d+\)", job.err, re.MULTILINE)
    assert verdict in job.err
